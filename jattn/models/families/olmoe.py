"""OLMoE: experts in every layer; queries and keys are normalised over all heads."""

from jattn.models.experts import Routing
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.olmo2 import all_heads
from jattn.models.families.qwen2_moe import EXPERT_TENSORS
from jattn.models.families.reading import ALL_HEADS_TENSORS, FUSED_EXPERT_TENSORS, LLAMA_TENSORS, llama_layer
from jattn.models.layer_spec import ExpertsSpec, LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    experts = ExpertsSpec(
        intermediate_size=keys["intermediate_size"],
        num_experts=keys["num_experts"],
        experts_per_token=keys["num_experts_per_tok"],
        routing=Routing(normalizes=bool(keys["norm_topk_prob"])),
        activation=keys["hidden_act"],
    )
    return llama_layer(keys, mlp=experts, qkv_bias=has_bias, out_bias=has_bias, qk_norm=all_heads(keys))


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
