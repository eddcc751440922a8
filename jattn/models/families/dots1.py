"""dots.llm1: experts by corrected sigmoids, queries and keys normalised head by head."""

from jattn.models.families.corrected_experts import (
    CORRECTED_KEYS,
    CORRECTED_TENSORS,
    ONE_GROUP,
    corrected_experts,
)
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import FULL, SLIDING, layer_type, llama_layer, rope
from jattn.models.families.tensors import FUSED_EXPERT_TENSORS, LLAMA_TENSORS, QK_NORM_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_window = keys["sliding_window"] is not None and layer >= keys["max_window_layers"]
    kind, has_bias = layer_type(keys, layer, SLIDING if has_window else FULL), bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=keys["sliding_window"] if kind == SLIDING else None,
        rope=rope(keys, kind),
        mlp=corrected_experts(keys, layer),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
    )


DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    defaults={
        **ROPE,
        **CORRECTED_KEYS,
        "n_shared_experts": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
    },
    layer=_layer,
    tensors={**LLAMA_TENSORS, **QK_NORM_TENSORS, **CORRECTED_TENSORS},
    other_tensors=FUSED_EXPERT_TENSORS,
    aliases={"num_local_experts": "n_routed_experts"},
    only=ONE_GROUP,
)
