"""OLMo 1 to 3, OLMoE and FlexOlmo."""

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import FULL, SLIDING, experts, layer_type, llama_layer, rope_by_type
from jattn.models.families.tensor_mappings import (
    ALL_HEADS_TENSORS,
    EXPERT_TENSORS,
    FUSED_EXPERT_TENSORS,
    LLAMA_TENSORS,
    NORMS_AFTER_TENSORS,
)
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec, NormSpec, QKNorm


# OLMo: a Llama whose norms have no weights.
def _olmo_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(keys, qkv_bias=has_bias, out_bias=has_bias, clip_qkv=keys["clip_qkv"])


OLMO = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    keys=f"{ROPE} attention_bias clip_qkv",
    defaults={"rms_norm_eps": 1e-5},
    build_layer=_olmo_layer,
    norm="layer_no_weight",
    tensors=LLAMA_TENSORS,
)


# OLMo 2: norms after attention and MLP; queries and keys are normalized over all heads.
def all_heads(keys: Keys) -> QKNorm:
    """Return the norm of queries and keys over all heads."""
    return QKNorm(norm=NormSpec("rms_f32", keys["rms_norm_eps"]), over="all_heads")


def _olmo2_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(keys, qkv_bias=has_bias, out_bias=has_bias, qk_norm=all_heads(keys))


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=f"{ROPE} attention_bias",
    build_layer=_olmo2_layer,
    norm="rms_f32",
    norm_placement="after",
    tensors={**NORMS_AFTER_TENSORS, **ALL_HEADS_TENSORS},
)


# OLMo 3: OLMo 2 with a sliding window in three of four layers, and scaled RoPE in the others.
def _olmo3_layer(keys: Keys, layer: int) -> LayerSpec:
    attention_type = layer_type(keys, layer, SLIDING if (layer + 1) % 4 else FULL)
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=keys["sliding_window"] if attention_type == SLIDING else None,
        rope=rope_by_type(keys, attention_type, keys["rope_theta"]),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=all_heads(keys),
    )


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    keys=f"{ROPE} attention_bias sliding_window layer_types",
    build_layer=_olmo3_layer,
    norm=OLMO2.norm,
    norm_placement=OLMO2.norm_placement,
    tensors=OLMO2.tensors,
)


# OLMoE: experts in every layer; queries and keys are normalized over all heads.
def _olmoe_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    mlp = experts(keys, Routing(renormalize=bool(keys["norm_topk_prob"])))
    return llama_layer(keys, mlp=mlp, qkv_bias=has_bias, out_bias=has_bias, qk_norm=all_heads(keys))


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    keys=f"{ROPE} attention_bias num_experts_per_tok norm_topk_prob",
    defaults={"num_experts": 64},
    build_layer=_olmoe_layer,
    norm="rms_f32",
    tensors={**LLAMA_TENSORS, **ALL_HEADS_TENSORS, **EXPERT_TENSORS},
    supported_values={"clip_qkv": ((), "clipping after a norm is not supported")},
    alternative_tensors=FUSED_EXPERT_TENSORS,
)


# FlexOlmo: OLMo 2 with experts in every layer.
FLEX_OLMO = Family(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    keys=f"{ROPE} attention_bias num_experts_per_tok norm_topk_prob",
    defaults={"num_experts": 7},
    build_layer=OLMOE.build_layer,
    norm=OLMO2.norm,
    norm_placement=OLMO2.norm_placement,
    tensors={**NORMS_AFTER_TENSORS, **ALL_HEADS_TENSORS, **EXPERT_TENSORS},
    aliases=OLMOE.aliases,
    alternative_tensors=FUSED_EXPERT_TENSORS,
)
