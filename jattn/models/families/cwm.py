"""CWM: a Llama with a window in three of four layers."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import FULL, SLIDING, gated_mlp, layer_type, llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec

_LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _layer(keys: Keys, layer: int) -> LayerSpec:
    kind = layer_type(keys, layer, SLIDING if layer % 4 else FULL)
    said = keys["rope_parameters"] or keys["rope_scaling"]
    turned = {**keys, "rope_parameters": said or {**_LLAMA3, "original_max_position_embeddings": 8192}}
    return llama_layer(
        keys,
        window=keys["sliding_window"] if kind == SLIDING else None,
        rope=rope({**turned, "rope_scaling": None}, kind),
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
    )


CWM = Family(
    model_type="cwm",
    architecture="CwmForCausalLM",
    defaults={
        **ROPE,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "layer_types": None,
        "bos_token_id": 128000,
        "eos_token_id": lambda keys: [128001, 128008, 128009],
        "mlp_bias": False,
    },
    layer=_layer,
    tensors=LLAMA_TENSORS,
)
