"""OLMo: a Llama whose norms have no weights."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(keys, qkv_bias=has_bias, out_bias=has_bias, clip_qkv=keys["clip_qkv"])


OLMO = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    defaults={
        **ROPE,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
        "attention_bias": False,
        "clip_qkv": None,
    },
    layer=_layer,
    norm="layer_no_weight",
    tensors=LLAMA_TENSORS,
)
