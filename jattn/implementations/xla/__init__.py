"""Attention in plain XLA, on any device."""

from jattn.implementations.xla.attention import (
    QueryTiles,
    alibi_bias,
    attend,
    is_visible,
    match_varying_axes,
    pairs_of,
    prefill_tiles,
)
from jattn.implementations.xla.backward import Gradients, gradient_of_sinks, gradients

__all__ = [
    "Gradients",
    "QueryTiles",
    "alibi_bias",
    "attend",
    "gradient_of_sinks",
    "gradients",
    "is_visible",
    "match_varying_axes",
    "pairs_of",
    "prefill_tiles",
]
