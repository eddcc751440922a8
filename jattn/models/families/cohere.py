"""Cohere Command-R and Command-R7B."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import FULL, SLIDING, is_nth_layer, layer_type, llama_layer, rope
from jattn.models.families.tensor_mappings import LLAMA_TENSORS, QK_NORM_TENSORS
from jattn.models.specs import LayerSpec, NormSpec, QKNorm
from pallas_kernels.checks import require_int

# Cohere, Command-R: parallel attention and MLP, LayerNorm without bias, interleaved RoPE.
PARALLEL_TENSORS = {
    name: stored for name, stored in LLAMA_TENSORS.items() if name != "layers.*.post_attention_layernorm"
}


def _cohere_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    norm = QKNorm(norm=NormSpec("layer_no_bias", keys["rms_norm_eps"]), over="own_head")
    return llama_layer(
        keys,
        rope=rope(keys, interleaved=True),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=norm if keys["use_qk_norm"] else None,
    )


def _cohere_model(keys: Keys) -> Mapping[str, Any]:
    """Return the scale of logits, and the context if config.json has model_max_length.

    Command-R has max_position_embeddings 8192 and model_max_length 131072. It was trained for the latter.

    Source: vLLM `_get_and_verify_max_len`.
    """
    longest, scale = keys["model_max_length"], {"logit_scale": keys["logit_scale"]}
    if longest is None:
        return scale
    require_int(model_max_length=longest)
    return {**scale, "max_position_embeddings": longest}


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    keys=f"{ROPE} attention_bias use_qk_norm logit_scale model_max_length",
    build_layer=_cohere_layer,
    config_fields=_cohere_model,
    norm="layer_no_bias",
    norm_placement="parallel",
    tensors={**PARALLEL_TENSORS, **QK_NORM_TENSORS},
    aliases={"layer_norm_eps": "rms_norm_eps"},
)


# Cohere 2, Command-R7B: sliding windows in three of four layers, RoPE in these only.
def _cohere2_layer(keys: Keys, layer: int) -> LayerSpec:
    attention_type = layer_type(
        keys, layer, FULL if is_nth_layer(keys, "sliding_window_pattern", layer) else SLIDING
    )
    window = keys["sliding_window"] if attention_type == SLIDING else None
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=window,
        rope=None if window is None else rope(keys, attention_type, interleaved=True),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    keys=f"{ROPE} attention_bias logit_scale model_max_length sliding_window layer_types",
    defaults={"use_qk_norm": False, "sliding_window_pattern": 4},
    build_layer=_cohere2_layer,
    config_fields=COHERE.config_fields,
    norm=COHERE.norm,
    norm_placement=COHERE.norm_placement,
    tensors=PARALLEL_TENSORS,
    aliases={**COHERE.aliases, "layer_switch": "sliding_window_pattern"},
    supported_values={
        "use_qk_norm": ((False,), "queries and keys are not normalized"),
        "rotary_pct": ((1, 1.0), "the family rotates full heads"),
        "use_parallel_block": ((True,), "attention and MLP run in parallel"),
        "use_gated_activation": ((True,), "its MLPs are gated"),
        "order_of_interleaved_layers": (("local_attn_first",), "windows come first"),
        "position_embedding_type": (("rope_gptj",), "pairs of its rotary embedding are adjacent elements"),
    },
)
