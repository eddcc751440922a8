"""Mappings of parameters to checkpoint tensors that several families share."""

from jattn.models.loading.tensor_layouts import HFTensors


def gated_tensors(module: str, hf_module: str) -> dict[str, HFTensors]:
    """Return the mapping of a gated MLP stored as three matrices.

    Args:
        module: Name of our module.
        hf_module: Name of the checkpoint's module.
    """
    gate_up = HFTensors((f"{hf_module}.gate_proj", f"{hf_module}.up_proj"), "gates_separate")
    return {f"{module}.gate_up_proj": gate_up, f"{module}.down_proj": HFTensors((f"{hf_module}.down_proj",))}


# Llama and most other families.
LLAMA_TENSORS = {
    "embed_tokens": HFTensors(("model.embed_tokens",)),
    "layers.*.input_layernorm": HFTensors(("model.layers.*.input_layernorm",)),
    "layers.*.self_attn.qkv_proj": HFTensors(
        tuple(f"model.layers.*.self_attn.{part}_proj" for part in "qkv"), "heads_separate"
    ),
    "layers.*.self_attn.o_proj": HFTensors(("model.layers.*.self_attn.o_proj",)),
    "layers.*.post_attention_layernorm": HFTensors(("model.layers.*.post_attention_layernorm",)),
    **gated_tensors("layers.*.mlp", "model.layers.*.mlp"),
    "norm": HFTensors(("model.norm",)),
    "lm_head": HFTensors(("lm_head",)),
}
QK_NORM_TENSORS = {
    f"layers.*.self_attn.{part}_norm": HFTensors((f"model.layers.*.self_attn.{part}_norm",)) for part in "qk"
}
ALL_HEADS_TENSORS = {
    f"layers.*.self_attn.{part}_norm.weight": HFTensors(
        (f"model.layers.*.self_attn.{part}_norm.weight",), "heads_in_a_row"
    )
    for part in "qk"
}
NORMS_AFTER_TENSORS = {
    **{name: stored for name, stored in LLAMA_TENSORS.items() if name != "layers.*.input_layernorm"},
    "layers.*.post_feedforward_layernorm": HFTensors(("model.layers.*.post_feedforward_layernorm",)),
}
# MLPs without gates.
PLAIN_MLP_TENSORS = {"layers.*.mlp.up_proj": HFTensors(("model.layers.*.mlp.up_proj",))}
_MLP, _EXPERT = "model.layers.*.mlp", "model.layers.*.mlp.experts.#"
# Experts stored as a matrix per expert.
EXPERT_TENSORS = {
    "layers.*.mlp.router": HFTensors((f"{_MLP}.gate",)),
    "layers.*.mlp.gate_up_proj.weight": HFTensors(
        (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"), "experts_separate"
    ),
    "layers.*.mlp.down_proj.weight": HFTensors((f"{_EXPERT}.down_proj.weight",), "experts_down_separate"),
}
# Experts stored as transformers 5 does.
FUSED_EXPERT_TENSORS = {
    "layers.*.mlp.router": HFTensors(("model.layers.*.mlp.gate",)),
    "layers.*.mlp.gate_up_proj.weight": HFTensors(
        ("model.layers.*.mlp.experts.gate_up_proj",), "experts_whole"
    ),
    "layers.*.mlp.down_proj.weight": HFTensors(
        ("model.layers.*.mlp.experts.down_proj",), "experts_down_transposed"
    ),
}
GEMMA_NORM_TENSORS = {
    f"layers.*.{part}_feedforward_layernorm": HFTensors((f"model.layers.*.{part}_feedforward_layernorm",))
    for part in ("pre", "post")
}
