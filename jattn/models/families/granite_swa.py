"""Granite with windows in three of four layers, sinks in all, and ropes of bases by layer, or none."""

import dataclasses

from jattn.models.families.family import Keys
from jattn.models.families.granite import GRANITE
from jattn.models.families.reading import (
    FULL,
    SLIDING,
    attention,
    gated_mlp,
    layer_type,
    llama_layer,
    rope,
    window_of,
)
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec, require_one_a_layer
from jattn.models.rope import Rope
from pallas_kernels.checks import require_number


def _rope(keys: Keys, layer: int) -> Rope | None:
    bases = keys["layer_rope_theta"]
    made = rope(keys)
    if bases is None:
        return made
    require_one_a_layer("layer_rope_theta", bases, keys["num_hidden_layers"])
    require_number(layer_rope_theta=bases[layer] or 0)
    return dataclasses.replace(made, rope_theta=float(bases[layer])) if bases[layer] else None


def _layer(keys: Keys, layer: int) -> LayerSpec:
    kind, has_bias = layer_type(keys, layer, SLIDING if layer % 4 else FULL), bool(keys["attention_bias"])
    window = window_of(keys["sliding_window"]) if kind == SLIDING else None
    return llama_layer(
        keys,
        attention=attention(keys, scale=keys["attention_multiplier"], window=window),
        rope=_rope(keys, layer),
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_sinks=True,
    )


GRANITE_SWA = dataclasses.replace(
    GRANITE,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    defaults={
        **GRANITE.defaults,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "layer_types": None,
        "layer_rope_theta": None,
    },
    layer=_layer,
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.sinks": Stored(("model.layers.*.self_attn.sinks",), "array"),
    },
)
