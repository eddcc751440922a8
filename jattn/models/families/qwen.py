"""Qwen2 and Qwen3, dense and with experts, and MiMo."""

import dataclasses

from jattn.models.families.config_keys import ROPE, WINDOWS
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    experts,
    is_nth_layer,
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


def qwen_layer_type(keys: Keys, layer: int) -> str:
    """Return a layer's attention type."""
    is_sliding = keys["sliding_window"] is not None and layer >= keys["max_window_layers"]
    return layer_type(keys, layer, SLIDING if is_sliding and keys["use_sliding_window"] else FULL)


def qwen_window(keys: Keys, layer: int) -> int | None:
    """Return a layer's sliding window in tokens, including the query's own; None = full attention."""
    is_sliding = qwen_layer_type(keys, layer) == SLIDING and keys["use_sliding_window"]
    return keys["sliding_window"] if is_sliding else None


# Qwen2 and Qwen2.5: biases; a sliding window from some layer on if it is enabled.
def _qwen2_layer(keys: Keys, layer: int) -> LayerSpec:
    attention_type = qwen_layer_type(keys, layer)
    return llama_layer(keys, window=qwen_window(keys, layer), rope=rope(keys, attention_type), qkv_bias=True)


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=f"{ROPE} {WINDOWS}",
    build_layer=_qwen2_layer,
    tensors=LLAMA_TENSORS,
    ignored_keys="attention_bias qkv_bias mlp_bias",
)


# Qwen3: norms of queries and keys per head; sliding windows as in Qwen2.
def _qwen3_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=qwen_window(keys, layer),
        rope=rope(keys, qwen_layer_type(keys, layer)),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
    )


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=f"{ROPE} {WINDOWS} attention_bias",
    build_layer=_qwen3_layer,
    tensors={**LLAMA_TENSORS, **QK_NORM_TENSORS},
)


# Qwen2-MoE (Qwen1.5-MoE): experts, a gated shared expert, dense layers in between.
_QWEN2_MOE_MLP = "model.layers.*.mlp"


def qwen_mlp(keys: Keys, layer: int, shared: MLPSpec | None = None) -> MLPSpec | ExpertsSpec:
    """Return a layer's experts, or its dense MLP."""
    is_dense = layer in (keys["mlp_only_layers"] or ()) or keys["num_experts"] == 0
    if is_dense or not is_nth_layer(keys, "decoder_sparse_step", layer):
        return MLPSpec(intermediate_size=keys["intermediate_size"], hidden_act=keys["hidden_act"])
    routing, size = Routing(renormalize=bool(keys["norm_topk_prob"])), keys["moe_intermediate_size"]
    has_shared = shared is not None
    return experts(keys, routing, intermediate_size=size, shared=shared, gates_shared=has_shared)


def _qwen2_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    is_windowed = keys["use_sliding_window"] and layer % 2 == 0 and layer < keys["max_window_layers"]
    attention_type = layer_type(keys, layer, SLIDING if is_windowed else FULL)
    has_window = attention_type == SLIDING and keys["use_sliding_window"]
    size = keys["shared_expert_intermediate_size"]
    return llama_layer(
        keys,
        window=keys["sliding_window"] if has_window else None,
        rope=rope(keys, attention_type),
        qkv_bias=bool(keys["qkv_bias"]),
        mlp=qwen_mlp(keys, layer, MLPSpec(intermediate_size=size, hidden_act=keys["hidden_act"])),
    )


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    keys=(
        f"{ROPE} {WINDOWS} decoder_sparse_step mlp_only_layers norm_topk_prob qkv_bias "
        "moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok num_experts"
    ),
    build_layer=_qwen2_moe_layer,
    tensors={
        **LLAMA_TENSORS,
        **EXPERT_TENSORS,
        **gated_tensors("layers.*.mlp.shared_expert", f"{_QWEN2_MOE_MLP}.shared_expert"),
        "layers.*.mlp.shared_expert_gate": HFTensors((f"{_QWEN2_MOE_MLP}.shared_expert_gate",)),
    },
    ignored_keys="attention_bias",
    alternative_tensors=FUSED_EXPERT_TENSORS,
)


# Qwen3-MoE: Qwen3 with experts.
def _qwen3_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        window=keys["sliding_window"] if keys["use_sliding_window"] else None,
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
        mlp=qwen_mlp(keys, layer),
    )


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=(
        f"{ROPE} use_sliding_window sliding_window layer_types decoder_sparse_step mlp_only_layers "
        "norm_topk_prob attention_bias moe_intermediate_size num_experts_per_tok num_experts"
    ),
    defaults={"max_window_layers": 28},
    build_layer=_qwen3_moe_layer,
    tensors={**LLAMA_TENSORS, **QK_NORM_TENSORS, **EXPERT_TENSORS},
    alternative_tensors=FUSED_EXPERT_TENSORS,
)
# Qwen3-VL-MoE's text model: matrices of experts stored as [in, out].
QWEN3_VL_MOE = dataclasses.replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeForConditionalGeneration",
    alternative_tensors={
        **FUSED_EXPERT_TENSORS,
        "layers.*.mlp.gate_up_proj.weight": HFTensors(
            (f"{_QWEN2_MOE_MLP}.experts.gate_up_proj",), "experts_stacked"
        ),
        "layers.*.mlp.down_proj.weight": HFTensors((f"{_QWEN2_MOE_MLP}.experts.down_proj",), "array"),
    },
)
# MiMo: a Qwen2 that predicts draft tokens with further layers, which are not loaded.
MIMO = dataclasses.replace(QWEN2, model_type="mimo", architecture="MiMoForCausalLM", config_class="qwen2")
