"""Masks of heads: some see what others do not."""

import dataclasses
from collections.abc import Sequence
from typing import Any, override

import jax

from jattn.masks.base import Coverage, Mask, Pairs, Tiles
from jattn.masks.positions import Sinks, Window


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OnlyHeads(Mask):
    """Every key for the query heads of `heads`, none for the others; `OnlyHeads(h) | m`: the others see m."""

    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(sorted(set(self.heads))))

    def _has(self, head: Any) -> Any:
        sees = head != head
        for one in self.heads:
            sees = sees | (head == one)
        return sees

    @override
    def sees(self, pairs: Pairs) -> Any:
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
    return OnlyHeads(tuple(retrieval_heads)) | Sinks(num_first) | Window(left=num_recent - 1)
