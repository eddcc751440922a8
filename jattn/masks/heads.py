"""Masks of heads: some see what others do not."""

import dataclasses
from collections.abc import Sequence
from typing import Any, override

import jax

from jattn.masks.base import Mask
from jattn.masks.checks import require_ints
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles
from jattn.masks.positions import Sinks, Window
from pallas_kernels.checks import require


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OnlyHeads(Mask):
    """Every key for the query heads of `heads`, none for the others; `OnlyHeads(h) | m`: the others see m."""

    heads: Sequence[int]

    def __post_init__(self) -> None:
        is_several = isinstance(self.heads, Sequence) and not isinstance(self.heads, str)
        require(is_several, "heads", "be a tuple of query heads", repr(self.heads))
        for head in self.heads:
            require_ints(0, **{"each of heads": head})
        object.__setattr__(self, "heads", tuple(sorted(set(map(int, self.heads)))))

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return None, 1

    @override
    def check(self, sizes: BatchSizes) -> None:
        super().check(sizes)
        is_there = not self.heads or self.heads[-1] < sizes.num_q_heads
        require(is_there, "OnlyHeads.heads", f"lie in [0, {sizes.num_q_heads})", self.heads)

    def _has(self, head: Any) -> Any:
        visible = head != head
        for one in self.heads:
            visible = visible | (head == one)
        return visible

    @override
    def visible(self, pairs: Pairs) -> Any:
        return self._has(pairs.head)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        return Coverage(self._has(tiles.head), self._has(tiles.head))


def streaming_heads(retrieval_heads: Sequence[int], *, num_first: int, num_recent: int) -> Mask:
    """Retrieval heads see everything; the others their request's first keys and the most recent.

    Args:
        retrieval_heads: Query heads of this device.
        num_first: Keys at the request's start that every head sees.
        num_recent: Keys up to and with the query's own that every head sees.

    Source: DuoAttention.
    """
    require_ints(1, num_recent=num_recent)
    return OnlyHeads(retrieval_heads) | Sinks(num_first) | Window(left=num_recent - 1)
