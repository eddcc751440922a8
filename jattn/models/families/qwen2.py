"""Qwen2 and Qwen2.5: biases; a window from some layer on, where it is switched on."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import FULL, SLIDING, layer_type, llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec

WINDOWS: Keys = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def qwen_layer_type(keys: Keys, layer: int) -> str:
    """Which attention a layer has."""
    is_behind = keys["sliding_window"] is not None and layer >= keys["max_window_layers"]
    return layer_type(keys, layer, SLIDING if is_behind and keys["use_sliding_window"] else FULL)


def qwen_window(keys: Keys, layer: int) -> int | None:
    """Keys that a layer's queries see, themselves included; None = all."""
    is_sliding = qwen_layer_type(keys, layer) == SLIDING and keys["use_sliding_window"]
    return keys["sliding_window"] if is_sliding else None


def _layer(keys: Keys, layer: int) -> LayerSpec:
    kind = qwen_layer_type(keys, layer)
    return llama_layer(keys, window=qwen_window(keys, layer), rope=rope(keys, kind), qkv_bias=True)


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={**ROPE, **WINDOWS, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    layer=_layer,
    tensors=LLAMA_TENSORS,
    harmless=("attention_bias", "qkv_bias", "mlp_bias", "use_mrope"),
)
