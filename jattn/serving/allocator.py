"""Which blocks a request gets: new ones, those of a beginning that is cached, those of a sibling."""

import itertools
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from jattn.serving.block_manager import BlockManager
from jattn.serving.block_tables import NULL_BLOCK
from jattn.serving.progress import Progress
from jattn.serving.reach import Reach, found_within


class Allocator:
    """The scheduler's side of a block manager: knows how far requests are, and what they will see again."""

    def __init__(
        self,
        manager: BlockManager,
        max_num_batched_tokens: int,
        reach: Reach | None,
        batch_invariant: bool = False,
        turning_length: int | None = None,
    ) -> None:
        """Arguments as `Scheduler` has them."""
        self._turning_length = turning_length
        self._manager, self._reach, self._most_at_once = manager, reach, max_num_batched_tokens
        self._prompts_alone = batch_invariant  # generated tokens are neither found nor read with a prompt
        self.copies: dict[int, list[tuple[int, int]]] = {}  # of each request, until its step has run

    @property
    def longest(self) -> int:
        """As `Scheduler.capacity_tokens`."""
        size = self._manager.block_size
        fit = self._manager.capacity * size
        return sys.maxsize if self._reach is not None and self._reach.fits(fit, size) else fit

    def fitting(self, request: Progress, count: int) -> int:
        """Has a request give up what it will not see again; how many of its next tokens fit then."""
        manager, first = self._manager, request.num_computed
        if self._reach is None:
            return count
        behind = self._reach.first_visible(first)
        manager.give_up(request.request_id, behind)
        most = (manager.capacity + behind // manager.block_size) * manager.block_size
        return min(count, most - first)

    def num_missing(self, request: Progress, end: int) -> int:
        """Blocks short of what a request needs to run to token number `end`; 0 or less = it can."""
        manager = self._manager
        return manager.blocks_to_extend(request.request_id, request.num_computed, end) - manager.num_free

    def extend(self, request: Progress, end: int) -> bool:
        """Gives a request room up to a token; False: too few blocks are free, and nothing has changed."""
        if self.num_missing(request, end) > 0:
            return False
        if copies := self._manager.extend(request.request_id, request.num_computed, end):
            self.copies[request.request_id] = copies
        request.room = self._manager.room(request.request_id)
        return True

    def can_extend(self, requests: Sequence[Progress], count: int) -> bool:
        """Whether all of these can have so many tokens more, and none of them less."""
        if any(self.fitting(request, count) < count for request in requests):
            return False
        ends = [(one.request_id, one.num_computed, one.num_computed + count) for one in requests]
        return sum(self._manager.blocks_to_extend(*one) for one in ends) <= self._manager.num_free

    def block_tables(self, request_ids: Sequence[int]) -> np.ndarray:
        """As `BlockManager` has them."""
        return self._manager.block_tables(request_ids)

    def turning(self, requests: Iterable[Progress], num_draft_tokens: int = 0) -> list[Progress]:
        """Those whose cached keys would be turned by other frequencies, were they made in the next step."""
        if self._turning_length is None:
            return []
        begun = (one for one in requests if one.num_computed and not self._is_long(one.num_computed))
        return [one for one in begun if self._is_long(one.num_tokens + num_draft_tokens)]

    def copies_of(self, request_ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """What is to be copied before a step of these requests."""
        if not self.copies:
            return ()
        return tuple(itertools.chain.from_iterable(self.copies.get(one, ()) for one in request_ids))

    def begin(self, request: Progress, budget: int) -> int:
        """How many tokens a request without blocks begins with; 0 while blocks for all of it are not free."""
        manager, found = self._manager, self._found(request)
        free = manager.num_free_without(found)
        if self._blocks_wanted(request, found) > free:
            return 0
        before = request.num_computed, request.num_published
        request.num_computed = len(found) * manager.block_size
        request.num_published = len(found)
        most = (len(found) + free) * manager.block_size - request.num_computed
        num_new = request.num_alike if self._prompts_alone else request.num_new
        count = min(num_new, budget, most)
        if self._is_long(request.num_tokens) and not self._is_long(request.num_computed + count):
            request.num_computed, request.num_published = before
            return 0  # until the budget is large enough
        manager.allocate(request.request_id, request.num_computed + count, found)
        request.room = manager.room(request.request_id)
        return count

    def go_on(self, request: Progress, budget: int) -> int:
        """How many tokens a forked request runs; 0 while blocks for all of them are not free."""
        if self.num_missing(request, request.num_tokens) > 0:
            return 0
        count = min(request.num_new, budget)
        self.extend(request, request.num_computed + count)
        return count

    def fork(self, parent: Progress, child: Progress) -> None:
        """Shares what is cached of a prompt, all but its last token."""
        self._manager.fork(parent.request_id, child.request_id, parent.num_shared)
        child.num_computed, child.is_stale = parent.num_shared, parent.is_stale

    def publish(self, request: Progress) -> None:
        """Lets others find the blocks that are computed and whose tokens the host knows."""
        if request.hashes is None or request.is_stale:
            return
        num_computed = request.num_computed
        if self._prompts_alone:
            num_computed = min(num_computed, request.num_prompt_tokens)
        num_full = min(num_computed // self._manager.block_size, len(request.hashes))
        for index in range(request.num_published, num_full):
            digest = self._of_length(request.hashes[index], request.num_computed)
            self._manager.publish(request.request_id, index, digest)
        request.num_published = num_full

    def free(self, request: Progress) -> None:
        """Gives a request's blocks back; nothing is copied onto them any more."""
        self.publish(request)
        self._manager.free(request.request_id)
        self.copies.pop(request.request_id, None)

    # --------------------------------------------------------------------------------------- inside
    def _is_long(self, num_tokens: int) -> bool:
        return self._turning_length is not None and num_tokens > self._turning_length

    def _of_length(self, digest: bytes, num_tokens: int) -> bytes:
        """A block's digest in a request of so many tokens."""
        return digest + b"long" if self._is_long(num_tokens) else digest

    def _blocks_wanted(self, request: Progress, found: Sequence[int]) -> int:
        """Free blocks that a request must see before it begins, behind those that it shares."""
        manager = self._manager
        whole = manager.blocks_for(request.num_tokens) - len(found)
        if self._reach is None:
            return whole
        num_new = min(request.num_new, self._most_at_once)
        at_once = self._reach.blocks_at_once(num_new, manager.block_size)
        alone = manager.capacity - sum(block != NULL_BLOCK for block in found)
        return min(whole, at_once, alone)

    def _found(self, request: Progress) -> Sequence[int]:
        """Full blocks of a request's beginning that others have computed; its last token is always new.

        Of its prompt's beginning where prompts stand alone: a prompt's last token is.
        """
        if request.hashes is None:
            return ()
        num_tokens = request.num_prompt_tokens if self._prompts_alone else request.num_tokens
        most = (num_tokens - 1) // self._manager.block_size
        digests = [self._of_length(one, request.num_tokens) for one in request.hashes[:most]]
        if self._reach is None:
            return self._manager.find(digests)
        return found_within(self._reach, self._manager, digests)
