"""Scores as probabilities are made of them, whether a row is a key or a query."""

import jax.numpy as jnp

from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Tile


def capped(s: Tile, score: Score) -> tuple[Tile, Tile | None]:
    """Q K^T scaled and soft-capped, times log2(e); and of what the cap bends its tanh, None without a cap."""
    if score.soft_cap is None:
        return s * (score.scale * LOG2E), None
    bend = jnp.tanh(s * (score.scale / score.soft_cap))
    return bend * (score.soft_cap * LOG2E), bend
