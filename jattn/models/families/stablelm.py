"""StableLM: a Llama with LayerNorms that rotates a quarter of each head."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm


def _layer(keys: Keys, layer: int) -> LayerSpec:
    norm = QKNorm(norm=NormSpec("layer_no_bias", keys["rms_norm_eps"]), over="own_head")
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        qkv_bias=bool(keys["use_qkv_bias"]),
        qk_norm=norm if keys["qk_layernorm"] else None,
    )


_ATTENTION = "model.layers.*.self_attn"
STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    other_architectures=("StableLMEpochForCausalLM",),
    defaults={
        **ROPE,
        "partial_rotary_factor": 0.25,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    layer=_layer,
    model=lambda keys: {"norm_placement": "parallel" if keys["use_parallel_residual"] else "before"},
    norm="layer",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.q_norm.weight": Stored(
            (f"{_ATTENTION}.q_layernorm.norms.#.weight",), "rows_apart"
        ),
        "layers.*.self_attn.k_norm.weight": Stored(
            (f"{_ATTENTION}.k_layernorm.norms.#.weight",), "rows_apart"
        ),
    },
    aliases={"layer_norm_eps": "rms_norm_eps"},
)
