"""Helium: a Llama that rotates neighbours, and rounds its norms once."""

import dataclasses

from jattn.models.families.family import Keys
from jattn.models.families.llama import LLAMA
from jattn.models.families.reading import gated_mlp, llama_layer, rope
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    mlp, pairs = gated_mlp(keys, has_bias=bool(keys["mlp_bias"])), rope(keys, interleaved=True)
    return llama_layer(keys, rope=pairs, mlp=mlp, qkv_bias=bool(keys["attention_bias"]))


HELIUM = dataclasses.replace(
    LLAMA,
    model_type="helium",
    architecture="HeliumForCausalLM",
    defaults={
        **LLAMA.defaults,
        "rope_theta": 100000.0,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
    },
    layer=_layer,
    norm="rms_f32",
)
