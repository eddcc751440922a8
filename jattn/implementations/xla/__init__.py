"""Attention in plain XLA, on any machine."""

from jattn.implementations.xla.query_tiles import QueryTiles, prefill_tiles
from jattn.implementations.xla.scores import alibi_bias, pairs_of, visible
from jattn.implementations.xla.walk import attend

__all__ = ["QueryTiles", "alibi_bias", "attend", "pairs_of", "prefill_tiles", "visible"]
