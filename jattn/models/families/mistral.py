"""Mistral, Ministral, Mixtral and MiniMax-M2."""

from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    experts,
    layer_type,
    llama_layer,
    qk_norm,
    rope,
    typed_layer,
)
from jattn.models.families.tensor_mappings import (
    ALL_HEADS_TENSORS,
    FUSED_EXPERT_TENSORS,
    LLAMA_BLOCK,
    LLAMA_TENSORS,
    llama_tensors,
    map_tensors,
    separate_experts,
)
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.routing import Routing
from jattn.models.specs import AttentionTemperature, LayerSpec

# Mistral: a sliding window in every layer, unless it is null.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=f"{ROPE} sliding_window",
    build_layer=lambda keys, layer: llama_layer(keys, window=keys["sliding_window"]),
    tensors=LLAMA_TENSORS,
    ignored_keys="layer_types attention_bias mlp_bias",
)


# Ministral: sliding windows in some layers. Ministral 3: YaRN, and an attention temperature by position.
def _ministral(keys: Keys, layer: int) -> LayerSpec:
    return typed_layer(keys, layer_type(keys, layer, FULL if keys["sliding_window"] is None else SLIDING))


def _ministral3(keys: Keys, layer: int) -> LayerSpec:
    items = (keys["rope_parameters"] or keys["rope_scaling"] or {}).items()
    parameters = {key: value for key, value in items if value is not None}
    beta: Any = parameters.pop("llama_4_scaling_beta", 0)
    parameters.pop("max_position_embeddings", None)
    rotary = rope({**keys, "rope_parameters": parameters, "rope_scaling": None})
    original: Any = parameters.get("original_max_position_embeddings", keys["max_position_embeddings"])
    tuned = (
        AttentionTemperature(floor_scale=float(original), attn_scale=float(beta), first=0) if beta else None
    )
    return llama_layer(keys, window=keys["sliding_window"], rope=rotary, temperature=tuned)


MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    keys=f"{ROPE} sliding_window layer_types",
    build_layer=_ministral,
    tensors=LLAMA_TENSORS,
)
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    keys=f"{ROPE} sliding_window",
    build_layer=_ministral3,
    tensors=LLAMA_TENSORS,
    ignored_keys="layer_types",
)


# Mixtral: Mistral with experts for MLPs.
def _mixtral_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, window=keys["sliding_window"], mlp=experts(keys, Routing(renormalize=True)))


MIXTRAL_TENSORS = separate_experts(
    ".block_sparse_moe.gate", *(f".block_sparse_moe.experts.#.{name}" for name in ("w1", "w3", "w2"))
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys=f"{ROPE} sliding_window num_experts num_experts_per_tok",
    build_layer=_mixtral_layer,
    tensors=llama_tensors(MIXTRAL_TENSORS),
    alternative_tensors=FUSED_EXPERT_TENSORS,
    ignored_keys="layer_types attention_bias",
)


# MiniMax-M2: sigmoid router with a correction bias, partial RoPE, norms over all heads.
def _minimax_m2_layer(keys: Keys, layer: int) -> LayerSpec:
    part = keys["partial_rotary_factor"]
    if part is None and keys["rotary_dim"]:
        part = keys["rotary_dim"] / keys["head_dim"]
    return llama_layer(
        keys,
        rope=rope({**keys, "partial_rotary_factor": part}, is_partial=True),
        mlp=experts(keys, Routing(scores="sigmoid", renormalize=True, has_correction_bias=True)),
        qk_norm=qk_norm(keys, over="all_heads"),
    )


def _correction(module: str) -> dict[str, str | HFTensors]:
    return {".mlp.router_correction": HFTensors((f"{module}.e_score_correction_bias",), "array")}


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    keys=f"{ROPE} rotary_dim num_experts num_experts_per_tok",
    build_layer=_minimax_m2_layer,
    tensors=llama_tensors({**MIXTRAL_TENSORS, **ALL_HEADS_TENSORS, **_correction(".block_sparse_moe")}),
    alternative_tensors={**FUSED_EXPERT_TENSORS, **map_tensors(LLAMA_BLOCK, _correction(".mlp"))},
    supported_values={
        "scoring_func": (("sigmoid",), "scores are sigmoids"),
        "use_qk_norm": ((True,), "queries and keys are normalized"),
        "qk_norm_type": (("per_layer",), "all heads are normalized together"),
        "shared_intermediate_size": ((0,), "there is no shared expert"),
        "use_routing_bias": ((True,), "scores have a correction bias"),
    },
)
