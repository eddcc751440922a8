"""OLMoE: experts in every layer; queries and keys are normalised over all heads."""

from jattn.models.experts import Routing
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.olmo2 import all_heads
from jattn.models.families.reading import experts, llama_layer
from jattn.models.families.tensors import (
    ALL_HEADS_TENSORS,
    EXPERT_TENSORS,
    FUSED_EXPERT_TENSORS,
    LLAMA_TENSORS,
)
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    mlp = experts(keys, Routing(normalizes=bool(keys["norm_topk_prob"])))
    return llama_layer(keys, mlp=mlp, qkv_bias=has_bias, out_bias=has_bias, qk_norm=all_heads(keys))


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
        **ROPE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    layer=_layer,
    norm="rms_f32",
    tensors={**LLAMA_TENSORS, **ALL_HEADS_TENSORS, **EXPERT_TENSORS},
    only={"clip_qkv": ((), "it would be cut off behind a norm")},
    aliases={"num_local_experts": "num_experts"},
    other_tensors=FUSED_EXPERT_TENSORS,
)
