"""Decoders that attend through jattn, by their Hugging Face configuration."""

from jattn.models.collectives import use_peer_memory
from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder
from jattn.models.kv_scales import KVScales
from jattn.models.loading.pretrained import load, save

__all__ = ["Decoder", "DecoderConfig", "KVScales", "load", "save", "use_peer_memory"]
