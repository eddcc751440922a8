"""Gemma 3, its text part: norms of queries and keys for Gemma 2's soft caps, two ropes."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.gemma2 import CAUSAL_ONLY, GEMMA2
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import (
    FULL,
    SLIDING,
    attention,
    is_nth,
    layer_type,
    rope_by_type,
    window_of,
)
from jattn.models.families.tensors import QK_NORM_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import MLPSpec, NormSpec, QKNorm


def _layer(keys: Keys, layer: int) -> LayerSpec:
    kind = layer_type(keys, layer, FULL if is_nth(keys, "sliding_window_pattern", layer) else SLIDING)
    has_bias = bool(keys["attention_bias"])
    return LayerSpec(
        attention=attention(
            keys,
            window=window_of(keys["sliding_window"]) if kind == SLIDING else None,
            scale=keys["query_pre_attn_scalar"] ** -0.5,
        ),
        rope=rope_by_type(keys, kind, keys["rope_theta" if kind == FULL else "rope_local_base_freq"]),
        mlp=MLPSpec(intermediate_size=keys["intermediate_size"], hidden_act=keys["hidden_activation"]),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms_offset", keys["rms_norm_eps"])),
    )


def _model(keys: Keys) -> Mapping[str, Any]:
    """As Gemma 2's, and the context as it stands there: it is the one that the rope is scaled for."""
    return {**GEMMA2.model(keys), "max_position_embeddings": keys["max_position_embeddings"]}


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        **GEMMA2.defaults,
        **ROPE,
        "vocab_size": 262208,  # text_config of older checkpoints says little more than what differs
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
    layer=_layer,
    model=_model,
    norm=GEMMA2.norm,
    norm_placement=GEMMA2.norm_placement,
    tensors={**GEMMA2.tensors, **QK_NORM_TENSORS},
    only=CAUSAL_ONLY,
    harmless=(*GEMMA2.harmless, "_sliding_window_pattern", "mm_tokens_per_image"),
)
