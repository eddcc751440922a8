"""OLMo 1 to 3, OLMoE and FlexOlmo."""

import dataclasses

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    experts,
    layer_type,
    llama_layer,
    qk_norm,
    rope_by_type,
    typed_layer,
)
from jattn.models.families.tensor_mappings import (
    AFTER_NORM_TENSORS,
    ALL_HEADS_TENSORS,
    EXPERT_TENSORS,
    FUSED_EXPERT_TENSORS,
    LLAMA_TENSORS,
    llama_tensors,
)
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec, QKNorm

# OLMo: a Llama whose norms have no weights.
OLMO = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    keys=f"{ROPE} attention_bias clip_qkv",
    defaults={"rms_norm_eps": 1e-5},
    build_layer=lambda keys, layer: llama_layer(keys, clip_qkv=keys["clip_qkv"]),
    norm="layer_no_weight",
    tensors=LLAMA_TENSORS,
)


# OLMo 2: norms after attention and MLP; queries and keys are normalized over all heads.
def _all_heads(keys: Keys) -> QKNorm:
    return qk_norm(keys, "rms_f32", over="all_heads")


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=f"{ROPE} attention_bias",
    build_layer=lambda keys, layer: llama_layer(keys, qk_norm=_all_heads(keys)),
    norm="rms_f32",
    norm_placement="after",
    tensors=llama_tensors({**AFTER_NORM_TENSORS, **ALL_HEADS_TENSORS}),
)


# OLMo 3: OLMo 2 with a sliding window in three of four layers, and scaled RoPE in the others.
def _olmo3_layer(keys: Keys, layer: int) -> LayerSpec:
    kind = layer_type(keys, layer, SLIDING if (layer + 1) % 4 else FULL)
    rotary = rope_by_type(keys, kind, keys["rope_theta"])
    return typed_layer(keys, kind, rope=rotary, qk_norm=_all_heads(keys))


OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    keys=f"{ROPE} attention_bias sliding_window layer_types",
    build_layer=_olmo3_layer,
)


# OLMoE: experts in every layer, norms of queries and keys over all heads. FlexOlmo: an OLMo 2 with experts.
def _olmoe_layer(keys: Keys, layer: int) -> LayerSpec:
    routing = Routing(renormalize=bool(keys["norm_topk_prob"]))
    return llama_layer(keys, mlp=experts(keys, routing), qk_norm=_all_heads(keys))


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    keys=f"{ROPE} attention_bias num_experts_per_tok norm_topk_prob",
    defaults={"num_experts": 64},
    build_layer=_olmoe_layer,
    norm="rms_f32",
    tensors=llama_tensors({**ALL_HEADS_TENSORS, **EXPERT_TENSORS}),
    supported_values={"clip_qkv": ((), "clipping after a norm is not supported")},
    alternative_tensors=FUSED_EXPERT_TENSORS,
)
FLEX_OLMO = dataclasses.replace(
    OLMOE,
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    defaults={"num_experts": 7},
    norm_placement="after",
    tensors={**OLMOE.tensors, **llama_tensors(AFTER_NORM_TENSORS)},
    supported_values={},
)
