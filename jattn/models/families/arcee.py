"""Arcee's AFM: a Llama whose MLPs have no gates."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.llama import LLAMA
from jattn.models.families.reading import llama_layer, plain_mlp
from jattn.models.families.tensors import LLAMA_TENSORS, PLAIN_MLP_TENSORS
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias, mlp = bool(keys["attention_bias"]), plain_mlp(keys, has_bias=bool(keys["mlp_bias"]))
    return llama_layer(keys, mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    defaults={
        **LLAMA.defaults,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    layer=_layer,
    tensors={**LLAMA_TENSORS, **PLAIN_MLP_TENSORS},
)
