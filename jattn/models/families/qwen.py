"""Qwen2 and Qwen3, dense and with experts, and MiMo."""

import dataclasses
from typing import Any

from jattn.models.families.config_keys import ROPE, WINDOWS
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


def _window(keys: Keys, attention_type: str = SLIDING) -> int | None:
    """Return the sliding window of a layer's type in tokens; None = full attention."""
    return keys["sliding_window"] if attention_type == SLIDING and keys["use_sliding_window"] else None


# Qwen2 and Qwen2.5: biases; a sliding window from some layer on if it is enabled.
# Qwen3: norms of queries and keys per head instead of biases.
def _windowed_layer(keys: Keys, layer: int, **changes: Any) -> LayerSpec:
    is_sliding = _window(keys) is not None and layer >= keys["max_window_layers"]
    attention_type = layer_type(keys, layer, SLIDING if is_sliding else FULL)
    return llama_layer(keys, window=_window(keys, attention_type), rope=rope(keys, attention_type), **changes)


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=f"{ROPE} {WINDOWS}",
    build_layer=lambda keys, layer: _windowed_layer(keys, layer, qkv_bias=True),
    tensors=LLAMA_TENSORS,
    ignored_keys="attention_bias qkv_bias mlp_bias",
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=f"{ROPE} {WINDOWS} attention_bias",
    build_layer=lambda keys, layer: _windowed_layer(keys, layer, qk_norm=qk_norm(keys)),
    tensors=llama_tensors(QK_NORM_TENSORS),
)
# MiMo: a Qwen2 that predicts draft tokens with further layers, which are not loaded.
MIMO = dataclasses.replace(QWEN2, model_type="mimo", architecture="MiMoForCausalLM", config_class="qwen2")


# Qwen2-MoE (Qwen1.5-MoE): experts, a gated shared expert, dense layers in between.
def _qwen_mlp(keys: Keys, layer: int, shared: MLPSpec | None = None) -> MLPSpec | ExpertsSpec:
    """Return a layer's experts, or its dense MLP."""
    is_dense = layer in (keys["mlp_only_layers"] or ()) or keys["num_experts"] == 0
    if is_dense or not is_nth_layer(keys, "decoder_sparse_step", layer):
        return gated_mlp(keys)
    routing, size = Routing(renormalize=bool(keys["norm_topk_prob"])), keys["moe_intermediate_size"]
    has_shared = shared is not None
    return experts(keys, routing, intermediate_size=size, shared=shared, gates_shared=has_shared)


def _qwen2_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    is_windowed = keys["use_sliding_window"] and layer % 2 == 0 and layer < keys["max_window_layers"]
    attention_type = layer_type(keys, layer, SLIDING if is_windowed else FULL)
    return llama_layer(
        keys,
        window=_window(keys, attention_type),
        rope=rope(keys, attention_type),
        qkv_bias=bool(keys["qkv_bias"]),
        mlp=_qwen_mlp(keys, layer, gated_mlp(keys, keys["shared_expert_intermediate_size"])),
    )


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    keys=(
        f"{ROPE} {WINDOWS} decoder_sparse_step mlp_only_layers norm_topk_prob qkv_bias "
        "moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok num_experts"
    ),
    build_layer=_qwen2_moe_layer,
    tensors=llama_tensors(
        {
            **EXPERT_TENSORS,
            **gated_mlp_tensors(".mlp.shared_expert", ".mlp.shared_expert"),
            ".mlp.shared_expert_gate": ".mlp.shared_expert_gate",
        }
    ),
    ignored_keys="attention_bias",
    alternative_tensors=FUSED_EXPERT_TENSORS,
)


# Qwen3-MoE: Qwen3 with experts.
def _qwen3_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, window=_window(keys), qk_norm=qk_norm(keys), mlp=_qwen_mlp(keys, layer))


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=(
        f"{ROPE} use_sliding_window sliding_window layer_types decoder_sparse_step mlp_only_layers "
        "norm_topk_prob attention_bias moe_intermediate_size num_experts_per_tok num_experts"
    ),
    defaults={"max_window_layers": 28},
    build_layer=_qwen3_moe_layer,
    tensors=llama_tensors({**QK_NORM_TENSORS, **EXPERT_TENSORS}),
    alternative_tensors=FUSED_EXPERT_TENSORS,
)
# Qwen3-VL-MoE's text model: matrices of experts stored as [in, out].
_VL_EXPERTS: dict[str, str | HFTensors] = {
    ".mlp.gate_up_proj.weight": HFTensors((".mlp.experts.gate_up_proj",), "experts_stacked"),
    ".mlp.down_proj.weight": HFTensors((".mlp.experts.down_proj",), "array"),
}
QWEN3_VL_MOE = dataclasses.replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeForConditionalGeneration",
    defaults={**QWEN3_MOE.defaults, "norm_topk_prob": True},
    supported_values={"norm_topk_prob": ((True,), "scores of the selected experts are divided by their sum")},
    alternative_tensors={**FUSED_EXPERT_TENSORS, **map_tensors(LLAMA_BLOCK, _VL_EXPERTS)},
)
