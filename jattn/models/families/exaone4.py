"""EXAONE 4: norms behind attention and MLP; windows in some layers, and a rope in those alone."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import FULL, SLIDING, layer_type, llama_layer, rope
from jattn.models.families.tensors import NORMS_AFTER_TENSORS, QK_NORM_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm
from pallas_kernels.checks import require, require_int


def _pattern(keys: Keys, layer: int) -> str:
    """Numbers count layers to the next full one; a word has a letter a layer, L for a window."""
    pattern, window = keys["sliding_window_pattern"], keys["sliding_window"]
    pattern = 4 if pattern is None else pattern
    if window is None or not pattern:
        return FULL
    if isinstance(pattern, str):
        require(not set(pattern) - {"L", "G"}, "sliding_window_pattern", "have letters L and G", pattern)
        is_last = layer == keys["num_hidden_layers"] - 1
        return FULL if is_last or pattern[layer % len(pattern)] != "L" else SLIDING
    require_int(sliding_window_pattern=pattern)
    return SLIDING if (layer + 1) % pattern else FULL


def _layer(keys: Keys, layer: int) -> LayerSpec:
    kind, window = layer_type(keys, layer, _pattern(keys, layer)), keys["sliding_window"]
    return llama_layer(
        keys,
        window=window if kind == SLIDING else None,
        rope=rope(keys, kind) if window is None or kind == SLIDING else None,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
    )


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    defaults={
        **ROPE,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "sliding_window": 4096,
        "sliding_window_pattern": None,
        "layer_types": None,
    },
    layer=_layer,
    norm_placement="after",
    tensors={**NORMS_AFTER_TENSORS, **QK_NORM_TENSORS},
)
