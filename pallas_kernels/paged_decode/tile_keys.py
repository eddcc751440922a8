"""Which keys a tile holds: neighbours, or pieces that a request's list of sparse blocks names."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT
from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.shared.types import Ref, Scalar, Tile

NOWHERE = 1 << 30  # a key past every request's end


@dataclasses.dataclass(frozen=True)
class TileKeys:
    """The keys of a tile: `piece` neighbours from each of `firsts`, which ascend.

    `heads` has a bit for each query head of the group that sees the piece; empty where all do.
    """

    firsts: tuple[Scalar, ...]
    heads: tuple[Scalar, ...]
    piece: int

    def of_rows(self, rows: Tile) -> Tile:
        """The key of each row of the tile."""
        return rows + self._pick(rows, [first - i * self.piece for i, first in enumerate(self.firsts)])

    def over(self, shape: tuple[int, ...]) -> Tile:
        """The key of each row of a tile of this shape, in the layout WGMMA."""
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        return self.of_rows(rows)

    def heads_of(self, rows: Tile) -> Tile:
        """The bits of the piece that each row of the tile is in."""
        return self._pick(rows, self.heads)

    def _pick(self, rows: Tile, of_pieces: Sequence[Scalar]) -> Tile:
        value = of_pieces[0]
        for i, of_piece in enumerate(of_pieces[1:], 1):
            value = jnp.where(rows >= i * self.piece, of_piece, value)
        return value

    def reach_out(self, low: Scalar, high: Scalar) -> Scalar:
        """Whether one of them is not in [low, high)."""
        return (self.firsts[0] < low) | (self.firsts[-1] + self.piece > high)


def entries_of(segment: Segment, tile_index: Scalar | int, ids: Ref, spec: DecodeSpec) -> tuple[Scalar, ...]:
    """What a segment's list says of a tile's keys, as it stands there; without lists the tile's first key.

    A list is in global memory: who asks a tile or more before keys_of needs the answer does not wait for it.

    Args:
        segment: The segment.
        tile_index: Counts its tiles; may be past the last.
        ids: [reqs * kv_heads, max_listed]: sparse blocks, or None. Not read at all without lists.
        spec: Static.
    """
    if segment.num_listed is None:
        return ((segment.first_tile + tile_index) * spec.sizes.tile_kv,)
    last = jnp.maximum(segment.num_listed - 1, 0)
    numbers, _ = _listed_at(segment, tile_index, spec)
    return tuple(ids[segment.row, jnp.minimum(number, last)] for number in numbers)


def keys_of(segment: Segment, tile_index: Scalar, entries: tuple[Scalar, ...], spec: DecodeSpec) -> TileKeys:
    """The keys of a tile of a segment; for `entries` see entries_of."""
    shape = spec.shape
    if segment.num_listed is None:
        return TileKeys(entries, (), spec.piece)
    numbers, inside = _listed_at(segment, tile_index, spec)
    firsts, heads = [], []
    for number, entry in zip(numbers, entries, strict=True):
        if shape.lists_have_head_bits:
            heads.append(lax.shift_right_logical(entry, jnp.int32(QUERY_BLOCK_SHIFT)))
            entry = entry & ((1 << QUERY_BLOCK_SHIFT) - 1)
        is_live = number < segment.num_listed
        firsts.append(jnp.where(is_live, entry * (shape.list_block_size or 0) + inside, NOWHERE))
    return TileKeys(tuple(firsts), tuple(heads), spec.piece)


def _listed_at(segment: Segment, tile_index: Scalar | int, spec: DecodeSpec) -> tuple[list[Scalar], Scalar]:
    """Where in the list the sparse blocks of a tile stand, and where in each of them the tile begins."""
    size, tile_kv, piece = spec.shape.list_block_size, spec.sizes.tile_kv, spec.piece
    assert size is not None
    nth = segment.first_tile + tile_index
    tiles_per_block, blocks_per_tile = max(size // tile_kv, 1), tile_kv // piece
    block = lax.div(nth, jnp.int32(tiles_per_block))
    inside = lax.rem(nth, jnp.int32(tiles_per_block)) * piece
    return [block * blocks_per_tile + i for i in range(blocks_per_tile)], inside
