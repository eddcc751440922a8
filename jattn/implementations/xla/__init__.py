"""Attention in plain XLA, on any device."""

from jattn.implementations.xla.attention import attend
from jattn.implementations.xla.backward import Gradients, OutputGradients, gradient_of_sinks, gradients
from jattn.implementations.xla.query_tiles import QueryTiles, prefill_tiles
from jattn.implementations.xla.scores import alibi_bias, is_visible, pairs_of
from jattn.implementations.xla.tile_attention import AttentionArgs, match_varying_axes

__all__ = [
    "AttentionArgs",
    "Gradients",
    "OutputGradients",
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
