"""Masks that depend on the query head."""

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
    """All keys for the query heads in `heads`, and no keys for the other heads.

    `OnlyHeads(heads) | mask` applies `mask` to the other heads only.

    Attributes:
        heads: Query heads that attend to everything.
    """

    heads: Sequence[int]

    def __post_init__(self) -> None:
        is_sequence = isinstance(self.heads, Sequence) and not isinstance(self.heads, str)
        require(is_sequence, "heads", "be a tuple of query heads", repr(self.heads))
        for index, head in enumerate(self.heads):
            require_ints(0, **{f"heads[{index}]": head})
        object.__setattr__(self, "heads", tuple(sorted(set(map(int, self.heads)))))

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return None, 1

    @override
    def check(self, sizes: BatchSizes) -> None:
        super().check(sizes)
        are_valid = not self.heads or self.heads[-1] < sizes.num_q_heads
        require(are_valid, "OnlyHeads.heads", f"lie in [0, {sizes.num_q_heads})", self.heads)

    def _contains(self, head: Any) -> Any:
        visible = head != head
        for selected_head in self.heads:
            visible = visible | (head == selected_head)
        return visible

    @override
    def visible(self, pairs: Pairs) -> Any:
        return self._contains(pairs.head)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        return Coverage(self._contains(tiles.head), self._contains(tiles.head))


def streaming_heads(retrieval_heads: Sequence[int], *, num_first: int, num_recent: int) -> Mask:
    """Return a mask under which retrieval heads see all keys, and all other heads the first and recent keys.

    Args:
        retrieval_heads: Query heads on this device that attend to all keys.
        num_first: Number of keys at the start of the request that every head attends to.
        num_recent: Number of most recent keys, including the query's own, that every head attends to.

    Source: DuoAttention.
    """
    require_ints(1, num_recent=num_recent)
    return OnlyHeads(retrieval_heads) | Sinks(num_first) | Window(left=num_recent - 1)
