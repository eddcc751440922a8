"""OLMo 2: norms behind attention and MLP; queries and keys are normalised over all heads."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer
from jattn.models.families.tensors import ALL_HEADS_TENSORS, NORMS_AFTER_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm


def all_heads(keys: Keys) -> QKNorm:
    """A norm of all heads as one."""
    return QKNorm(norm=NormSpec("rms_f32", keys["rms_norm_eps"]), over="all_heads")


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(keys, qkv_bias=has_bias, out_bias=has_bias, qk_norm=all_heads(keys))


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults={
        **ROPE,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
        "attention_bias": False,
    },
    layer=_layer,
    norm="rms_f32",
    norm_placement="after",
    tensors={**NORMS_AFTER_TENSORS, **ALL_HEADS_TENSORS},
)
