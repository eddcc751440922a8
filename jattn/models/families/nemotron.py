"""Nemotron, Minitron: LayerNorm by 1 + weight, MLPs without gates, half of each head rotated."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, plain_mlp, rope
from jattn.models.families.tensors import LLAMA_TENSORS, PLAIN_MLP_TENSORS
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        mlp=plain_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    defaults={
        **ROPE,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "attention_bias": False,
        "mlp_bias": False,
    },
    aliases={"norm_eps": "rms_norm_eps"},
    layer=_layer,
    norm="layer_offset",
    tensors={**LLAMA_TENSORS, **PLAIN_MLP_TENSORS},
)
