"""Qwen3: queries and keys are normalised head by head; windows as Qwen2."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.qwen2 import WINDOWS, qwen_layer_type, qwen_window
from jattn.models.families.reading import llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS, QK_NORM_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=qwen_window(keys, layer),
        rope=rope(keys, qwen_layer_type(keys, layer)),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
    )


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={
        **ROPE,
        **WINDOWS,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "attention_bias": False,
    },
    layer=_layer,
    tensors={**LLAMA_TENSORS, **QK_NORM_TENSORS},
    harmless=("use_mrope",),
)
