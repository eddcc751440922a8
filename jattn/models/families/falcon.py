"""Falcon: attention and MLP side by side; a rope or ALiBi, one kv head, several, or one a query head."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.bloom import BLOOM
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import alibi_slopes, attention, llama_layer, plain_mlp, rope
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec


def _num_kv_heads(keys: Keys) -> int:
    if keys["new_decoder_architecture"] or not keys["multi_query"]:
        return int(keys["num_key_value_heads"])
    return 1


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias, scale = bool(keys["bias"]), keys["head_dim"] ** -0.5
    slopes = tuple(slope * scale for slope in alibi_slopes(keys["num_attention_heads"]))  # added before it
    return llama_layer(
        keys,
        attention=attention(keys, num_kv_heads=_num_kv_heads(keys)),
        rope=None if keys["alibi"] else rope(keys),
        alibi_slopes=slopes if keys["alibi"] else None,
        mlp=plain_mlp(keys, has_bias=has_bias),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def _model(keys: Keys) -> Mapping[str, Any]:
    is_new, count = keys["new_decoder_architecture"], keys["num_ln_in_parallel_attn"]
    has_two = is_new and (2 if count is None else count) == 2
    placement = (
        "before" if not (is_new or keys["parallel_attn"]) else "parallel_apart" if has_two else "parallel"
    )
    return {"num_key_value_heads": _num_kv_heads(keys), "norm_placement": placement}


_BLOCK = "transformer.h.*"
FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    other_architectures=("RWForCausalLM",),
    defaults={
        **ROPE,
        "intermediate_size": lambda keys: 4 * keys["hidden_size"],
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 11),
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": None,
        "bias": False,
    },
    layer=_layer,
    model=_model,
    norm="layer",
    tensors={
        **BLOOM.tensors,
        "layers.*.attention_layernorm": Stored((f"{_BLOCK}.ln_attn",)),
        "layers.*.mlp_layernorm": Stored((f"{_BLOCK}.ln_mlp",)),
    },
    aliases={
        **BLOOM.aliases,
        "n_head_kv": "num_key_value_heads",
        "num_kv_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
    },
    harmless=("apply_residual_connection_post_layernorm",),  # its code never looks at it
    prefix="transformer.",
)
