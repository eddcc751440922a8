"""Cohere Command-R and Command-R7B."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    is_nth_layer,
    layer_type,
    llama_layer,
    qk_norm,
    rope,
    typed_layer,
)
from jattn.models.families.tensor_mappings import QK_NORM_TENSORS, llama_tensors
from jattn.models.specs import LayerSpec


# Cohere, Command-R: parallel attention and MLP, LayerNorm without bias, interleaved RoPE.
def _cohere_layer(keys: Keys, layer: int) -> LayerSpec:
    norm = qk_norm(keys, "layer_no_bias", over="own_head") if keys["use_qk_norm"] else None
    return llama_layer(keys, rope=rope(keys, interleaved=True), qk_norm=norm)


def _cohere_model(keys: Keys) -> Mapping[str, Any]:
    """Return the scale of logits, and the context if config.json has model_max_length.

    Source: vLLM `_get_and_verify_max_len`.
    """
    longest, scale = keys["model_max_length"], {"logit_scale": keys["logit_scale"]}
    return scale if longest is None else {**scale, "max_position_embeddings": longest}


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    keys=f"{ROPE} attention_bias use_qk_norm logit_scale model_max_length",
    build_layer=_cohere_layer,
    config_fields=_cohere_model,
    norm="layer_no_bias",
    norm_placement="parallel",
    tensors=llama_tensors(QK_NORM_TENSORS),
    aliases={"layer_norm_eps": "rms_norm_eps"},
)


# Cohere 2, Command-R7B: sliding windows in three of four layers, RoPE in these only.
def _cohere2_layer(keys: Keys, layer: int) -> LayerSpec:
    is_full = is_nth_layer(keys, "sliding_window_pattern", layer)
    attention_type = layer_type(keys, layer, FULL if is_full else SLIDING)
    has_window = attention_type == SLIDING and keys["sliding_window"] is not None
    rotary = rope(keys, attention_type, interleaved=True) if has_window else None
    return typed_layer(keys, attention_type, rope=rotary)


COHERE2 = dataclasses.replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    keys=f"{ROPE} attention_bias logit_scale model_max_length sliding_window layer_types",
    defaults={"use_qk_norm": False, "sliding_window_pattern": 4},
    build_layer=_cohere2_layer,
    aliases={**COHERE.aliases, "layer_switch": "sliding_window_pattern"},
    supported_values={
        "use_qk_norm": ((False,), "queries and keys are not normalized"),
        "rotary_pct": ((1, 1.0), "the family rotates full heads"),
        "use_parallel_block": ((True,), "attention and MLP run in parallel"),
        "use_gated_activation": ((True,), "its MLPs are gated"),
        "order_of_interleaved_layers": (("local_attn_first",), "windows come first"),
        "position_embedding_type": (("rope_gptj",), "pairs of its rotary embedding are adjacent elements"),
    },
)
