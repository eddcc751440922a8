"""InternLM3, and IQuest-Coder: a Llama with other defaults."""

import dataclasses

from jattn.models.families.family import Keys
from jattn.models.families.llama import LLAMA
from jattn.models.families.reading import gated_mlp, llama_layer
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    """The second kind of bias is that of all but queries, keys and values."""
    has_bias = bool(keys["mlp_bias"])
    mlp = gated_mlp(keys, has_bias=has_bias)
    return llama_layer(keys, mlp=mlp, qkv_bias=bool(keys["attention_bias"]), out_bias=has_bias)


INTERNLM3 = dataclasses.replace(
    LLAMA,
    model_type="internlm3",
    architecture="InternLM3ForCausalLM",
    other_architectures=("LlamaForCausalLM",),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
    layer=_layer,
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
IQUESTCODER = dataclasses.replace(
    LLAMA,
    model_type="iquestcoder",
    architecture="IQuestCoderForCausalLM",
    other_architectures=("LlamaForCausalLM",),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    only={**LLAMA.only, "clip_qkv": ((), "no checkpoint has it")},
)
