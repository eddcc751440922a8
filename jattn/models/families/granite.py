"""Granite: a Llama with multipliers."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import attention, gated_mlp, llama_layer
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec
from pallas_kernels.checks import require_positive


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        attention=attention(keys, scale=keys["attention_multiplier"]),
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def multipliers(keys: Keys) -> Mapping[str, Any]:
    """What embeddings, logits, and what attention and MLP give are multiplied by."""
    require_positive(logits_scaling=keys["logits_scaling"])
    return {
        "embedding_scale": keys["embedding_multiplier"],
        "logit_scale": 1 / keys["logits_scaling"],
        "residual_scale": keys["residual_multiplier"],
    }


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults={
        **ROPE,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    layer=_layer,
    model=multipliers,
    tensors=LLAMA_TENSORS,
)
