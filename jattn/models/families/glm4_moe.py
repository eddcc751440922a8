"""GLM-4.5, GLM-4.6: experts by corrected sigmoids; a part of each head rotated, perhaps heads normalised."""

from jattn.models.families.corrected_experts import (
    CORRECTED_KEYS,
    CORRECTED_TENSORS,
    ONE_GROUP,
    corrected_experts,
)
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, rope
from jattn.models.families.tensors import FUSED_EXPERT_TENSORS, LLAMA_TENSORS, QK_NORM_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm


def _layer(keys: Keys, layer: int) -> LayerSpec:
    norm = QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"]))
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        mlp=corrected_experts(keys, layer),
        qkv_bias=bool(keys["attention_bias"]),
        qk_norm=norm if keys["use_qk_norm"] else None,
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        **ROPE,
        **CORRECTED_KEYS,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
    },
    layer=_layer,
    tensors={**LLAMA_TENSORS, **QK_NORM_TENSORS, **CORRECTED_TENSORS},
    other_tensors=FUSED_EXPERT_TENSORS,
    aliases={"num_local_experts": "n_routed_experts"},
    only=ONE_GROUP,
)
