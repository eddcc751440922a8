"""Gemma 1: a Llama with norms by 1 + weight, GELU, and scaled embeddings."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.gemma2 import CAUSAL_ONLY
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import attention, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import MLPSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    # Transformers takes "gelu" for the tanh that the weights were made with, and knows no hidden_activation.
    hidden_act = "gelu_pytorch_tanh" if keys["hidden_act"] == "gelu" else keys["hidden_act"]
    has_bias = bool(keys["attention_bias"])
    return LayerSpec(
        attention=attention(keys),
        rope=rope(keys),
        mlp=MLPSpec(intermediate_size=keys["intermediate_size"], hidden_act=hidden_act),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    defaults={
        **ROPE,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "attention_bias": False,
    },
    layer=_layer,
    model=lambda keys: {"embedding_scale": keys["hidden_size"] ** 0.5},
    norm="rms_offset",
    tensors=LLAMA_TENSORS,
    only=CAUSAL_ONLY,
    harmless=("hidden_activation",),
)
