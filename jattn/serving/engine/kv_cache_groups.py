"""How far back a model looks: keys that no layer sees any more need no place."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx

from jattn.nn import PagedAttention
from jattn.serving.engine.block_manager import NULL_BLOCK, BlockManager
from jattn.serving.engine.scheduled_step import Progress

SEES_ALL = (None, None)  # of a layer without a window or chunks


@dataclasses.dataclass(frozen=True)
class Reach:
    """Of a model whose layers all have a window or chunks, or of those layers of it that have.

    Attributes:
        layers: For each kind of layer its left window and its chunk_size, as `AttentionSpec` has them; one of
            them may be None.
    """

    layers: frozenset[tuple[int | None, int | None]]

    def first_visible(self, position: int) -> int:
        """The first position that some layer sees from `position` or from a later one."""
        return min(_first_visible(position, *layer) for layer in self.layers)

    @property
    def span(self) -> int:
        """Most positions before a query that it may see."""
        reaches = ([r for r in (left, chunk and chunk - 1) if r is not None] for left, chunk in self.layers)
        return max(map(min, reaches))

    def blocks_at_once(self, num_new: int, block_size: int) -> int:
        """Most blocks that a request with so many new tokens in a step has need of at once."""
        return -(-(self.span + num_new) // block_size) + 1

    def blocks_of_all(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> int:
        """Most blocks that so many requests have need of, with so many new tokens in a step in all.

        Each may hold the block before its window and begin another behind it.
        """
        return max_num_seqs * (-(-self.span // block_size) + 2) + -(-max_num_batched_tokens // block_size)

    def fits(self, num_tokens: int, block_size: int) -> bool:
        """Whether a request of any length runs, a token at a time, in a cache of so many tokens."""
        return num_tokens >= self.span + block_size


def _first_visible(position: int, left: int | None, chunk_size: int | None) -> int:
    in_window = 0 if left is None else position - left
    in_chunk = 0 if chunk_size is None else position // chunk_size * chunk_size
    return max(in_window, in_chunk, 0)


def reach_of(model: Any) -> Reach | None:
    """What a model's PagedAttention layers say; None where one of them sees all, or there is none."""
    layers = _layers_of(model)
    return Reach(layers) if layers and SEES_ALL not in layers else None


def near_layers_of(model: Any) -> tuple[bool, ...]:
    """Which layers of a model have blocks of their own, which see less than others; empty = none."""
    return tuple(getattr(model, "near_layers", ()))


def near_reach_of(model: Any) -> Reach | None:
    """What the layers say that have blocks of their own; None where there are none."""
    return Reach(_layers_of(model) - {SEES_ALL}) if near_layers_of(model) else None


def _layers_of(model: Any) -> frozenset[tuple[int | None, int | None]]:
    specs = [module.spec for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
    return frozenset((spec.window[0] if spec.window else None, spec.chunk_size) for spec in specs)


def turning_length_of(model: Any) -> int | None:
    """Tokens of a request beyond which a model turns all its keys otherwise; None = of no length."""
    ropes = [module.rope for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
    lengths: list[int | None] = [getattr(rope, "turning_length", None) for rope in ropes]
    return min((length for length in lengths if length is not None), default=None)


def found_within(reach: Reach, manager: BlockManager, digests: Sequence[bytes]) -> tuple[int, ...]:
    """The published blocks of the longest beginning behind which a request may go on.

    Only those must be there that the next token sees; in the place of those before stands the null block.

    Source: vLLM V1 `SlidingWindowManager.find_longest_cache_hit`.
    """
    size, first_there, best = manager.block_size, 0, (0, 0)
    for count, digest in enumerate(digests, 1):
        if not manager.is_published(digest):
            first_there = count
        first = min(reach.first_visible(count * size) // size, count)
        if first_there <= first:
            best = first, count
    first, count = best
    return (NULL_BLOCK,) * first + manager.find(digests[first:count])


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
