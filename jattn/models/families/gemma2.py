"""Gemma 2: four norms a layer, soft caps, a window in every other layer."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import FULL, SLIDING, attention, layer_type, rope, window_of
from jattn.models.families.tensors import GEMMA_NORM_TENSORS, LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import MLPSpec

CAUSAL_ONLY = {"use_bidirectional_attention": ((False,), "decoders are causal")}


def _layer(keys: Keys, layer: int) -> LayerSpec:
    kind = layer_type(keys, layer, SLIDING if layer % 2 == 0 else FULL)
    has_bias = bool(keys["attention_bias"])
    return LayerSpec(
        attention=attention(
            keys,
            window=window_of(keys["sliding_window"]) if kind == SLIDING else None,
            scale=keys["query_pre_attn_scalar"] ** -0.5,
            soft_cap=keys["attn_logit_softcapping"],
        ),
        rope=rope(keys, kind),
        mlp=MLPSpec(intermediate_size=keys["intermediate_size"], hidden_act=keys["hidden_activation"]),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def _model(keys: Keys) -> Mapping[str, Any]:
    cap = keys["final_logit_softcapping"]
    return {"embedding_scale": keys["hidden_size"] ** 0.5, "final_logit_softcapping": cap and float(cap)}


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults={
        **ROPE,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "layer_types": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "attention_bias": False,
        "query_pre_attn_scalar": 256.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    layer=_layer,
    model=_model,
    tensors={**LLAMA_TENSORS, **GEMMA_NORM_TENSORS},
    norm="rms_offset",
    norm_placement="around",
    only=CAUSAL_ONLY,
    harmless=("sliding_window_size", "hidden_act"),
)
