"""Seed-OSS: a Llama with biases of queries, keys and values."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.llama import LLAMA
from jattn.models.families.reading import gated_mlp, llama_layer
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(
        keys,
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=bool(keys["attention_bias"]),
        out_bias=bool(keys["attention_out_bias"]),
    )


SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "bos_token_id": 0,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    layer=_layer,
    tensors=LLAMA_TENSORS,
)
