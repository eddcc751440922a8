"""OLMo 3: OLMo 2 with a window in three of four layers, and a rope that is scaled in the others."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.olmo2 import OLMO2, all_heads
from jattn.models.families.reading import FULL, SLIDING, layer_type, llama_layer, rope_by_type
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    kind = layer_type(keys, layer, SLIDING if (layer + 1) % 4 else FULL)
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=keys["sliding_window"] if kind == SLIDING else None,
        rope=rope_by_type(keys, kind, keys["rope_theta"]),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=all_heads(keys),
    )


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={**OLMO2.defaults, "rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None},
    layer=_layer,
    norm=OLMO2.norm,
    norm_placement=OLMO2.norm_placement,
    tensors=OLMO2.tensors,
)
