"""Layers that share a block table: their blocks, and how far back they look."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.block_tables import NULL_BLOCK
from jattn.serving.engine.progress import Progress
from jattn.serving.engine.reach import Reach, found_within


class CacheGroup(NamedTuple):
    """Some layers' blocks. Each request has as many entries in the table of one group as in that of another.

    Attributes:
        manager: Whose blocks.
        reach: How far back these layers look; None = to the beginning.
    """

    manager: BlockManager
    reach: Reach | None = None

    @property
    def longest(self) -> int:
        """Tokens that a request may have: those that fit; any number where it gives old ones up."""
        size = self.manager.block_size
        fit = self.manager.capacity * size
        return sys.maxsize if self.reach is not None and self.reach.fits(fit, size) else fit

    def give_up(self, request: Progress) -> None:
        """Takes back the blocks of a request that no token to come sees."""
        if self.reach is not None:
            self.manager.give_up(request.request_id, self.reach.first_visible(request.num_computed))

    def fitting(self, request: Progress, count: int) -> int:
        """Has a request give up what it will not see again; how many of its next tokens fit then."""
        if self.reach is None:
            return count
        self.give_up(request)
        size, first = self.manager.block_size, request.num_computed
        most = (self.manager.capacity + self.reach.first_visible(first) // size) * size
        return min(count, most - first)

    def num_missing(self, request: Progress, end: int) -> int:
        """Blocks short of what a request needs to run to token number `end`; 0 or less = it can."""
        wanted = self.manager.blocks_to_extend(request.request_id, request.num_computed, end)
        return wanted - self.manager.num_free

    def can_extend(self, requests: Sequence[Progress], count: int) -> bool:
        """Whether the blocks of so many tokens more for each of these are free."""
        ends = [(one.request_id, one.num_computed, one.num_computed + count) for one in requests]
        return sum(self.manager.blocks_to_extend(*one) for one in ends) <= self.manager.num_free

    def find(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """The blocks of the longest beginning of `digests` behind which a request may go on."""
        if self.reach is None:
            return self.manager.find(digests)
        return found_within(self.reach, self.manager, digests)

    def most_behind(self, found: Sequence[int], num_computed: int) -> int:
        """Tokens behind the computed ones that the free blocks hold, of a request that shares `found`."""
        held = len(found) + self.manager.num_free_without(found)
        return held * self.manager.block_size - num_computed

    def can_begin(self, request: Progress, found: Sequence[int], most_at_once: int) -> bool:
        """Whether as many blocks are free as a request must see before it begins.

        Args:
            request: It has no blocks.
            found: Those that it shares.
            most_at_once: Most new tokens of a step.
        """
        return self._wanted(request, found, most_at_once) <= self.manager.num_free_without(found)

    def _wanted(self, request: Progress, found: Sequence[int], most_at_once: int) -> int:
        whole = self.manager.blocks_for(request.num_tokens) - len(found)
        if self.reach is None:
            return whole
        at_once = self.reach.blocks_at_once(min(request.num_new, most_at_once), self.manager.block_size)
        alone = self.manager.capacity - sum(block != NULL_BLOCK for block in found)
        return min(whole, at_once, alone)


def found_in_all(groups: Sequence[CacheGroup], digests: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Of each group the blocks of the longest beginning that all groups have what they need of.

    Source: vLLM V1 `HybridKVCacheCoordinator.find_longest_cache_hit`.
    """
    while True:
        found = [group.find(digests) for group in groups]
        count = min(map(len, found))
        if all(len(blocks) == count for blocks in found):
            return found
        digests = digests[:count]
