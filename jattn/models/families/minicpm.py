"""MiniCPM: a Llama whose embeddings, sums and logits are scaled with its width and depth."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(keys, qkv_bias=has_bias, out_bias=has_bias)


def _model(keys: Keys) -> Mapping[str, Any]:
    return {
        "embedding_scale": keys["scale_emb"],
        "logit_scale": keys["dim_model_base"] / keys["hidden_size"],
        "residual_scale": keys["scale_depth"] / keys["num_hidden_layers"] ** 0.5,
    }


MINICPM = Family(
    model_type="minicpm",
    architecture="MiniCPMForCausalLM",
    defaults={
        **ROPE,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "scale_emb": 1.0,
        "dim_model_base": 1,
        "scale_depth": 1.0,
    },
    layer=_layer,
    model=_model,
    tensors=LLAMA_TENSORS,
    harmless=("mup_denominator",),
)
