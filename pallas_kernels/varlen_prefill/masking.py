"""Masking of a warpgroup's tiles: -inf for scores of invisible pairs, zeros for invisible values."""

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT
from pallas_kernels.ptx.bit_mask import WORD_BITS
from pallas_kernels.shared import floor_div
from pallas_kernels.shared.layouts import ROW, WGMMA
from pallas_kernels.shared.memory import PANEL
from pallas_kernels.shared.tile_rows import clear_masked_out, run_offsets
from pallas_kernels.shared.types import Ref, Rows, Scalar, Tile, f32
from pallas_kernels.varlen_prefill.kernel_mask import KernelMask, LoadedMask, PairTile, Words, join_half_words
from pallas_kernels.varlen_prefill.loader import KvPipeline, KvStages
from pallas_kernels.varlen_prefill.schedule import key_range
from pallas_kernels.varlen_prefill.softmax import broadcast_rows
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.tile_lists import num_query_blocks
from pallas_kernels.varlen_prefill.tile_scheduler import KvTile, MaskedEnds


@dataclasses.dataclass(frozen=True)
class Masking:
    """Replaces the scores of invisible pairs by -inf.

    Attributes:
        mask: Mask of partial tiles, with references to its arrays, or None.
        columns: Function that returns the index of each key within its tile, f32 [rows, tile_kv].
        spec: Static description of the kernel.
    """

    mask: KernelMask | None
    columns: Callable[[], Tile]
    spec: PrefillSpec

    def load(self, tile: KvTile) -> LoadedMask:
        """Load the elements of the mask's arrays that a tile needs, or the words of a tile of several runs.

        Callers load early, because the arrays are in global memory.
        """
        if tile.masked_ends is MaskedEnds.NONE or not jax.tree.leaves(self.mask):
            return ()
        mask, req = self.mask, tile.rows.work_tile["req"]
        assert mask is not None
        if self.spec.runs_per_tile > 1:
            runs = tile.run_pairs(self.columns)
            return self._run_words(tile, runs, tuple(mask.load(pairs, req) for pairs in runs))
        return mask.load(tile.pairs(self.columns), req)

    def apply(self, tile: KvTile, loaded: LoadedMask, s: Tile) -> Tile:
        """Return the scores with -inf for invisible pairs."""
        if tile.masked_ends is MaskedEnds.NONE:
            return s
        if self.spec.runs_per_tile > 1:
            runs = tile.run_pairs(self.columns)
            return runs[0].masked(s, loaded or self._run_words(tile, runs, ((),) * len(runs)))
        score, mask, first_key = self.spec.score, self.mask, tile.first_key()
        # The range [begin, end) of the tile's visible columns: scalars, or one range per row. Positions of
        # rows are computed only if the ranges differ: Pallas cannot assign a layout to an unused array.
        has_begin = self.spec.has_low_end and MaskedEnds.LOW in tile.masked_ends
        has_row_begin = self.spec.has_window and has_begin
        has_query_blocks = self.spec.shape.block_q is not None
        has_row_end = self._has_row_end or has_query_blocks
        work_tile = tile.rows.work_tile
        begin, end = 0 - first_key, work_tile["seq_len"] - first_key
        if has_row_begin or has_row_end:
            positions = tile.rows.positions()
            row_begin, row_end = key_range(score, positions, work_tile["seq_len"])
            row_begin, row_end = row_begin - first_key, row_end - first_key
            if has_query_blocks:
                (entry,) = tile.entries
                row_end = jnp.where(self._is_visible(tile, entry, positions), row_end, 0)
            begin, end = row_begin if has_row_begin else begin, row_end if has_row_end else end
        if mask is not None and mask.is_words:
            pairs = tile.pairs(self.columns)
            words = mask.visible(pairs, loaded)
            in_range = pairs.words_in_range(jnp.maximum(begin, 0 - first_key) if has_begin else None, end)
            return pairs.masked(s, tuple(a & b for a, b in zip(words, in_range, strict=True)))
        # Without words, compare the column indices, which are f32, with bounds of all pairs.
        begin, end = [
            bound.astype(f32)
            if bound.ndim == 0
            else broadcast_rows(plgpu.layout_cast(bound, ROW).astype(f32), s)
            for bound in (begin, end)
        ]
        columns = self.columns()
        is_visible = columns < end
        if has_begin:
            is_visible = is_visible & (columns >= begin)
        if mask is not None:
            is_visible = is_visible & mask.visible(tile.pairs(self.columns), loaded)
        return jnp.where(is_visible, s, -jnp.inf)

    def _run_words(self, tile: KvTile, runs: tuple[PairTile, ...], loaded: tuple[LoadedMask, ...]) -> Words:
        """Return the words of the visible pairs of a tile of several runs of keys.

        The mask must evaluate to words, see `KernelMask.is_words`.

        Args:
            tile: KV tile of several runs.
            runs: Pairs of each run, from `run_pairs`.
            loaded: Result of `mask.load` for each run; () for a mask without arrays.
        """
        mask, spec, seq_len = self.mask, self.spec, tile.rows.work_tile["seq_len"]
        has_arrays, has_query_blocks = bool(jax.tree.leaves(mask)), spec.shape.block_q is not None
        visible: list[Words] = []
        if mask is not None:
            visible = [mask.visible(pairs, x) for pairs, x in zip(runs, loaded, strict=True)]

        def in_range() -> Words:
            begin, end = jnp.int32(0), seq_len
            if spec.has_window or self._has_row_end or has_query_blocks:
                positions = tile.rows.positions()
                row_begin, row_end = key_range(spec.score, positions, seq_len)
                begin = jnp.maximum(row_begin, 0) if spec.has_window else begin
                end = row_end if self._has_row_end else end
            words: list[Rows] = []
            for index, (pairs, entry) in enumerate(zip(runs, tile.entries, strict=True)):
                run_begin, run_end = begin - pairs.first_key, end - pairs.first_key
                if has_query_blocks:
                    run_end = jnp.where(self._is_visible(tile, entry, positions), run_end, 0)
                elif mask is None and run_end.ndim == 0:
                    run_end = pairs.fill_rows(run_end)
                run_words = pairs.words_in_range(run_begin if spec.has_low_end else None, run_end)
                if visible:
                    run_words = tuple(a & b for a, b in zip(visible[index], run_words, strict=True))
                words += run_words
            return tuple(words)

        if has_arrays and not has_query_blocks:
            # Most partial tiles lie within the range of every row, so only some compute words of ranges.
            words = lax.cond(
                self._is_in_range(tile), lambda: tuple(word for run in visible for word in run), in_range
            )
        else:
            words = in_range()
        return join_half_words(words) if spec.run_length < WORD_BITS else words

    def _is_in_range(self, tile: KvTile) -> Scalar:
        """Return whether all keys of a tile of runs lie in the range of visible keys of every row."""
        rows, starts = tile.rows, tile.run_starts()
        first = rows.first_position()
        seq_len = rows.work_tile["seq_len"]
        begin, _ = key_range(self.spec.score, first + (rows.tokens - 1), seq_len)
        _, end = key_range(self.spec.score, first, seq_len)
        is_inside = functools.reduce(jnp.maximum, starts) + self.spec.run_length <= jnp.minimum(end, seq_len)
        if self.spec.has_low_end:
            is_inside &= functools.reduce(jnp.minimum, starts) >= jnp.maximum(begin, 0)
        return is_inside

    @property
    def _has_row_end(self) -> bool:
        """Return whether the end of the visible keys depends on the row."""
        score = self.spec.score
        return score.causal or score.window[1] is not None or score.chunk_size is not None

    def _is_visible(self, tile: KvTile, entry: Scalar, positions: Rows) -> Rows:
        """Return whether the query block of each position attends to any key of a list entry."""
        work_tile, block = tile.rows.work_tile, self.spec.shape.block_q
        assert block is not None
        bits = lax.shift_right_logical(entry, jnp.int32(QUERY_BLOCK_SHIFT))
        first = floor_div(work_tile["position"] + work_tile["begin"], block)
        is_visible = positions * 0 + (bits & 1)
        for index in range(1, num_query_blocks(self.spec.sizes.tile_tokens, block)):
            bit = lax.shift_right_logical(bits, jnp.int32(index)) & 1
            is_visible = jnp.where(positions >= (first + index) * block, bit, is_visible)
        return is_visible > 0


@dataclasses.dataclass(frozen=True)
class ValueTiles:
    """Waits for value tiles, and zeroes values that no query of the request attends to.

    Masking is not enough, because 0 times NaN is NaN. The warpgroups of a team zero the same memory
    concurrently, so each store must write correct values: if both ends lie in one tile, a store for the low
    end that kept NaNs of the high end would undo the zeros of another warpgroup.

    Attributes:
        stages: Stages of `pipeline` that hold the values.
        pipeline: Pipeline of the team.
        spec: Static description of the kernel.
    """

    stages: KvStages
    pipeline: KvPipeline
    spec: PrefillSpec

    def wait(self, tile: KvTile, step: Scalar, *, is_first: bool = False) -> None:
        """Wait for the values of a KV tile, and zero its invisible ends.

        With tile lists the first tile contains the request's end, if that is listed, and runs that the list
        lacks, and the visible keys may start in any partial tile. Without lists they start in the first tile,
        later ones are not tested, to save a comparison per tile, and the end is in the last tile, for which
        the caller calls `clear`.
        """
        stage = self.pipeline.stage(step)
        plgpu.barrier_wait(self.stages.full.at[stage])
        if self.spec.has_lists:
            ends = MaskedEnds.BOTH if is_first else tile.masked_ends & MaskedEnds.LOW
        else:
            ends = MaskedEnds.LOW if is_first else MaskedEnds.NONE
        if self.spec.runs_per_tile > 1:
            if MaskedEnds.HIGH in ends or (MaskedEnds.LOW in ends and self.spec.has_low_end):
                self._clear_runs(tile, stage)
            return
        if MaskedEnds.LOW in ends and self.spec.has_low_end:
            self.clear(tile, stage, MaskedEnds.LOW)
        if MaskedEnds.HIGH in ends:
            self.clear(tile, stage, MaskedEnds.HIGH)

    def clear(self, tile: KvTile, stage: Scalar, end: MaskedEnds) -> None:
        """Zero a tile's values before the request's first visible key (LOW) or after its last key (HIGH).

        The values must have arrived.
        """
        # The matrix product reads the zeros through the async proxy, which needs a fence.
        clear_invisible_values(
            self.stages.tiles.at[stage], tile, end, tile_kv=self.spec.sizes.tile_kv, fence=plgpu.commit_smem
        )

    def _clear_runs(self, tile: KvTile, stage: Scalar) -> None:
        """Zero the values of a tile of runs before the first visible key or after the request's end."""
        values_s, spec, work_tile = self.stages.tiles.at[stage], self.spec, tile.rows.work_tile
        first_key, end_key = work_tile["first_visible_key"], work_tile["seq_len"]
        starts, run_length = tile.run_starts(), spec.run_length
        for first_row in range(0, spec.sizes.tile_kv, PANEL):
            part = starts[first_row // run_length : (first_row + PANEL) // run_length]
            has_invisible = [(start < first_key) | (start + run_length > end_key) for start in part]

            @pl.when(functools.reduce(operator.or_, has_invisible))
            def _(first_row: int = first_row, part: tuple[Scalar, ...] = part) -> None:
                row = plgpu.broadcasted_iota(jnp.int32, (PANEL, PANEL), 0, layout=WGMMA)
                offset = run_offsets(row, part, run_length)
                rows = pl.ds(first_row, PANEL)
                clear_masked_out(values_s, rows, lambda _: row + offset, first_key, end_key)
                plgpu.commit_smem()


def clear_invisible_values(
    values_s: Ref, tile: KvTile, end: MaskedEnds, *, tile_kv: int, fence: Callable[[], None]
) -> None:
    """Zero a tile's values before the request's first visible key (LOW) or after its last key (HIGH).

    Args:
        values_s: Values in shared memory, [chunks, tile_kv, width].
        tile: KV tile of the values.
        end: The end to clear, LOW or HIGH. Static.
        tile_kv: Number of keys per tile. Static.
        fence: Function that makes the zeros visible to the matrix product.
    """
    work_tile = tile.rows.work_tile
    first_key = tile.first_key()
    first_row, end_row = (
        work_tile["first_visible_key"] - first_key,
        work_tile["seq_len"] - first_key,
    )
    is_low = end is MaskedEnds.LOW
    has_invisible = first_row > 0 if is_low else end_row < tile_kv

    @pl.when(has_invisible)
    def _() -> None:
        at_once = jnp.int32(PANEL)
        first_part: Scalar | int = 0
        end_part: Scalar | int = tile_kv // PANEL
        if is_low:
            end_part = lax.div(first_row + (PANEL - 1), at_once)
        else:
            first_part = lax.div(end_row, at_once)

        @pl.loop(first_part, end_part)
        def _(n: Scalar) -> None:
            rows = pl.ds(n * PANEL, PANEL)
            row = plgpu.broadcasted_iota(jnp.int32, (PANEL, PANEL), 0, layout=WGMMA) + n * PANEL
            clear_masked_out(values_s, rows, lambda _: row, first_row, end_row)

        fence()
