"""Llama 1 to 4."""

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    experts,
    gated_mlp,
    is_nth_layer,
    layer_has_rope,
    layer_type,
    llama_layer,
    qk_norm,
    rope,
)
from jattn.models.families.tensor_mappings import LLAMA_TENSORS, gated_mlp_tensors, llama_tensors
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.routing import Routing
from jattn.models.specs import AttentionTemperature, ExpertsSpec, LayerSpec, MLPSpec

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias",
    build_layer=lambda keys, layer: llama_layer(keys),
    tensors=LLAMA_TENSORS,
    supported_values={
        "activation": (("swiglu",), "its MLPs are gated"),
        "rope_interleaved": ((False,), "pairs are elements of a head's halves"),
    },
    ignored_keys="sliding_window layer_types max_window_layers use_sliding_window",
)


# Llama 4's text model: chunked-local layers, layers without RoPE, experts between dense layers.
CHUNKED = "chunked_attention"


def _llama4_mlp(keys: Keys, layer: int) -> MLPSpec | ExpertsSpec:
    moe_layers, step = keys["moe_layers"], "interleave_moe_layer_step"
    if layer in moe_layers if moe_layers is not None else is_nth_layer(keys, step, layer):
        return experts(keys, Routing(scores="sigmoid", scale_target="input"), shared=gated_mlp(keys))
    return gated_mlp(keys, keys["intermediate_size_mlp"])


def _llama4_layer(keys: Keys, layer: int) -> LayerSpec:
    has_rope = layer_has_rope(keys, layer)
    attention_type = layer_type(keys, layer, CHUNKED if has_rope else FULL, (CHUNKED, FULL))
    tuned = AttentionTemperature(floor_scale=keys["floor_scale"], attn_scale=keys["attn_scale"])
    normed = qk_norm(keys, comes_after_rope=True, has_weight=False)
    return llama_layer(
        keys,
        chunk_size=keys["attention_chunk_size"] if attention_type == CHUNKED else None,
        rope=rope(keys, interleaved=True) if has_rope else None,
        mlp=_llama4_mlp(keys, layer),
        qk_norm=normed if has_rope and keys["use_qk_norm"] else None,
        temperature=None if has_rope or not keys["attn_temperature_tuning"] else tuned,
    )


LLAMA4 = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    keys=(
        f"{ROPE} intermediate_size_mlp layer_types attention_bias attention_chunk_size no_rope_layers "
        "no_rope_layer_interval use_qk_norm attn_temperature_tuning attn_scale num_experts "
        "num_experts_per_tok moe_layers interleave_moe_layer_step"
    ),
    defaults={"floor_scale": 8192.0},
    build_layer=_llama4_layer,
    tensors=llama_tensors(
        {
            **gated_mlp_tensors(".mlp", ".feed_forward"),
            **gated_mlp_tensors(".mlp.shared_expert", ".feed_forward.shared_expert"),
            ".mlp.router": ".feed_forward.router",
            ".mlp.gate_up_proj.weight": HFTensors((".feed_forward.experts.gate_up_proj",), "experts_stacked"),
            ".mlp.down_proj.weight": HFTensors((".feed_forward.experts.down_proj",), "array"),
        }
    ),
    aliases={"num_local_experts": "num_experts"},
)
