"""Phi-3, Phi-3.5, Phi-4-mini: a Llama with projections stored as one; longrope, partial rotation."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.rope import Rope


def _rope(keys: Keys) -> Rope:
    """With older names of longrope."""
    given = dict(keys["rope_scaling"] or keys["rope_parameters"] or {})
    kind = given.pop("type", None)
    given["rope_type"] = given.get("rope_type", kind)
    if given["rope_type"] in ("su", "yarn"):
        given["rope_type"] = "longrope"
    return rope({**keys, "rope_scaling": None, "rope_parameters": given}, is_partial=True)


def _layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, window=keys["sliding_window"], rope=_rope(keys))


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        **ROPE,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    layer=_layer,
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.qkv_proj": Stored(("model.layers.*.self_attn.qkv_proj",), "heads_stacked"),
        "layers.*.mlp.gate_up_proj": Stored(("model.layers.*.mlp.gate_up_proj",)),
    },
    only={
        **dict.fromkeys(
            ("attention_bias", "mlp_bias", "lm_head_bias"), ((False,), "its layers have no biases")
        ),
        "full_attn_mod": ((1,), "all its layers are alike"),
        "interpolate_factor": ((1,), "positions are not interpolated"),
    },
)
