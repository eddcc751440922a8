"""What becomes of Q K^T before the softmax: the soft cap, and ALiBi's slope times the distance."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Rows, Scalar, Tile
from pallas_kernels.varlen_prefill.block_info import KvTile
from pallas_kernels.varlen_prefill.refs import AlibiOperands
from pallas_kernels.varlen_prefill.spec import PrefillSpec, W, f32

SLOPE_TERMS = 3  # 16-bit numbers that add up to f32
SLOPE_WIDTH = 16  # the tensor core's K


class Bias:
    """Of one warpgroup. Scores are scaled in the softmax's exponential, by `factor`."""

    def __init__(
        self, operands: AlibiOperands | None, columns: Callable[[], Tile], wg: Scalar, spec: PrefillSpec
    ):
        """With the number of each key in its tile."""
        self.columns, self.spec, self.wg = columns, spec, wg
        self.of_all = operands
        self.operands = None if operands is None else AlibiOperands(*(ref.at[wg] for ref in operands))
        self.factor = score_factor(spec)

    def store_columns(self, wg: Scalar | int) -> None:
        """The tensor core's right operand, the same for all heads."""
        if self.of_all is None:
            return
        columns_s = self.of_all.columns
        iota = [plgpu.broadcasted_iota(jnp.int32, columns_s.shape[1:], axis, layout=W) for axis in (0, 1)]
        columns_s[wg] = jnp.where(iota[1] < SLOPE_TERMS, iota[0], 0).astype(f32).astype(self.spec.dtype)

    def store_slope(self, slope: Scalar | Rows) -> None:
        """Makes the tensor core add a slope times the column to scores; the slope as 16-bit terms."""
        if self.operands is None:
            return
        slopes_s, dtype = self.operands.slopes, self.spec.dtype
        tile = plgpu.layout_cast(jnp.zeros(slopes_s.shape, f32), W)
        rest = slope * (1 / self.factor)
        at = plgpu.broadcasted_iota(jnp.int32, slopes_s.shape, 1, layout=W)
        for nth in range(SLOPE_TERMS):
            rounded = rest.astype(dtype).astype(f32)
            rest, tile = rest - rounded, jnp.where(at == nth, broadcast_to_keys(rounded, tile), tile)
        slopes_s[...] = tile.astype(dtype)
        plgpu.commit_smem()

    def added(self, tile: KvTile, s: Tile) -> tuple[Tile, Rows | None]:
        """Soft-capped and biased but for `factor`, which comes later, and a term of each row."""
        score, rows = self.spec.score, tile.rows
        if score.soft_cap is not None:
            s = jnp.tanh(s * (score.scale / score.soft_cap))
        if self.factor == 1.0:
            s = s * ((score.soft_cap or score.scale) * LOG2E)
        if rows.slope is None:
            return s, None
        first = (rows.positions() - tile.first_key()).astype(f32)
        lean = broadcast_to_keys(rows.slope * (1 / self.factor), s)
        if score.sqrt_alibi:
            first = lax.broadcast_in_dim(first, s.shape, [0])
            distances = jnp.maximum(first - self.columns(), 0.0)
            return s - jnp.sqrt(distances) * lean, None
        return s if self.operands is not None else s + self.columns() * lean, first * -rows.slope


def broadcast_to_keys(x: Scalar | Rows, tile: Tile) -> Scalar | Tile:
    """A number of all rows, or of each, for each column of a tile."""
    return x if x.ndim == 0 else lax.broadcast_in_dim(x, tile.shape, [0])


def score_factor(spec: PrefillSpec) -> float:
    """What biased scores are to be multiplied by for powers of 2."""
    score = spec.score
    is_positive = score.soft_cap is not None or score.scale > 0
    return (score.soft_cap or score.scale) * LOG2E if is_positive else 1.0
