"""Probabilities and score gradients of the 64 query rows of a warpgroup and a KV tile."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref, Rows, Scalar, Tile
from pallas_kernels.varlen_backward.dkdv_scores import apply_soft_cap
from pallas_kernels.varlen_backward.spec import ROW
from pallas_kernels.varlen_prefill.block_info import KvTile, MaskedEnds, QueryRows
from pallas_kernels.varlen_prefill.kernel_mask import LoadedMask
from pallas_kernels.varlen_prefill.masking import Masking
from pallas_kernels.varlen_prefill.spec import M, PrefillSpec


class RowStats(NamedTuple):
    """Statistics of each query row.

    Attributes:
        lse: Base-2 log-sum-exp.
        delta: Row sum of O * dO, minus dLSE.
    """

    lse: Rows
    delta: Rows


class DqScores:
    """Functions that compute the probabilities and score gradients of one warpgroup."""

    def __init__(self, row_stats: Ref, masking: Masking, spec: PrefillSpec):
        self.row_stats, self.masking, self.spec = row_stats, masking, spec

    def load_row_stats(self, rows: QueryRows, compute_delta: Callable[[], Rows] | None) -> RowStats:
        """Return the row statistics of a warpgroup's 64 rows; some may lie outside of the request.

        Args:
            rows: Query rows of the warpgroup.
            compute_delta: Function that returns the row sums of O * dO. The result is also stored for the
                dk/dv kernel; work tiles that share a row store the same value. None if delta is in memory.
        """
        work_tile, first = rows.work_tile, rows.work_tile["first_row"] + rows.rank * M

        def load(index: int) -> Rows:
            stat_ref = self.row_stats.at[work_tile.head, index, pl.ds(first, M)]
            return plgpu.load(stat_ref, layout=ROW, optimized=False)

        lse = load(0)
        if compute_delta is None:
            return RowStats(lse, load(1))
        # Load before computing delta, so that the loads are in flight meanwhile.
        grad_lse = 0.0 if self.row_stats.shape[1] == 2 else load(2)
        delta = compute_delta() - grad_lse
        self.row_stats[work_tile.head, 1, pl.ds(first, M)] = delta
        return RowStats(lse, delta)

    def weights(self, s: Tile, row_stats: RowStats, tile: KvTile, loaded: LoadedMask) -> Tile:
        """Return the probabilities times the derivative of the soft cap; 0 for invisible pairs."""
        y, tanh = apply_soft_cap(s, self.spec.score)
        lse = row_stats.lse
        if tile.rows.slope is not None:
            y, lse = self._add_alibi(y, lse, tile, tile.rows.slope)
        p = jnp.exp2(self.masking.apply(tile, loaded, y - self._broadcast_rows(lse)))
        return p if tanh is None else p * (1.0 - tanh * tanh)

    def gradients(self, weights: Tile, dp: Tile, row_stats: RowStats, tile: KvTile) -> Tile:
        """Return dS without the softmax scale; dP may be NaN for invisible keys."""
        ds = weights * (dp - self._broadcast_rows(row_stats.delta))
        return ds if tile.masked_ends is MaskedEnds.NONE else jnp.where(weights > 0.0, ds, 0.0)

    def _add_alibi(self, y: Tile, lse: Rows, tile: KvTile, slope: Scalar) -> tuple[Tile, Rows]:
        """Return the scores with the ALiBi bias, and the LSE, which includes the row's part of the bias."""
        columns = self.masking.columns
        distance = (tile.rows.positions() - tile.first_key()).astype(jnp.float32)
        if self.spec.score.sqrt_alibi:
            return y - jnp.sqrt(jnp.maximum(self._broadcast_rows(distance) - columns(), 0.0)) * slope, lse
        return y + columns() * slope, lse + distance * slope

    def _broadcast_rows(self, x: Rows) -> Tile:
        return lax.broadcast_in_dim(x, self.spec.s_shape, [0])
