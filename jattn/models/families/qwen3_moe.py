"""Qwen3-MoE: Qwen3 with experts for MLPs."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.qwen2 import WINDOWS
from jattn.models.families.qwen2_moe import EXPERTS, qwen_mlp
from jattn.models.families.reading import llama_layer
from jattn.models.families.tensors import EXPERT_TENSORS, FUSED_EXPERT_TENSORS, LLAMA_TENSORS, QK_NORM_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=keys["sliding_window"] if keys["use_sliding_window"] else None,
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
        mlp=qwen_mlp(keys, layer),
    )


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        **ROPE,
        **WINDOWS,
        **EXPERTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    layer=_layer,
    tensors={**LLAMA_TENSORS, **QK_NORM_TENSORS, **EXPERT_TENSORS},
    aliases={"num_local_experts": "num_experts"},
    other_tensors=FUSED_EXPERT_TENSORS,
)
