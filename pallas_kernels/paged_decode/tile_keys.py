"""Key positions of a tile: consecutive positions, or runs that a request's list of sparse blocks selects."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT
from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.shared.types import Ref, Scalar, Tile

NO_KEY = 1 << 30  # a key position beyond the end of every request


@dataclasses.dataclass(frozen=True)
class TileKeys:
    """Positions of a tile's keys in their request, as runs of consecutive positions.

    Attributes:
        run_starts: Position of the first key of each run, in ascending order.
        head_bits: One number per run, whose bit g says whether query head g of the group visits the run.
            Empty if all query heads visit all runs.
        run_length: Static number of keys per run.
    """

    run_starts: tuple[Scalar, ...]
    head_bits: tuple[Scalar, ...]
    run_length: int

    def row_positions(self, rows: Tile) -> Tile:
        """Return the key position of each of the given rows of the tile."""
        return rows + self._select(
            rows, [first - i * self.run_length for i, first in enumerate(self.run_starts)]
        )

    def tile_positions(self, shape: tuple[int, ...]) -> Tile:
        """Return the key position of each element of a tile [keys, ...], in the WGMMA layout."""
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        return self.row_positions(rows)

    def row_head_bits(self, rows: Tile) -> Tile:
        """Return, for each of the given rows of the tile, the head bits of its run."""
        return self._select(rows, self.head_bits)

    def _select(self, rows: Tile, run_values: Sequence[Scalar]) -> Tile:
        """Return the element of `run_values` for the run that each of the given rows belongs to."""
        value = run_values[0]
        for i, run_value in enumerate(run_values[1:], 1):
            value = jnp.where(rows >= i * self.run_length, run_value, value)
        return value

    def has_key_outside(self, first_key: Scalar, end_key: Scalar) -> Scalar:
        """Return whether any key position of the tile is outside of [first_key, end_key)."""
        return (self.run_starts[0] < first_key) | (self.run_starts[-1] + self.run_length > end_key)


def read_entries(
    segment: Segment, tile_index: Scalar | int, ids: Ref, spec: DecodeSpec
) -> tuple[Scalar, ...]:
    """Return the list entries of a tile or, without lists, the position of the tile's first key.

    Lists are in global memory. Callers read the entries at least one tile before they call `get_tile_keys`,
    which hides the latency of the loads.

    Args:
        segment: Segment of the tile.
        tile_index: Index of the tile in the segment; may exceed the number of tiles.
        ids: Lists of sparse blocks, [reqs * kv_heads, max_listed]; unused without lists.
        spec: Static description of the call.
    """
    if segment.num_listed is None:
        return ((segment.first_tile + tile_index) * spec.sizes.tile_kv,)
    last = jnp.maximum(segment.num_listed - 1, 0)
    positions, _ = _list_positions(segment, tile_index, spec)
    return tuple(ids[segment.row, jnp.minimum(position, last)] for position in positions)


def get_tile_keys(
    segment: Segment, tile_index: Scalar, entries: tuple[Scalar, ...], spec: DecodeSpec
) -> TileKeys:
    """Return the key positions of a tile of a segment.

    Args:
        segment: Segment of the tile.
        tile_index: Index of the tile in the segment.
        entries: Result of `read_entries` for the tile.
        spec: Static description of the call.
    """
    shape = spec.shape
    if segment.num_listed is None:
        return TileKeys(entries, (), spec.run_length)
    positions, offset = _list_positions(segment, tile_index, spec)
    run_starts, head_bits = [], []
    for position, entry in zip(positions, entries, strict=True):
        if shape.lists_have_head_bits:
            head_bits.append(lax.shift_right_logical(entry, jnp.int32(QUERY_BLOCK_SHIFT)))
            entry = entry & ((1 << QUERY_BLOCK_SHIFT) - 1)
        is_valid = position < segment.num_listed
        run_starts.append(jnp.where(is_valid, entry * (shape.list_block_size or 0) + offset, NO_KEY))
    return TileKeys(tuple(run_starts), tuple(head_bits), spec.run_length)


def _list_positions(
    segment: Segment, tile_index: Scalar | int, spec: DecodeSpec
) -> tuple[list[Scalar], Scalar]:
    """Return the indices in the list of a tile's sparse blocks, and the offset of the tile in each block."""
    size, tile_kv, run_length = spec.shape.list_block_size, spec.sizes.tile_kv, spec.run_length
    assert size is not None
    tile = segment.first_tile + tile_index
    tiles_per_block, blocks_per_tile = max(size // tile_kv, 1), tile_kv // run_length
    block = lax.div(tile, jnp.int32(tiles_per_block))
    offset = lax.rem(tile, jnp.int32(tiles_per_block)) * run_length
    return [block * blocks_per_tile + i for i in range(blocks_per_tile)], offset
