"""Mistral: a window in every layer, unless it is switched off."""

from jattn.models.families.family import Family
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer
from jattn.models.families.tensors import LLAMA_TENSORS

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        **ROPE,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    layer=lambda keys, layer: llama_layer(keys, window=keys["sliding_window"]),
    tensors=LLAMA_TENSORS,
    harmless=("layer_types", "attention_bias", "mlp_bias"),
)
