"""gpt-oss: sinks, alternating windows, YaRN, biases, experts with clamped gates."""

from jattn.models.activations import ClampedSwiGLU
from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    attention,
    experts,
    layer_type,
    rope,
    window_bounds,
)
from jattn.models.families.tensor_mappings import LLAMA_TENSORS
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    attention_type = layer_type(keys, layer, FULL if layer % 2 else SLIDING)
    has_bias = bool(keys["attention_bias"])
    return LayerSpec(
        attention=attention(
            keys, window=window_bounds(keys["sliding_window"]) if attention_type == SLIDING else None
        ),
        rope=rope(keys, attention_type),
        mlp=experts(
            keys,
            Routing(scores="softmax_of_top_k", has_bias=True),
            activation=ClampedSwiGLU(alpha=keys["swiglu_alpha"], limit=keys["swiglu_limit"]),
            has_bias=True,
        ),
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_sinks=True,
    )


_MLP = "model.layers.*.mlp"
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys=f"{ROPE} sliding_window layer_types attention_bias num_experts num_experts_per_tok",
    defaults={
        "rope_parameters": lambda keys: None if keys["rope_scaling"] else _YARN,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    build_layer=_layer,
    norm="rms_f32",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.sinks": HFTensors(("model.layers.*.self_attn.sinks",), "array"),
        "layers.*.mlp.router": HFTensors((f"{_MLP}.router",)),
        "layers.*.mlp.gate_up_proj.weight": HFTensors(
            (f"{_MLP}.experts.gate_up_proj",), "experts_interleaved"
        ),
        "layers.*.mlp.gate_up_proj.bias": HFTensors(
            (f"{_MLP}.experts.gate_up_proj_bias",), "experts_interleaved"
        ),
        "layers.*.mlp.down_proj.weight": HFTensors((f"{_MLP}.experts.down_proj",), "array"),
        "layers.*.mlp.down_proj.bias": HFTensors((f"{_MLP}.experts.down_proj_bias",), "array"),
    },
    supported_values={"hidden_act": (("silu",), "its gates are clamped SwiGLU")},  # duplicates of other keys
)
