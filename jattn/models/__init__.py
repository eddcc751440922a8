"""Decoders that attend through jattn, by their Hugging Face configuration."""

from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder
from jattn.models.loading import load, save
from jattn.models.scales import KVScales
from jattn.models.sums import use_peer_memory

__all__ = ["Decoder", "DecoderConfig", "KVScales", "load", "save", "use_peer_memory"]
