"""Gemma 1 to 3 and VaultGemma."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    gated_mlp,
    is_nth_layer,
    layer_type,
    llama_layer,
    qk_norm,
    rope_by_type,
    typed_layer,
)
from jattn.models.families.tensor_mappings import LLAMA_TENSORS, QK_NORM_TENSORS, llama_tensors
from jattn.models.specs import LayerSpec

CAUSAL_ONLY = {"use_bidirectional_attention": ((False,), "decoders are causal")}


# Gemma 1: a Llama with norms scaled by 1 + weight, GELU, and scaled embeddings.
def _gemma_layer(keys: Keys, layer: int) -> LayerSpec:
    # transformers uses the tanh approximation for "gelu", which the weights were trained with.
    hidden_act = "gelu_pytorch_tanh" if keys["hidden_act"] == "gelu" else keys["hidden_act"]
    return llama_layer(keys, mlp=gated_mlp(keys, hidden_act=hidden_act))


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
    return typed_layer(
        keys,
        layer_type(keys, layer, SLIDING if layer % 2 == 0 else FULL),
        scale=keys["query_pre_attn_scalar"] ** -0.5,
        soft_cap=keys["attn_logit_softcapping"],
        mlp=gated_mlp(keys, hidden_act=keys["hidden_activation"]),
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
    tensors=llama_tensors(
        {f".{part}_feedforward_layernorm": f".{part}_feedforward_layernorm" for part in ("pre", "post")}
    ),
    norm="rms_offset",
    norm_placement="around",
    supported_values=CAUSAL_ONLY,
    ignored_keys="hidden_act",
)


# Gemma 3's text model: norms of queries and keys instead of Gemma 2's soft caps, two RoPEs.
def _gemma3_layer(keys: Keys, layer: int) -> LayerSpec:
    is_full = is_nth_layer(keys, "sliding_window_pattern", layer)
    attention_type = layer_type(keys, layer, FULL if is_full else SLIDING)
    theta = keys["rope_theta" if attention_type == FULL else "rope_local_base_freq"]
    return typed_layer(
        keys,
        attention_type,
        scale=keys["query_pre_attn_scalar"] ** -0.5,
        rope=rope_by_type(keys, attention_type, theta),
        mlp=gated_mlp(keys, hidden_act=keys["hidden_activation"]),
        qk_norm=qk_norm(keys, "rms_offset"),
    )


def _gemma3_model(keys: Keys) -> Mapping[str, Any]:
    """Return Gemma 2's fields, and max_position_embeddings, which already includes the rope's scaling."""
    return {**GEMMA2.config_fields(keys), "max_position_embeddings": keys["max_position_embeddings"]}


GEMMA3 = dataclasses.replace(
    GEMMA2,
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
    tensors={**GEMMA2.tensors, **llama_tensors(QK_NORM_TENSORS)},
)
# VaultGemma: a Gemma 2 without the norms after attention and MLP.
VAULTGEMMA = dataclasses.replace(
    GEMMA2,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    norm_placement="before",
    tensors=llama_tensors({".post_attention_layernorm": ".pre_feedforward_layernorm"}),
)
