"""Llama 1 to 4."""

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    attention,
    experts,
    gated_mlp,
    is_nth_layer,
    layer_has_rope,
    layer_type,
    llama_layer,
    rope,
)
from jattn.models.families.tensor_mappings import LLAMA_TENSORS, gated_tensors
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.routing import Routing
from jattn.models.specs import AttentionTemperature, ExpertsSpec, LayerSpec, MLPSpec, NormSpec, QKNorm


# Llama 1 to 3.
def _llama_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias",
    build_layer=_llama_layer,
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
    moe_layers = keys["moe_layers"]

    def dense(size_key: str) -> MLPSpec:
        return MLPSpec(intermediate_size=keys[size_key], hidden_act=keys["hidden_act"])

    if not (
        layer in moe_layers
        if moe_layers is not None
        else is_nth_layer(keys, "interleave_moe_layer_step", layer)
    ):
        return dense("intermediate_size_mlp")
    return experts(keys, Routing(scores="sigmoid", scale_target="input"), shared=dense("intermediate_size"))


def _llama4_layer(keys: Keys, layer: int) -> LayerSpec:
    has_rope, has_bias = layer_has_rope(keys, layer), bool(keys["attention_bias"])
    attention_type = layer_type(keys, layer, CHUNKED if has_rope else FULL, (CHUNKED, FULL))
    tuned = AttentionTemperature(floor_scale=keys["floor_scale"], attn_scale=keys["attn_scale"])
    normed = QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"]), comes_after_rope=True, has_weight=False)
    return LayerSpec(
        attention=attention(
            keys, chunk_size=keys["attention_chunk_size"] if attention_type == CHUNKED else None
        ),
        rope=rope(keys, interleaved=True) if has_rope else None,
        mlp=_llama4_mlp(keys, layer),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=normed if has_rope and keys["use_qk_norm"] else None,
        temperature=None if has_rope or not keys["attn_temperature_tuning"] else tuned,
    )


_LLAMA4_FFN, _LLAMA4_EXPERTS = "model.layers.*.feed_forward", "model.layers.*.feed_forward.experts"
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
    tensors={
        **LLAMA_TENSORS,
        **gated_tensors("layers.*.mlp", _LLAMA4_FFN),
        **gated_tensors("layers.*.mlp.shared_expert", f"{_LLAMA4_FFN}.shared_expert"),
        "layers.*.mlp.router": HFTensors((f"{_LLAMA4_FFN}.router",)),
        "layers.*.mlp.gate_up_proj.weight": HFTensors(
            (f"{_LLAMA4_EXPERTS}.gate_up_proj",), "experts_stacked"
        ),
        "layers.*.mlp.down_proj.weight": HFTensors((f"{_LLAMA4_EXPERTS}.down_proj",), "array"),
    },
    aliases={"num_local_experts": "num_experts"},
)
