"""Probabilities and score gradients of a warpgroup's 64 query rows and a KV tile, in the dq kernels."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.score_mod import KernelScoreMod
from pallas_kernels.shared.layouts import COLUMN, ROW, WARPGROUP_ROWS
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Columns, Ref, Rows, Scalar, Tile, f32
from pallas_kernels.varlen_backward.scores import (
    LoadedScoreData,
    apply_score_mod,
    apply_soft_cap,
    has_weight,
    score_weight,
)
from pallas_kernels.varlen_prefill.kernel_mask import KernelMask
from pallas_kernels.varlen_prefill.masking import Masking
from pallas_kernels.varlen_prefill.softmax import load_column_indices
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import KvTile, MaskedEnds, QueryRows


class RowStats(NamedTuple):
    """Statistics of each query row.

    Attributes:
        lse: Base-2 log-sum-exp.
        delta: Row sum of O * dO, minus dLSE.
    """

    lse: Rows
    delta: Rows


def load_row_stat(stats_g: Ref, rows: QueryRows, index: int) -> Rows:
    """Load a statistic of each row, including rows of other requests or of none; see DkDvInputs.row_stats."""
    work_tile, first = rows.work_tile, rows.work_tile["first_row"] + rows.rank * WARPGROUP_ROWS
    return plgpu.load(
        stats_g.at[work_tile.head, index, pl.ds(first, WARPGROUP_ROWS)], layout=ROW, optimized=False
    )


class DqScores:
    """Functions that compute the probabilities and score gradients of one warpgroup.

    Attributes:
        masking: Mask of the scores.
    """

    def __init__(
        self, mask: KernelMask | None, score_mod: KernelScoreMod | None, columns_s: Ref, spec: PrefillSpec
    ):
        """Create the functions of a warpgroup.

        Args:
            mask: Mask of partial tiles, with references to its arrays, or None.
            score_mod: Score function, with references to its arrays, or None.
            columns_s: Shared memory for the indices of the keys within a tile, f32 [tile_kv].
            spec: Static description of the kernel.
        """
        self.score_mod, self.columns_s, self.spec = score_mod, columns_s, spec
        self.masking = Masking(mask, self._columns, spec)

    def store_column_indices(self) -> None:
        """Store the column indices in shared memory."""
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_kv,), 0, layout=COLUMN)
        self.columns_s[...] = columns.astype(f32)

    def load(self, tile: KvTile) -> LoadedScoreData:
        """Load what the mask and the score function of a tile need; the data is in global memory."""
        mask, lookups = self.masking.load(tile), None
        if self.score_mod is not None:
            score_tile = tile.score_tile(self._column_indices)
            # The accumulators leave too few registers for a branch.
            lookups = self.score_mod.load(score_tile, with_derivative=True, finds_uniform=False)
        return LoadedScoreData(mask, lookups)

    def weights(self, s: Tile, row_stats: RowStats, tile: KvTile, loaded: LoadedScoreData) -> Tile:
        """Return the probabilities of Q K^T times the derivatives of the scores; invisible pairs are 0."""
        score, tanh, derivative = self.spec.score, None, None
        y, factor, lse = s, score.scale, row_stats.lse
        if self.score_mod is None or score.soft_cap is not None or tile.rows.slope is not None:
            (y, tanh), factor = apply_soft_cap(s, score), 1 / LOG2E
        if tile.rows.slope is not None:
            y, lse = self._add_alibi(y, lse, tile, tile.rows.slope)
        if self.score_mod is None:
            y = y - self._broadcast_rows(lse)
        else:
            assert loaded.lookups is not None
            score_tile = tile.score_tile(self._column_indices)
            y, derivative = apply_score_mod(self.score_mod, y, factor, lse, score_tile, loaded.lookups)
        p = jnp.exp2(self.masking.apply(tile, loaded.mask, y))
        return score_weight(p, tanh, derivative, self.score_mod)

    def ds(self, weights: Tile, dp: Tile, row_stats: RowStats, tile: KvTile) -> Tile:
        """Return dS without the scale; dP may be NaN for invisible keys."""
        ds = weights * (dp - self._broadcast_rows(row_stats.delta))
        if tile.masked_ends is MaskedEnds.NONE:
            return ds
        return jnp.where(has_weight(weights, self.score_mod), ds, 0.0)

    def _add_alibi(self, y: Tile, lse: Rows, tile: KvTile, slope: Scalar) -> tuple[Tile, Rows]:
        """Add the ALiBi bias; without a score function, the row's part of a linear bias goes into the LSE."""
        distance = (tile.rows.positions() - tile.first_key()).astype(jnp.float32)
        if self.spec.score.sqrt_alibi:
            return y - jnp.sqrt(
                jnp.maximum(self._broadcast_rows(distance) - self._columns(), 0.0)
            ) * slope, lse
        y = y + self._columns() * slope
        if self.score_mod is not None:
            return y - self._broadcast_rows(distance * slope), lse
        return y, lse + distance * slope

    def _columns(self) -> Tile:
        """Return the index of each key within its tile, f32."""
        return lax.broadcast_in_dim(self._column_indices(), self.spec.s_shape, [1])

    def _column_indices(self) -> Columns:
        return load_column_indices(self.columns_s)

    def _broadcast_rows(self, x: Rows) -> Tile:
        return lax.broadcast_in_dim(x, self.spec.s_shape, [0])
