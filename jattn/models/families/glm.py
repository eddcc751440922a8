"""GLM-4, GLM-4.5, Solar Open, dots.llm1 and ERNIE 4.5."""

import dataclasses

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    experts,
    gated_mlp,
    is_nth_layer,
    layer_type,
    llama_layer,
    qk_norm,
    rope,
    typed_layer,
)
from jattn.models.families.tensor_mappings import (
    EXPERT_TENSORS,
    FUSED_EXPERT_TENSORS,
    LLAMA_BLOCK,
    LLAMA_TENSORS,
    QK_NORM_TENSORS,
    gated_mlp_tensors,
    llama_tensors,
    map_tensors,
)
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.routing import Routing
from jattn.models.specs import ExpertsSpec, LayerSpec, MLPSpec


# GLM-4: interleaved RoPE in half of each head. GLM-4-0414: norms before and after attention and MLP.
def _glm4_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, rope=rope(keys, interleaved=True, is_partial=True), out_bias=False)


GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    keys=f"{ROPE} attention_bias",
    defaults={"eos_token_id": [151329, 151336, 151338]},
    build_layer=_glm4_layer,
    tensors=llama_tensors({".mlp.gate_up_proj": ".mlp.gate_up_proj"}),
)
GLM4 = dataclasses.replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    norm_placement="around",
    tensors=llama_tensors(
        {
            ".mlp.gate_up_proj": ".mlp.gate_up_proj",
            ".post_attention_layernorm": ".post_self_attn_layernorm",
            ".pre_feedforward_layernorm": ".post_attention_layernorm",
            ".post_feedforward_layernorm": ".post_mlp_layernorm",
        }
    ),
)

# DeepSeek-V3's mixture of experts: sigmoid scores with a correction bias, and shared experts.
_CORRECTED_KEYS = "moe_intermediate_size n_shared_experts routed_scaling_factor norm_topk_prob"
_CORRECTED_TENSORS: dict[str, str | HFTensors] = {
    **EXPERT_TENSORS,
    **gated_mlp_tensors(".mlp.shared_expert", ".mlp.shared_experts"),
    ".mlp.router_correction": HFTensors((".mlp.gate.e_score_correction_bias",), "array"),
}
_ONE_GROUP = {
    "n_group": ((1,), "experts are selected among all"),
    "topk_group": ((1,), "experts are selected among all"),
    "topk_method": (("noaux_tc",), "experts are selected by scores with a correction bias"),
    "scoring_func": (("sigmoid",), "scores are sigmoids"),
    "moe_layer_freq": ((1,), "all layers after the first dense ones have experts"),
}


def _corrected_experts(keys: Keys, layer: int) -> MLPSpec | ExpertsSpec:
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
    shared = gated_mlp(keys, size * count) if count else None
    routed_keys = {**keys, "num_experts": keys["n_routed_experts"]}
    return experts(routed_keys, routing, intermediate_size=size, shared=shared)


# GLM-4.5, GLM-4.6: DeepSeek-V3's mixture of experts, partial RoPE, optional norms of queries and keys.
def _glm4_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        mlp=_corrected_experts(keys, layer),
        out_bias=False,
        qk_norm=qk_norm(keys) if keys["use_qk_norm"] else None,
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    keys=f"{ROPE} {_CORRECTED_KEYS} num_experts_per_tok first_k_dense_replace attention_bias use_qk_norm",
    defaults={"n_routed_experts": 128},
    build_layer=_glm4_moe_layer,
    tensors=llama_tensors({**QK_NORM_TENSORS, **_CORRECTED_TENSORS}),
    alternative_tensors=FUSED_EXPERT_TENSORS,
    supported_values=_ONE_GROUP,
)


# Solar Open: a GLM-4.5 with experts in all layers and full RoPE.
def _solar_open_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, mlp=_corrected_experts(keys, layer), out_bias=False)


SOLAR_OPEN = dataclasses.replace(
    GLM4_MOE,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    keys=f"{ROPE} {_CORRECTED_KEYS} num_experts_per_tok attention_bias",
    defaults={
        "partial_rotary_factor": 1.0,
        "n_routed_experts": 128,
        "first_k_dense_replace": 0,
        "use_qk_norm": False,
        "intermediate_size": lambda keys: keys["moe_intermediate_size"],
    },
    build_layer=_solar_open_layer,
    supported_values={**_ONE_GROUP, "use_qk_norm": ((False,), "queries and keys are not normalized")},
)


# dots.llm1: DeepSeek-V3's mixture of experts, norms of queries and keys.
def _dots1_layer(keys: Keys, layer: int) -> LayerSpec:
    has_window = keys["sliding_window"] is not None and layer >= keys["max_window_layers"]
    kind = layer_type(keys, layer, SLIDING if has_window else FULL)
    return typed_layer(keys, kind, mlp=_corrected_experts(keys, layer), qk_norm=qk_norm(keys))


DOTS1 = dataclasses.replace(
    GLM4_MOE,
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    keys=(
        f"{ROPE} {_CORRECTED_KEYS} first_k_dense_replace attention_bias sliding_window max_window_layers "
        "layer_types"
    ),
    defaults={"n_routed_experts": 128, "num_experts_per_tok": 8},
    build_layer=_dots1_layer,
)

# ERNIE 4.5: a Llama with interleaved RoPE.
ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    other_architectures=("Ernie4_5_ForCausalLM",),
    keys=f"{ROPE} use_bias",
    build_layer=lambda keys, layer: llama_layer(
        {**keys, "attention_bias": keys["use_bias"], "mlp_bias": keys["use_bias"]},
        rope=rope(keys, interleaved=True),
    ),
    tensors=LLAMA_TENSORS,
)


# ERNIE 4.5 with experts: a router with a correction bias, dense layers in between, shared experts.
def _ernie4_5_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    first, last = keys["moe_layer_start_index"], keys["moe_layer_end_index"]
    last = keys["num_hidden_layers"] - 1 if last == -1 else last
    mlp: MLPSpec | ExpertsSpec = gated_mlp(keys)
    if is_nth_layer(keys, "moe_layer_interval", layer) and first <= layer <= last:
        size, count = keys["moe_intermediate_size"], keys["moe_num_shared_experts"]
        shared = gated_mlp(keys, size * count) if count else None
        routing = Routing(renormalize=True, has_correction_bias=True)
        mlp = experts(keys, routing, intermediate_size=size, shared=shared)
    return llama_layer(keys, rope=rope(keys, interleaved=True), mlp=mlp)


def _statics(module: str) -> dict[str, str | HFTensors]:
    name = f"{module}.moe_statics.e_score_correction_bias"
    return {".mlp.router_correction": HFTensors((name,), "one_row")}


ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    keys=(
        f"{ROPE} moe_intermediate_size num_experts num_experts_per_tok moe_num_shared_experts "
        "moe_layer_start_index moe_layer_end_index moe_layer_interval"
    ),
    build_layer=_ernie4_5_moe_layer,
    tensors=llama_tensors({**_CORRECTED_TENSORS, **_statics(".mlp")}),
    alternative_tensors={**FUSED_EXPERT_TENSORS, **map_tensors(LLAMA_BLOCK, _statics(".mlp.gate"))},
    supported_values={
        "use_bias": ((False,), "projections have no biases"),
        "moe_use_aux_free": ((True,), "scores have a correction bias"),
        "moe_gate": (("topk", "top2_fused"), "the best experts are selected"),
    },
    ignored_keys="moe_norm_min",
)
