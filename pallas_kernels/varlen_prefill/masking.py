"""What rows see of a tile of keys: ends of the request and of each row, lists, the caller's mask."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT
from pallas_kernels.shared import floor_div
from pallas_kernels.shared.paged_kv import clear_masked_out
from pallas_kernels.shared.types import Ref, Rows, Scalar, Tile
from pallas_kernels.varlen_prefill.block_info import KvTile, MaskedEnds, QueryRows
from pallas_kernels.varlen_prefill.kernel_mask import LoadedMask
from pallas_kernels.varlen_prefill.pipeline import KvPipeline
from pallas_kernels.varlen_prefill.schedule import key_range
from pallas_kernels.varlen_prefill.spec import ROW, M, PrefillSpec, W, f32
from pallas_kernels.varlen_prefill.tile_lists import num_query_blocks

type ColumnBound = Scalar | Rows


class Masking:
    """Puts -inf where a query does not see a key."""

    def __init__(self, arrays: tuple[Ref, ...], columns: Callable[[], Tile], spec: PrefillSpec):
        """With the mask's arrays in global memory, and the number of each key in its tile."""
        self.mask, self.arrays, self.columns, self.spec = spec.mask, arrays, columns, spec
        score = spec.score
        self.has_high = score.causal or score.window[1] is not None or score.chunk_size is not None
        self.has_parts = spec.shape.block_q is not None

    def stored(self, tile: KvTile) -> LoadedMask:
        """What the mask has stored of a tile: read early, for it comes from global memory."""
        if tile.edges is MaskedEnds.NONE or not self.arrays:
            return ()
        assert self.mask is not None
        return self.mask.load(tile.pairs(self.columns), tile.rows.item["req"], self.arrays)

    def applied(self, tile: KvTile, stored: LoadedMask, s: Tile) -> Tile:
        """Scores of pairs of which the query sees the key, -inf for the others."""
        if tile.edges is MaskedEnds.NONE:
            return s
        first_key = tile.first_key()
        has_low = self.spec.has_low_edge and MaskedEnds.LOW in tile.edges
        low, high = self._ends(tile, first_key, has_low=has_low)
        pairs, mask = tile.pairs(self.columns), self.mask
        if mask is not None and mask.is_words:
            words = mask.visible(pairs, stored)
            in_range = pairs.words_between(jnp.maximum(low, 0 - first_key) if has_low else None, high)
            return pairs.masked(s, tuple(a & b for a, b in zip(words, in_range, strict=True)))

        def wide(end: ColumnBound) -> Tile | Scalar:
            is_row = end.ndim > 0
            return pairs.wide(plgpu.layout_cast(end, ROW).astype(f32)) if is_row else end.astype(f32)

        low, high = wide(low), wide(high)
        keys = self.columns()
        visible = keys < high
        if has_low:
            visible = visible & (keys >= low)
        if mask is not None:
            visible = visible & mask.visible(pairs, stored)
        return jnp.where(visible, s, -jnp.inf)

    def _ends(self, tile: KvTile, first_key: Scalar, *, has_low: bool) -> tuple[ColumnBound, ColumnBound]:
        """First column that a row may see, and one past the last: of the request, or of each row.

        Rows are numbered only where they have ends of their own: for a number that nobody uses Pallas finds
        no layout.
        """
        rows, item = tile.rows, tile.rows.item
        has_row_low, has_row_high = self.spec.has_window and has_low, self.has_high or self.has_parts
        low, high = 0 - first_key, item["seq_len"] - first_key
        if has_row_low or has_row_high:
            positions = rows.positions()
            ends = key_range(self.spec.score, positions, item["seq_len"])
            row_low, row_high = (x - first_key for x in ends)
            if self.has_parts:
                row_high = jnp.where(self._sees_tile(tile, positions), row_high, 0)
            low, high = row_low if has_row_low else low, row_high if has_row_high else high
        return low, high

    def _sees_tile(self, tile: KvTile, positions: Rows) -> Rows:
        """Whether the block of queries that a position is in sees any of the tile's keys."""
        item, block = tile.rows.item, self.spec.shape.block_q
        assert tile.entry is not None
        assert block is not None
        bits = lax.shift_right_logical(tile.entry, jnp.int32(QUERY_BLOCK_SHIFT))
        first = floor_div(item["position"] + item["begin"], block)
        visible = positions * 0 + (bits & 1)
        for nth in range(1, num_query_blocks(self.spec.sizes.tile_q, block)):
            bit = lax.shift_right_logical(bits, jnp.int32(nth)) & 1
            visible = jnp.where(positions >= (first + nth) * block, bit, visible)
        return visible > 0


ROWS_AT_ONCE = 64


class ValueTiles:
    """Awaits values, and clears those that no query of the request sees: a probability of 0 hides no NaN.

    Warpgroups do it side by side in the same memory, so what one stores must be right at once: with both
    edges in a tile, a store of the low one that kept the high one's NaN undid another's zeros.
    """

    def __init__(self, ring: KvPipeline, spec: PrefillSpec):
        self.ring, self.spec = ring, spec

    def await_first(self, tile: KvTile, step: Scalar) -> None:
        """Those of an item's first tile, which may hold both ends of what the request sees.

        A list begins with the tile that the request ends in, if that is listed. Without lists it ends in the
        last tile, whose end `await_last` clears.
        """
        self._await(tile, step, MaskedEnds.BOTH if self.spec.has_lists else MaskedEnds.LOW)

    def await_next(self, tile: KvTile, step: Scalar) -> None:
        """Those of a later tile: with lists, what is seen may begin in any tile that is seen in part.

        Without them it begins in the first tile: a compare for each tile behind it would be one too many.
        """
        self._await(tile, step, tile.edges & MaskedEnds.LOW if self.spec.has_lists else MaskedEnds.NONE)

    def clear_last(self, rows: QueryRows, last: Scalar, step: Scalar) -> None:
        """The end of an item's last tile, whose values have come with `step`."""
        if not self.spec.has_lists:
            self._clear(rows.tile(last, MaskedEnds.HIGH), self.ring.stage(step), MaskedEnds.HIGH)

    def _await(self, tile: KvTile, step: Scalar, edges: MaskedEnds) -> None:
        stage = self.ring.stage(step)
        plgpu.barrier_wait(self.ring.values.full.at[stage])
        if MaskedEnds.LOW in edges and self.spec.has_low_edge:
            self._clear(tile, stage, MaskedEnds.LOW)
        if MaskedEnds.HIGH in edges:
            self._clear(tile, stage, MaskedEnds.HIGH)

    def _clear(self, tile: KvTile, stage: Scalar, edge: MaskedEnds) -> None:
        """Zeros before the first key that the request sees, or behind its last, if the tile has some."""
        tile_kv, item = self.spec.sizes.tile_kv, tile.rows.item
        first_key = tile.first_key()
        begin, end = item["seen"] - first_key, item["seq_len"] - first_key
        is_low = edge is MaskedEnds.LOW
        is_edge = begin > 0 if is_low else end < tile_kv

        @pl.when(is_edge)
        def _() -> None:
            at_once = jnp.int32(ROWS_AT_ONCE)
            low_parts = lambda: (0, lax.div(begin + (ROWS_AT_ONCE - 1), at_once))
            high_parts = lambda: (lax.div(end, at_once), tile_kv // ROWS_AT_ONCE)

            @pl.loop(*(low_parts() if is_low else high_parts()))
            def _(n: Scalar) -> None:
                rows = pl.ds(n * ROWS_AT_ONCE, ROWS_AT_ONCE)
                at = plgpu.broadcasted_iota(jnp.int32, (M, ROWS_AT_ONCE), 0, layout=W) + n * ROWS_AT_ONCE
                clear_masked_out(self.ring.values.tiles.at[stage], rows, lambda _: at, begin, end)

            plgpu.commit_smem()
