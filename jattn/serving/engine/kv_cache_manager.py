"""Which blocks a request gets: new ones, those of a beginning that is cached, those of a sibling."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.kv_cache_groups import CacheGroup, Reach, found_in_all
from jattn.serving.engine.scheduled_step import Progress
from pallas_kernels.checks import require, require_type

type BlockPairs = tuple[tuple[int, int], ...]


class Allocator:
    """The scheduler's side of block managers: knows how far requests are, and what they will see again.

    Where some layers alone look back a little, they have blocks of their own. A request then has entries for
    the same tokens in two tables, and runs where both managers have blocks for it.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_batched_tokens: int,
        reach: Reach | None,
        batch_invariant: bool = False,
        turning_length: int | None = None,
        near_manager: BlockManager | None = None,
    ) -> None:
        """Arguments and errors as `Scheduler` has them."""
        require_type("block_manager", manager, BlockManager, "whose blocks requests have")
        if near_manager is None:
            self._groups = [CacheGroup(manager, reach)]
        else:
            require(reach is not None, "reach", "say how far the layers of near_manager look", reach)
            size, rule = near_manager.block_size, f"be the other layers' ({manager.block_size})"
            require(size == manager.block_size, "near_manager.block_size", rule, size)
            self._groups = [CacheGroup(manager), CacheGroup(near_manager, reach)]
        self._turning_length = turning_length
        self._manager, self._most_at_once = manager, max_num_batched_tokens
        self._prompts_alone = batch_invariant  # generated tokens are neither found nor read with a prompt
        # (source, target) of each request in each group, until its step has run.
        self.copies: dict[int, list[list[tuple[int, int]]]] = {}

    @property
    def longest(self) -> int:
        """As `Scheduler.capacity_tokens`."""
        longest = min(group.longest for group in self._groups)
        fit = min(group.manager.capacity for group in self._groups) * self._manager.block_size
        if self._turning_length is None or self._is_long(fit):
            return longest
        return min(longest, self._turning_length)  # a longer one begins with more than fits, windows or not

    @property
    def num_forks(self) -> int:
        """How often somebody has come to share another's blocks."""
        return self._manager.num_forks

    def fitting(self, request: Progress, count: int) -> int:
        """Has a request give up what it will not see again; how many of its next tokens fit then."""
        for group in self._groups:
            count = group.fitting(request, count)
        return count

    def give_up(self, request: Progress) -> None:
        """Takes back what no token to come of a request sees."""
        for group in self._groups:
            group.give_up(request)

    def num_missing(self, request: Progress, end: int) -> int:
        """Blocks short of what a request needs to run to token number `end`; 0 or less = it can."""
        return max([group.num_missing(request, end) for group in self._groups])

    def extend(self, request: Progress, end: int) -> bool:
        """Gives a request room up to a token; False: too few blocks are free, and nothing has changed."""
        if self.num_missing(request, end) > 0:
            return False
        where = request.request_id, request.num_computed, end
        copies = [group.manager.extend(*where) for group in self._groups]
        if any(copies):
            self.copies[request.request_id] = copies
        request.room = self._manager.room(request.request_id)
        return True

    def can_extend(self, requests: Sequence[Progress], count: int) -> bool:
        """Whether all of these can have so many tokens more, and none of them less."""
        if any(self.fitting(request, count) < count for request in requests):
            return False
        return all(group.can_extend(requests, count) for group in self._groups)

    def block_tables(self, request_ids: Sequence[int]) -> list[np.ndarray]:
        """Of each group, as `BlockManager` has them."""
        return [group.manager.block_tables(request_ids) for group in self._groups]

    def turning(self, requests: Iterable[Progress], num_draft_tokens: int = 0) -> list[Progress]:
        """Those whose cached keys would be turned by other frequencies, were they made in the next step."""
        if self._turning_length is None:
            return []
        begun = (one for one in requests if one.num_computed and not self._is_long(one.num_computed))
        return [one for one in begun if self._is_long(one.num_tokens + num_draft_tokens)]

    def copies_of(self, request_ids: Iterable[int]) -> list[BlockPairs]:
        """What is to be copied before a step of these requests, in each group."""
        if not self.copies:
            return [()] * len(self._groups)
        of_each = [self.copies[one] for one in request_ids if one in self.copies]
        chained = itertools.chain.from_iterable
        return [tuple(chained(copies[nth] for copies in of_each)) for nth in range(len(self._groups))]

    def begin(self, request: Progress, budget: int) -> int:
        """How many tokens a request without blocks begins with; 0 while blocks for all of it are not free."""
        found = self._found(request)
        each = list(zip(self._groups, found, strict=True))
        if not all(group.can_begin(request, blocks, self._most_at_once) for group, blocks in each):
            return 0
        before, num_found = (request.num_computed, request.num_published), len(found[0])
        request.num_computed, request.num_published = num_found * self._manager.block_size, num_found
        most = min(group.most_behind(blocks, request.num_computed) for group, blocks in each)
        num_new = request.num_alike if self._prompts_alone else request.num_new
        count = min(num_new, budget, most)
        if self._is_long(request.num_tokens) and not self._is_long(request.num_computed + count):
            request.num_computed, request.num_published = before
            return 0  # until the budget is large enough
        for group, blocks in each:
            group.manager.allocate(request.request_id, request.num_computed + count, blocks)
        request.room = self._manager.room(request.request_id)
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
        for group in self._groups:
            group.manager.fork(parent.request_id, child.request_id, parent.num_shared)
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
            for group in self._groups:
                group.manager.publish(request.request_id, index, digest)
        request.num_published = num_full

    def free(self, request: Progress) -> None:
        """Gives a request's blocks back; nothing is copied onto them any more."""
        self.publish(request)
        for group in self._groups:
            group.manager.free(request.request_id)
        self.copies.pop(request.request_id, None)

    def free_all(self) -> None:
        """As `BlockManager.free_all`."""
        self.copies.clear()
        for group in self._groups:
            group.manager.free_all()

    def unpublish_all(self) -> None:
        """Nothing that is cached is found by requests to come."""
        for group in self._groups:
            group.manager.unpublish_all()

    # --------------------------------------------------------------------------------------- inside
    def _is_long(self, num_tokens: int) -> bool:
        return self._turning_length is not None and num_tokens > self._turning_length

    def _of_length(self, digest: bytes, num_tokens: int) -> bytes:
        """A block's digest in a request of so many tokens."""
        return digest + b"long" if self._is_long(num_tokens) else digest

    def _found(self, request: Progress) -> list[tuple[int, ...]]:
        """Full blocks of a request's beginning that others have computed; its last token is always new.

        Of its prompt's beginning where prompts stand alone: a prompt's last token is.
        """
        if request.hashes is None:
            return [()] * len(self._groups)
        num_tokens = request.num_prompt_tokens if self._prompts_alone else request.num_tokens
        most = (num_tokens - 1) // self._manager.block_size
        digests = [self._of_length(one, request.num_tokens) for one in request.hashes[:most]]
        return found_in_all(self._groups, digests)
