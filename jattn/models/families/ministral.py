"""Ministral: windows by layer; Ministral 3: yarn, and a temperature by position."""

from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.mistral import MISTRAL
from jattn.models.families.reading import FULL, SLIDING, layer_type, llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import Temperature
from pallas_kernels.checks import require_number


def _ministral(keys: Keys, layer: int) -> LayerSpec:
    kind = layer_type(keys, layer, FULL if keys["sliding_window"] is None else SLIDING)
    window = keys["sliding_window"] if kind == SLIDING else None
    return llama_layer(keys, window=window, rope=rope(keys, kind))


def _ministral3(keys: Keys, layer: int) -> LayerSpec:
    said = (keys["rope_parameters"] or keys["rope_scaling"] or {}).items()
    given = {key: value for key, value in said if value is not None}
    beta: Any = given.pop("llama_4_scaling_beta", 0)
    given.pop("max_position_embeddings", None)
    turned = rope({**keys, "rope_parameters": given, "rope_scaling": None})
    original: Any = given.get("original_max_position_embeddings", keys["max_position_embeddings"])
    require_number(llama_4_scaling_beta=beta)
    tuned = Temperature(floor_scale=float(original), attn_scale=float(beta), first=0) if beta else None
    return llama_layer(keys, window=keys["sliding_window"], rope=turned, temperature=tuned)


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    defaults={**MISTRAL.defaults, "layer_types": None},
    layer=_ministral,
    tensors=LLAMA_TENSORS,
)
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        **ROPE,
        "rope_parameters": lambda keys: None if keys["rope_scaling"] else _YARN,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    layer=_ministral3,
    tensors=LLAMA_TENSORS,
    harmless=("layer_types",),
)
