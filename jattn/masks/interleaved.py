"""A mask of a request's positions, looked at from one rank's keys, which lie between those of others."""

from typing import Any, ClassVar, override

from jaxtyping import Array, Int32

from jattn.masks.base import Mask
from jattn.masks.integers import quotient, remainder
from jattn.masks.pairs import Coverage, Pairs, Sizes, Tiles
from jattn.pytree import pytree, static


@pytree
class Interleaved(Mask):
    """What `mask` says of the positions that a rank's own keys, and the queries, have in their request.

    A rank stores position p where `(p // interleave) % num_ranks` is its number, close together. A query is
    said to stand before so many keys as follow it among the rank's own, whoever stores these.

    Attributes:
        mask: Of positions; holds no arrays.
        rank: The rank whose keys they are.
        shift: Of each row [reqs]: its keys that other ranks store, by which its queries stand further behind.
        num_ranks: Static.
        interleave: Static: neighbouring positions that stay together.
    """

    mask: Mask = static()
    rank: Int32[Array, ""]
    shift: Int32[Array, " reqs"]
    num_ranks: int = static()
    interleave: int = static()

    row_axes: ClassVar[dict[str, int]] = {"shift": 1}

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self.mask.num_heads

    @override
    def check(self, sizes: Sizes) -> None:
        super().check(sizes)
        self.mask.check(Sizes(num_q_heads=sizes.num_q_heads))

    def position(self, key: Any) -> Any:
        """Where a key of the rank stands in its request."""
        turn, offset = quotient(key, self.interleave), remainder(key, self.interleave)
        return (turn * self.num_ranks + self.rank) * self.interleave + offset

    @override
    def sees(self, pairs: Pairs) -> Any:
        moved = {"query": pairs.query + self.shift[pairs.row], "key": self.position(pairs.key)}
        return self.mask.sees(pairs._replace(**moved))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        """Of tiles that have the keys between, too: they are seen in part where the rank's own are."""
        shift, (queries, keys) = self.shift[tiles.row], tiles.size
        between = tiles._replace(
            first_query=tiles.first_query + shift,
            last_query=tiles.last_query + shift,
            first_key=self.position(tiles.first_key),
            last_key=self.position(tiles.last_key),
            size=(queries, (keys + self.interleave) * self.num_ranks),
        )
        return self.mask.coverage(between)
