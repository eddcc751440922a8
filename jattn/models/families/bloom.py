"""BLOOM: ALiBi, LayerNorm, a norm behind the embedding."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.reading import alibi_slopes, attention
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import MLPSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    size = keys["intermediate_size"]
    return LayerSpec(
        attention=attention(keys),
        alibi_slopes=alibi_slopes(keys["num_attention_heads"]),
        mlp=MLPSpec(intermediate_size=size, hidden_act="gelu_pytorch_tanh", kind="plain", has_bias=True),
        qkv_bias=True,
        out_bias=True,
    )


def _model(keys: Keys) -> Mapping[str, Any]:
    adds_to_normed = bool(keys["apply_residual_connection_post_layernorm"])
    return {"has_embedding_norm": True, "adds_to_normed": adds_to_normed}


_BLOCK = "transformer.h.*"
BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": lambda keys: 4 * keys["hidden_size"],
        "max_position_embeddings": 2048,  # of training: ALiBi knows no end
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "apply_residual_connection_post_layernorm": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    layer=_layer,
    model=_model,
    norm="layer",
    tensors={
        "embed_tokens": Stored(("transformer.word_embeddings",)),
        "embedding_norm": Stored(("transformer.word_embeddings_layernorm",)),
        "layers.*.input_layernorm": Stored((f"{_BLOCK}.input_layernorm",)),
        "layers.*.self_attn.qkv_proj": Stored((f"{_BLOCK}.self_attention.query_key_value",)),
        "layers.*.self_attn.o_proj": Stored((f"{_BLOCK}.self_attention.dense",)),
        "layers.*.post_attention_layernorm": Stored((f"{_BLOCK}.post_attention_layernorm",)),
        "layers.*.mlp.up_proj": Stored((f"{_BLOCK}.mlp.dense_h_to_4h",)),
        "layers.*.mlp.down_proj": Stored((f"{_BLOCK}.mlp.dense_4h_to_h",)),
        "norm": Stored(("transformer.ln_f",)),
        "lm_head": Stored(("lm_head",)),
    },
    aliases={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "layer_norm_epsilon": "rms_norm_eps",
        "seq_length": "max_position_embeddings",
    },
    harmless=(
        "slow_but_exact",
        "attention_softmax_in_fp32",
        "masked_softmax_fusion",
        "offset_alibi",
        "skip_bias_add",
        "skip_bias_add_qkv",
    ),
    prefix="transformer.",
)
