"""Gemma 1 to 3 and VaultGemma."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    attention,
    is_nth_layer,
    layer_type,
    rope,
    rope_by_type,
    window_bounds,
)
from jattn.models.families.tensor_mappings import GEMMA_NORM_TENSORS, LLAMA_TENSORS, QK_NORM_TENSORS
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.specs import LayerSpec, MLPSpec, NormSpec, QKNorm

# Gemma 1: a Llama with norms scaled by 1 + weight, GELU, and scaled embeddings.
CAUSAL_ONLY = {"use_bidirectional_attention": ((False,), "decoders are causal")}


def _gemma_layer(keys: Keys, layer: int) -> LayerSpec:
    # transformers uses the tanh approximation for "gelu", which the weights were trained with.
    hidden_act = "gelu_pytorch_tanh" if keys["hidden_act"] == "gelu" else keys["hidden_act"]
    has_bias = bool(keys["attention_bias"])
    return LayerSpec(
        attention=attention(keys),
        rope=rope(keys),
        mlp=MLPSpec(intermediate_size=keys["intermediate_size"], hidden_act=hidden_act),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    keys=f"{ROPE} attention_bias",
    build_layer=_gemma_layer,
    config_fields=lambda keys: {"embedding_scale": keys["hidden_size"] ** 0.5},
    norm="rms_offset",
    tensors=LLAMA_TENSORS,
    supported_values=CAUSAL_ONLY,
    ignored_keys="hidden_activation",
)


# Gemma 2: four norms per layer, soft caps, a sliding window in every other layer.
def _gemma2_layer(keys: Keys, layer: int) -> LayerSpec:
    attention_type = layer_type(keys, layer, SLIDING if layer % 2 == 0 else FULL)
    has_bias = bool(keys["attention_bias"])
    return LayerSpec(
        attention=attention(
            keys,
            window=window_bounds(keys["sliding_window"]) if attention_type == SLIDING else None,
            scale=keys["query_pre_attn_scalar"] ** -0.5,
            soft_cap=keys["attn_logit_softcapping"],
        ),
        rope=rope(keys, attention_type),
        mlp=MLPSpec(intermediate_size=keys["intermediate_size"], hidden_act=keys["hidden_activation"]),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def _gemma2_model(keys: Keys) -> Mapping[str, Any]:
    cap = keys["final_logit_softcapping"]
    return {"embedding_scale": keys["hidden_size"] ** 0.5, "final_logit_softcapping": cap and float(cap)}


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=(
        f"{ROPE} hidden_activation sliding_window layer_types attention_bias attn_logit_softcapping "
        "final_logit_softcapping"
    ),
    defaults={"query_pre_attn_scalar": 256.0},
    build_layer=_gemma2_layer,
    config_fields=_gemma2_model,
    tensors={**LLAMA_TENSORS, **GEMMA_NORM_TENSORS},
    norm="rms_offset",
    norm_placement="around",
    supported_values=CAUSAL_ONLY,
    ignored_keys="hidden_act",
)


# Gemma 3's text model: norms of queries and keys instead of Gemma 2's soft caps, two RoPEs.
def _gemma3_layer(keys: Keys, layer: int) -> LayerSpec:
    attention_type = layer_type(
        keys, layer, FULL if is_nth_layer(keys, "sliding_window_pattern", layer) else SLIDING
    )
    has_bias = bool(keys["attention_bias"])
    return LayerSpec(
        attention=attention(
            keys,
            window=window_bounds(keys["sliding_window"]) if attention_type == SLIDING else None,
            scale=keys["query_pre_attn_scalar"] ** -0.5,
        ),
        rope=rope_by_type(
            keys, attention_type, keys["rope_theta" if attention_type == FULL else "rope_local_base_freq"]
        ),
        mlp=MLPSpec(intermediate_size=keys["intermediate_size"], hidden_act=keys["hidden_activation"]),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms_offset", keys["rms_norm_eps"])),
    )


def _gemma3_model(keys: Keys) -> Mapping[str, Any]:
    """Return Gemma 2's fields, and max_position_embeddings, which already includes the rope's scaling."""
    return {**GEMMA2.config_fields(keys), "max_position_embeddings": keys["max_position_embeddings"]}


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=f"{ROPE} hidden_activation sliding_window layer_types attention_bias final_logit_softcapping",
    defaults={
        "rope_theta": 1e6,
        "query_pre_attn_scalar": 256.0,
        "attn_logit_softcapping": 50.0,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    build_layer=_gemma3_layer,
    config_fields=_gemma3_model,
    norm=GEMMA2.norm,
    norm_placement=GEMMA2.norm_placement,
    tensors={**GEMMA2.tensors, **QK_NORM_TENSORS},
    supported_values=CAUSAL_ONLY,
    ignored_keys=GEMMA2.ignored_keys,
)


# VaultGemma: a Gemma 2 without the norms after attention and MLP.
VAULTGEMMA = dataclasses.replace(
    GEMMA2,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    norm_placement="before",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.post_attention_layernorm": HFTensors(("model.layers.*.pre_feedforward_layernorm",)),
    },
)
