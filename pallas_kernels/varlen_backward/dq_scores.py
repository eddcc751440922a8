"""Of a warpgroup's queries and a tile of keys: probabilities, and gradients of scores. A row is a query."""

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
    """What scores and gradients of probabilities are less, of each row."""

    score: Rows
    grad_p: Rows


class DqScores:
    """Of one warpgroup."""

    def __init__(self, stats: Ref, masking: Masking, spec: PrefillSpec):
        self.stats, self.masking, self.spec = stats, masking, spec

    def stats_of(self, rows: QueryRows, expected: Callable[[], Rows] | None) -> RowStats:
        """Of an item's rows, some of which may be another's or nobody's.

        Args:
            rows: Which.
            expected: Makes the sum of outputs times their gradients, for the next kernel, too; None = it is
                in memory. Two items that share a row store the same there.
        """
        item, first = rows.item, rows.item["first_row"] + rows.rank * M
        here = lambda nth: self.stats.at[item.head, nth, pl.ds(first, M)]
        stored = lambda nth: plgpu.load(here(nth), layout=ROW, optimized=False)
        score = stored(0)
        if expected is None:
            return RowStats(score, stored(1))
        # Loads come first: they are on their way beside the sum.
        grad_lse = 0.0 if self.stats.shape[1] == 2 else stored(2)
        less = expected() - grad_lse
        self.stats[item.head, 1, pl.ds(first, M)] = less
        return RowStats(score, less)

    def weights(self, s: Tile, stats: RowStats, tile: KvTile, stored: LoadedMask) -> Tile:
        """Probabilities of Q K^T, times the soft cap's derivative; 0 where a query does not see the key.

        `stored` is what the mask has stored of the tile.
        """
        y, bend = apply_soft_cap(s, self.spec.score)
        less = stats.score
        if tile.rows.slope is not None:
            y, less = self._biased(y, less, tile, tile.rows.slope)
        p = jnp.exp2(self.masking.applied(tile, stored, y - self._wide(less)))
        return p if bend is None else p * (1.0 - bend * bend)

    def gradients(self, weights: Tile, grad_p: Tile, stats: RowStats, tile: KvTile) -> Tile:
        """Of scores, but for the scale. Keys that nobody sees may be NaN."""
        grad = weights * (grad_p - self._wide(stats.grad_p))
        return grad if tile.edges is MaskedEnds.NONE else jnp.where(weights > 0.0, grad, 0.0)

    def _biased(self, y: Tile, less: Rows, tile: KvTile, slope: Scalar) -> tuple[Tile, Rows]:
        """With ALiBi's slope times the distance; of what is linear a row's part is in `less`."""
        columns = self.masking.columns
        distance = (tile.rows.positions() - tile.first_key()).astype(jnp.float32)
        if self.spec.score.sqrt_alibi:
            return y - jnp.sqrt(jnp.maximum(self._wide(distance) - columns(), 0.0)) * slope, less
        return y + columns() * slope, less + distance * slope

    def _wide(self, x: Rows) -> Tile:
        return lax.broadcast_in_dim(x, self.spec.s_shape, [0])
