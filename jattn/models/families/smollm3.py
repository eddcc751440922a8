"""SmolLM3: every fourth layer has no rope; a window there, where it is switched on."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import FULL, SLIDING, gated_mlp, is_rotated, layer_type, llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_rope, has_bias = is_rotated(keys, layer), bool(keys["attention_bias"])
    has_window = bool(keys["use_sliding_window"]) and keys["sliding_window"] is not None
    kind = layer_type(keys, layer, SLIDING if has_window and not has_rope else FULL)
    return llama_layer(
        keys,
        window=keys["sliding_window"] if has_window and kind == SLIDING else None,
        rope=rope(keys, kind) if has_rope else None,
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        **ROPE,
        "rope_theta": 2e6,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_bias": False,
        "mlp_bias": False,
    },
    layer=_layer,
    tensors=LLAMA_TENSORS,
    harmless=("max_window_layers",),
)
