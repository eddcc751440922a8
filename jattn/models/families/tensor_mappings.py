"""Mappings of parameters to checkpoint tensors that several families share."""

import dataclasses
from collections.abc import Mapping

from jattn.models.loading.tensor_layouts import HFTensors


def map_tensors(block: str, modules: Mapping[str, str | HFTensors]) -> dict[str, HFTensors]:
    """Return the mapping of our modules to a checkpoint's tensors.

    Args:
        block: Name of a layer in the checkpoint, with its index as `*`.
        modules: Our modules and arrays, mapped to the checkpoint's. Names with a leading dot are relative to
            a layer. A string is one tensor as it is.
    """

    def absolute(name: str) -> str:
        return block + name if name.startswith(".") else name

    mapping = {}
    for module, stored in modules.items():
        parts = HFTensors((stored,)) if isinstance(stored, str) else stored
        parts = dataclasses.replace(parts, names=tuple(map(absolute, parts.names)))
        mapping[f"layers.*{module}" if module.startswith(".") else module] = parts
    return mapping


def separate_heads(*names: str) -> HFTensors:
    """Return queries, keys and values that are stored as three matrices."""
    return HFTensors(names, "heads_separate")


def separate_gates(gate: str, up: str) -> HFTensors:
    """Return the gate and up projections that are stored as two matrices."""
    return HFTensors((gate, up), "gates_separate")


def separate_experts(router: str, gate: str, up: str, down: str) -> dict[str, str | HFTensors]:
    """Return the tensors of experts that are stored as three matrices per expert, `#`."""
    return {
        ".mlp.router": router,
        ".mlp.gate_up_proj.weight": HFTensors((f"{gate}.weight", f"{up}.weight"), "experts_separate"),
        ".mlp.down_proj.weight": HFTensors((f"{down}.weight",), "experts_down_separate"),
    }


def gated_mlp_tensors(module: str, stored: str) -> dict[str, str | HFTensors]:
    """Return the tensors of a gated MLP that is stored as three matrices."""
    return {
        f"{module}.gate_up_proj": separate_gates(f"{stored}.gate_proj", f"{stored}.up_proj"),
        f"{module}.down_proj": f"{stored}.down_proj",
    }


LLAMA_BLOCK = "model.layers.*"
# Llama and most other families.
LLAMA_TENSORS = map_tensors(
    LLAMA_BLOCK,
    {
        "embed_tokens": "model.embed_tokens",
        ".input_layernorm": ".input_layernorm",
        ".self_attn.qkv_proj": separate_heads(*(f".self_attn.{part}_proj" for part in "qkv")),
        ".self_attn.o_proj": ".self_attn.o_proj",
        ".post_attention_layernorm": ".post_attention_layernorm",
        **gated_mlp_tensors(".mlp", ".mlp"),
        "norm": "model.norm",
        "lm_head": "lm_head",
    },
)


def llama_tensors(modules: Mapping[str, str | HFTensors]) -> dict[str, HFTensors]:
    """Return Llama's tensors with changes, as `map_tensors` takes them."""
    return {**LLAMA_TENSORS, **map_tensors(LLAMA_BLOCK, modules)}


QK_NORM_TENSORS: dict[str, str | HFTensors] = {
    f".self_attn.{part}_norm": f".self_attn.{part}_norm" for part in "qk"
}
ALL_HEADS_TENSORS: dict[str, str | HFTensors] = {
    f".self_attn.{part}_norm.weight": HFTensors((f".self_attn.{part}_norm.weight",), "heads_in_a_row")
    for part in "qk"
}
SINKS_TENSORS: dict[str, str | HFTensors] = {
    ".self_attn.sinks": HFTensors((".self_attn.sinks",), "array"),
}
PLAIN_MLP_TENSORS: dict[str, str | HFTensors] = {".mlp.up_proj": ".mlp.up_proj"}  # MLPs without gates
EXPERT_TENSORS = separate_experts(
    ".mlp.gate", *(f".mlp.experts.#.{part}_proj" for part in ("gate", "up", "down"))
)
# Experts stored as transformers 5 does.
FUSED_EXPERT_TENSORS = map_tensors(
    LLAMA_BLOCK,
    {
        ".mlp.router": ".mlp.gate",
        ".mlp.gate_up_proj.weight": HFTensors((".mlp.experts.gate_up_proj",), "experts_whole"),
        ".mlp.down_proj.weight": HFTensors((".mlp.experts.down_proj",), "experts_down_transposed"),
    },
)
AFTER_NORM_TENSORS: dict[str, str | HFTensors] = {
    ".post_feedforward_layernorm": ".post_feedforward_layernorm"
}
