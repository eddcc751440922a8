"""Llama 1 to 3."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import gated_mlp, llama_layer
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        **ROPE,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    },
    layer=_layer,
    tensors=LLAMA_TENSORS,
    only={
        "activation": (("swiglu",), "its MLPs are gated"),
        "rope_interleaved": ((False,), "pairs are of a head's halves"),
    },
    harmless=("sliding_window", "layer_types", "max_window_layers", "use_sliding_window"),
)
