"""The keys of a tile: consecutive ones, or runs that a request's list of sparse blocks selects."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT
from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.shared.types import Ref, Scalar, Tile

NO_KEY = 1 << 30  # a key past every request's end


@dataclasses.dataclass(frozen=True)
class TileKeys:
    """The keys of a tile, in runs of consecutive keys.

    Attributes:
        firsts: First key of each run, ascending.
        head_bits: For each run, one bit per query head of the group that visits it; empty if all heads do.
        run_length: Static number of keys per run.
    """

    firsts: tuple[Scalar, ...]
    head_bits: tuple[Scalar, ...]
    run_length: int

    def row_keys(self, rows: Tile) -> Tile:
        """Return the key of each row of the tile."""
        return rows + self._select(rows, [first - i * self.run_length for i, first in enumerate(self.firsts)])

    def over(self, shape: tuple[int, ...]) -> Tile:
        """Return the key of each row of a tile of this shape, in the layout WGMMA."""
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        return self.row_keys(rows)

    def row_head_bits(self, rows: Tile) -> Tile:
        """Return the head bits of the run that each row of the tile is in."""
        return self._select(rows, self.head_bits)

    def _select(self, rows: Tile, run_values: Sequence[Scalar]) -> Tile:
        """Return for each row the value of its run."""
        value = run_values[0]
        for i, run_value in enumerate(run_values[1:], 1):
            value = jnp.where(rows >= i * self.run_length, run_value, value)
        return value

    def exceed(self, low: Scalar, high: Scalar) -> Scalar:
        """Return whether any key is outside [low, high)."""
        return (self.firsts[0] < low) | (self.firsts[-1] + self.run_length > high)


def read_entries(
    segment: Segment, tile_index: Scalar | int, ids: Ref, spec: DecodeSpec
) -> tuple[Scalar, ...]:
    """Return the list entries of a tile; without lists, the tile's first key.

    A list is in global memory: callers read the entries a tile or more ahead of `keys_of`, so that they do
    not wait for them.

    Args:
        segment: Segment of the tile.
        tile_index: Index of the tile in the segment; may be past the last.
        ids: Lists of sparse blocks, [reqs * kv_heads, max_listed]; unused without lists.
        spec: Static description of the call.
    """
    if segment.num_listed is None:
        return ((segment.first_tile + tile_index) * spec.sizes.tile_kv,)
    last = jnp.maximum(segment.num_listed - 1, 0)
    positions, _ = _list_positions(segment, tile_index, spec)
    return tuple(ids[segment.row, jnp.minimum(position, last)] for position in positions)


def keys_of(segment: Segment, tile_index: Scalar, entries: tuple[Scalar, ...], spec: DecodeSpec) -> TileKeys:
    """Return the keys of a tile of a segment from what `read_entries` returned for it."""
    shape = spec.shape
    if segment.num_listed is None:
        return TileKeys(entries, (), spec.run_length)
    positions, offset = _list_positions(segment, tile_index, spec)
    firsts, head_bits = [], []
    for position, entry in zip(positions, entries, strict=True):
        if shape.lists_have_head_bits:
            head_bits.append(lax.shift_right_logical(entry, jnp.int32(QUERY_BLOCK_SHIFT)))
            entry = entry & ((1 << QUERY_BLOCK_SHIFT) - 1)
        is_valid = position < segment.num_listed
        firsts.append(jnp.where(is_valid, entry * (shape.list_block_size or 0) + offset, NO_KEY))
    return TileKeys(tuple(firsts), tuple(head_bits), spec.run_length)


def _list_positions(
    segment: Segment, tile_index: Scalar | int, spec: DecodeSpec
) -> tuple[list[Scalar], Scalar]:
    """Return the list positions of a tile's sparse blocks, and where in each block the tile begins."""
    size, tile_kv, run_length = spec.shape.list_block_size, spec.sizes.tile_kv, spec.run_length
    assert size is not None
    tile = segment.first_tile + tile_index
    tiles_per_block, blocks_per_tile = max(size // tile_kv, 1), tile_kv // run_length
    block = lax.div(tile, jnp.int32(tiles_per_block))
    offset = lax.rem(tile, jnp.int32(tiles_per_block)) * run_length
    return [block * blocks_per_tile + i for i in range(blocks_per_tile)], offset
