"""Cohere 2, Command-R7B: windows in three of four layers, and a rope in those alone."""

from jattn.models.families.cohere import COHERE, PARALLEL_TENSORS
from jattn.models.families.family import Family, Keys
from jattn.models.families.reading import FULL, SLIDING, is_nth, layer_type, llama_layer, rope
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    kind = layer_type(keys, layer, FULL if is_nth(keys, "sliding_window_pattern", layer) else SLIDING)
    window = keys["sliding_window"] if kind == SLIDING else None
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=window,
        rope=None if window is None else rope(keys, kind, interleaved=True),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    defaults={
        **COHERE.defaults,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    layer=_layer,
    model=COHERE.model,
    norm=COHERE.norm,
    norm_placement=COHERE.norm_placement,
    tensors=PARALLEL_TENSORS,
    aliases={**COHERE.aliases, "layer_switch": "sliding_window_pattern"},
    only={
        "use_qk_norm": ((False,), "queries and keys are not normalised"),
        "rotary_pct": ((1, 1.0), "the family rotates whole heads"),
        "use_parallel_block": ((True,), "attention and MLP stand side by side"),
        "use_gated_activation": ((True,), "its MLPs are gated"),
        "order_of_interleaved_layers": (("local_attn_first",), "windows come first"),
        "position_embedding_type": (("rope_gptj",), "pairs of its rope are neighbours"),
    },
    harmless=("use_parallel_embedding", "use_embedding_sharing", "_sliding_window_pattern"),
)
