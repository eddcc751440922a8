"""GLM-4, GLM-4.5, Solar Open and dots.llm1."""

import dataclasses

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    experts,
    gated_mlp,
    layer_type,
    llama_layer,
    rope,
)
from jattn.models.families.tensor_mappings import (
    EXPERT_TENSORS,
    FUSED_EXPERT_TENSORS,
    LLAMA_TENSORS,
    QK_NORM_TENSORS,
    gated_tensors,
)
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.routing import Routing
from jattn.models.specs import ExpertsSpec, LayerSpec, MLPSpec, NormSpec, QKNorm

# DeepSeek-V3's mixture of experts: sigmoid scores with a correction bias, and shared experts.
CORRECTED_KEYS: Keys = {
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
ONE_GROUP = {
    "n_group": ((1,), "experts are selected among all"),
    "topk_group": ((1,), "experts are selected among all"),
    "topk_method": (("noaux_tc",), "experts are selected by scores with a correction bias"),
    "scoring_func": (("sigmoid",), "scores are sigmoids"),
    "moe_layer_freq": ((1,), "all layers after the first dense ones have experts"),
}
_SIGMOID_ROUTED_MLP = "model.layers.*.mlp"
CORRECTED_TENSORS = {
    **EXPERT_TENSORS,
    **gated_tensors("layers.*.mlp.shared_expert", f"{_SIGMOID_ROUTED_MLP}.shared_experts"),
    "layers.*.mlp.router_correction": HFTensors(
        (f"{_SIGMOID_ROUTED_MLP}.gate.e_score_correction_bias",), "array"
    ),
}


def corrected_experts(keys: Keys, layer: int) -> MLPSpec | ExpertsSpec:
    """Return a layer's experts, or the dense MLP of one of the first layers."""
    if layer < keys["first_k_dense_replace"]:
        return gated_mlp(keys)
    routing = Routing(
        scores="sigmoid",
        renormalize=bool(keys["norm_topk_prob"]),
        has_correction_bias=True,
        factor=keys["routed_scaling_factor"],
    )
    size, count = keys["moe_intermediate_size"], keys["n_shared_experts"] or 0
    shared = gated_mlp({**keys, "intermediate_size": size * count}) if count else None
    routed_keys = {**keys, "num_experts": keys["n_routed_experts"]}
    return experts(routed_keys, routing, intermediate_size=size, shared=shared)


# GLM-4: interleaved RoPE in half of each head. GLM-4-0414: norms before and after attention and MLP.
def _glm4_layer(keys: Keys, layer: int) -> LayerSpec:
    rotary = rope(keys, interleaved=True, is_partial=True)
    return llama_layer(keys, rope=rotary, qkv_bias=bool(keys["attention_bias"]))


_GLM4_LAYER = "model.layers.*"
GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    keys=f"{ROPE} attention_bias",
    defaults={"partial_rotary_factor": 0.5, "eos_token_id": [151329, 151336, 151338]},
    build_layer=_glm4_layer,
    tensors={**LLAMA_TENSORS, "layers.*.mlp.gate_up_proj": HFTensors((f"{_GLM4_LAYER}.mlp.gate_up_proj",))},
)
GLM4 = dataclasses.replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    norm_placement="around",
    tensors={
        **GLM.tensors,
        "layers.*.post_attention_layernorm": HFTensors((f"{_GLM4_LAYER}.post_self_attn_layernorm",)),
        "layers.*.pre_feedforward_layernorm": HFTensors((f"{_GLM4_LAYER}.post_attention_layernorm",)),
        "layers.*.post_feedforward_layernorm": HFTensors((f"{_GLM4_LAYER}.post_mlp_layernorm",)),
    },
)


# GLM-4.5, GLM-4.6: DeepSeek-V3's mixture of experts, partial RoPE, optional norms of queries and keys.
def _glm4_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    norm = QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"]))
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        mlp=corrected_experts(keys, layer),
        qkv_bias=bool(keys["attention_bias"]),
        qk_norm=norm if keys["use_qk_norm"] else None,
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    keys=(
        f"{ROPE} moe_intermediate_size n_shared_experts num_experts_per_tok routed_scaling_factor "
        "first_k_dense_replace norm_topk_prob attention_bias use_qk_norm"
    ),
    defaults={"partial_rotary_factor": 0.5, "n_routed_experts": 128},
    build_layer=_glm4_moe_layer,
    tensors={**LLAMA_TENSORS, **QK_NORM_TENSORS, **CORRECTED_TENSORS},
    alternative_tensors=FUSED_EXPERT_TENSORS,
    supported_values=ONE_GROUP,
)


# Solar Open: a GLM-4.5 with experts in all layers and full RoPE.
def _solar_open_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, mlp=corrected_experts(keys, layer), qkv_bias=bool(keys["attention_bias"]))


SOLAR_OPEN = dataclasses.replace(
    GLM4_MOE,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    keys=(
        f"{ROPE} moe_intermediate_size n_shared_experts num_experts_per_tok routed_scaling_factor "
        "norm_topk_prob attention_bias"
    ),
    defaults={
        "partial_rotary_factor": 1.0,
        "n_routed_experts": 128,
        "first_k_dense_replace": 0,
        "use_qk_norm": False,
        "intermediate_size": lambda keys: keys["moe_intermediate_size"],
    },
    build_layer=_solar_open_layer,
    supported_values={
        **GLM4_MOE.supported_values,
        "use_qk_norm": ((False,), "queries and keys are not normalized"),
    },
)


# dots.llm1: DeepSeek-V3's mixture of experts, norms of queries and keys.
def _dots1_layer(keys: Keys, layer: int) -> LayerSpec:
    has_window = keys["sliding_window"] is not None and layer >= keys["max_window_layers"]
    kind, has_bias = layer_type(keys, layer, SLIDING if has_window else FULL), bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=keys["sliding_window"] if kind == SLIDING else None,
        rope=rope(keys, kind),
        mlp=corrected_experts(keys, layer),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
    )


DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    keys=(
        f"{ROPE} moe_intermediate_size n_shared_experts routed_scaling_factor first_k_dense_replace "
        "norm_topk_prob attention_bias sliding_window max_window_layers layer_types"
    ),
    defaults={"n_routed_experts": 128, "num_experts_per_tok": 8},
    build_layer=_dots1_layer,
    tensors={**LLAMA_TENSORS, **QK_NORM_TENSORS, **CORRECTED_TENSORS},
    alternative_tensors=FUSED_EXPERT_TENSORS,
    supported_values=ONE_GROUP,
)
