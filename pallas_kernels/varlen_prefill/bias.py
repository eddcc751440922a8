"""Soft cap and ALiBi bias of the scores Q K^T, applied before the softmax."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Rows, Scalar, Tile
from pallas_kernels.varlen_prefill.block_info import KvTile
from pallas_kernels.varlen_prefill.refs import AlibiOperands
from pallas_kernels.varlen_prefill.spec import PrefillSpec, W, f32

SLOPE_TERMS = 3  # 16-bit numbers that add up to an f32 slope
SLOPE_WIDTH = 16  # K of one wgmma instruction


class Bias:
    """Soft cap and ALiBi bias of one warpgroup.

    Attributes:
        factor: Factor that the softmax multiplies the scores by; see score_factor.
    """

    def __init__(
        self, operands: AlibiOperands | None, columns: Callable[[], Tile], wg: Scalar, spec: PrefillSpec
    ):
        """Create the bias.

        Args:
            operands: Shared memory for the operands of the ALiBi product; None if no product adds the bias.
            columns: Function that returns the index of each key within its tile, f32 [64, tile_kv].
            wg: Index of the warpgroup.
            spec: Static description of the kernel.
        """
        self.columns, self.spec, self.wg = columns, spec, wg
        self.all_operands = operands
        self.operands = None if operands is None else AlibiOperands(*(ref.at[wg] for ref in operands))
        self.factor = score_factor(spec)

    def store_columns(self, wg: Scalar | int) -> None:
        """Store the right operand of the ALiBi product, which is the same for all heads."""
        if self.all_operands is None:
            return
        columns_s = self.all_operands.columns
        iota = [plgpu.broadcasted_iota(jnp.int32, columns_s.shape[1:], axis, layout=W) for axis in (0, 1)]
        columns_s[wg] = jnp.where(iota[1] < SLOPE_TERMS, iota[0], 0).astype(f32).astype(self.spec.dtype)

    def store_slope(self, slope: Scalar | Rows) -> None:
        """Store the left operand of the ALiBi product: the slope as a sum of SLOPE_TERMS 16-bit numbers."""
        if self.operands is None:
            return
        slopes_s, dtype = self.operands.slopes, self.spec.dtype
        tile = plgpu.layout_cast(jnp.zeros(slopes_s.shape, f32), W)
        remainder = slope * (1 / self.factor)
        column = plgpu.broadcasted_iota(jnp.int32, slopes_s.shape, 1, layout=W)
        for term in range(SLOPE_TERMS):
            rounded = remainder.astype(dtype).astype(f32)
            remainder, tile = (
                remainder - rounded,
                jnp.where(column == term, broadcast_to_keys(rounded, tile), tile),
            )
        slopes_s[...] = tile.astype(dtype)
        plgpu.commit_smem()

    def apply(self, tile: KvTile, s: Tile) -> tuple[Tile, Rows | None]:
        """Apply the soft cap and the bias.

        Args:
            tile: KV tile of the scores.
            s: Q K^T; with ALiBi operands, the ALiBi product is already added.

        Returns:
            The scores, to be multiplied by `factor`, and a term per row that is added after the
            multiplication, or None.
        """
        score, rows = self.spec.score, tile.rows
        if score.soft_cap is not None:
            s = jnp.tanh(s * (score.scale / score.soft_cap))
        if self.factor == 1.0:
            s = s * ((score.soft_cap or score.scale) * LOG2E)
        if rows.slope is None:
            return s, None
        first = (rows.positions() - tile.first_key()).astype(f32)
        slope = broadcast_to_keys(rows.slope * (1 / self.factor), s)
        if score.sqrt_alibi:
            first = lax.broadcast_in_dim(first, s.shape, [0])
            distances = jnp.maximum(first - self.columns(), 0.0)
            return s - jnp.sqrt(distances) * slope, None
        # The bias is slope * (column - first): linear in the column, plus a term of the row.
        return s if self.operands is not None else s + self.columns() * slope, first * -rows.slope


def broadcast_to_keys(x: Scalar | Rows, tile: Tile) -> Scalar | Tile:
    """Broadcast a value, or a value per row, to the columns of a tile."""
    return x if x.ndim == 0 else lax.broadcast_in_dim(x, tile.shape, [0])


def score_factor(spec: PrefillSpec) -> float:
    """Return the factor that converts biased scores to base-2 exponents; 1.0 if `Bias.apply` scales them."""
    score = spec.score
    is_positive = score.soft_cap is not None or score.scale > 0
    return (score.soft_cap or score.scale) * LOG2E if is_positive else 1.0
