"""Soft cap, score function and their derivatives: what the dk/dv and dq kernels share of their scores."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.score_mod import KernelScoreMod, Lookups, ScoreTile
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Columns, Rows, Tile
from pallas_kernels.varlen_prefill.kernel_mask import LoadedMask


class LoadedScoreData(NamedTuple):
    """Data in global memory that the mask and the score function of a tile need.

    Attributes:
        mask: Data of the mask, for each run of the tile; () if there is none.
        lookups: Lookups of the score function, or None without one.
    """

    mask: tuple[LoadedMask, ...]
    lookups: Lookups | None


def apply_soft_cap(s: Tile, score: Score) -> tuple[Tile, Tile | None]:
    """Scale and soft-cap Q K^T.

    Returns:
        The scores times log2(e), and the tanh of the soft cap, or None without a soft cap.
    """
    if score.soft_cap is None:
        return s * (score.scale * LOG2E), None
    tanh = jnp.tanh(s * (score.scale / score.soft_cap))
    return tanh * (score.soft_cap * LOG2E), tanh


def apply_score_mod(
    score_mod: KernelScoreMod, y: Tile, factor: float, lse: Rows | Columns, tile: ScoreTile, lookups: Lookups
) -> tuple[Tile, Tile | None]:
    """Apply a score function, and subtract the log-sum-exp.

    Args:
        score_mod: The score function.
        y: Scores.
        factor: Factor that converts them to natural units. Static.
        lse: Base-2 log-sum-exp of each query.
        tile: Pairs of the tile.
        lookups: Result of the score function's `load`.

    Returns:
        The base-2 exponents, and the derivatives of the new scores by the scores or None if they are all 1.
    """
    new_scores, derivative = score_mod.apply_with_derivative(y, factor, tile, lookups)
    if new_scores.query_term is not None:
        lse = lse - new_scores.query_term * LOG2E
    lse_of_pairs = lax.broadcast_in_dim(lse, y.shape, [tile.query_axis])
    return new_scores.tile * (new_scores.factor * LOG2E) - lse_of_pairs, derivative


def score_weight(
    p: Tile, tanh: Tile | None, derivative: Tile | None, score_mod: KernelScoreMod | None
) -> Tile:
    """Return the probabilities times the derivatives of the soft cap and of the score function.

    A pair with a probability of 0 has a weight of 0, unless `is_increasing` says that no finite score has an
    infinite derivative.
    """
    # One product of the factors, because registers are scarce.
    weight = p if tanh is None else p * (1.0 - tanh * tanh)
    if score_mod is None or derivative is None:
        return weight
    weight = weight * derivative
    return weight if score_mod.is_increasing else jnp.where(p > 0.0, weight, 0.0)


def has_weight(weights: Tile, score_mod: KernelScoreMod | None) -> Tile:
    """Return whether pairs are visible and have a gradient; their weights may be NaN if they are not."""
    # A score function's derivative may be negative.
    return weights > 0.0 if score_mod is None or score_mod.is_increasing else weights != 0.0
