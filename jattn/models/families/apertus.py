"""Apertus: MLPs without gates, whose activation (xIELU) is learned; queries and keys normalised."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, plain_mlp
from jattn.models.families.tensors import LLAMA_TENSORS, PLAIN_MLP_TENSORS, QK_NORM_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        mlp=plain_mlp(keys, has_bias=False),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
    )


_LAYER = "model.layers.*"
APERTUS = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    defaults={
        **ROPE,
        "rope_theta": 12e6,
        "rope_parameters": lambda keys: None if keys["rope_scaling"] else _LLAMA3,
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
    },
    layer=_layer,
    tensors={
        **LLAMA_TENSORS,
        **QK_NORM_TENSORS,
        **PLAIN_MLP_TENSORS,
        "layers.*.input_layernorm": Stored((f"{_LAYER}.attention_layernorm",)),
        "layers.*.post_attention_layernorm": Stored((f"{_LAYER}.feedforward_layernorm",)),
        **{
            f"layers.*.mlp.activation.{name}": Stored((f"{_LAYER}.mlp.act_fn.{name}",), "array")
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        },
    },
    only={
        "mlp_bias": ((False,), "MLPs have no biases"),
        "post_norm": ((False,), "norms stand before attention and MLP"),
        "qk_norm": ((True,), "queries and keys are normalised"),
    },
)
