"""Cohere, Command-R: attention and MLP side by side, LayerNorm without bias, rope of neighbours."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS, QK_NORM_TENSORS
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm
from pallas_kernels.checks import require_int

PARALLEL_TENSORS = {
    name: stored for name, stored in LLAMA_TENSORS.items() if name != "layers.*.post_attention_layernorm"
}


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    norm = QKNorm(norm=NormSpec("layer_no_bias", keys["rms_norm_eps"]), over="own_head")
    return llama_layer(
        keys,
        rope=rope(keys, interleaved=True),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=norm if keys["use_qk_norm"] else None,
    )


def _model(keys: Keys) -> Mapping[str, Any]:
    """The scale of logits; and the context where config.json has a second name for it.

    Command-R's says max_position_embeddings 8192 beside a model_max_length of 131072, which it was trained
    for: its rope knows no end.

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
    defaults={
        **ROPE,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "eos_token_id": 255001,
        "attention_bias": False,
        "use_qk_norm": False,
        "logit_scale": 0.0625,
        "model_max_length": None,
    },
    layer=_layer,
    model=_model,
    norm="layer_no_bias",
    norm_placement="parallel",
    tensors={**PARALLEL_TENSORS, **QK_NORM_TENSORS},
    aliases={"layer_norm_eps": "rms_norm_eps"},
)
