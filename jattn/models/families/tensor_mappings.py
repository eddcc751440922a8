"""Where most families' checkpoints have their parameters: our module's name -> the tensors' names."""

from jattn.models.loading.tensor_layouts import Stored


def gated_tensors(ours: str, theirs: str) -> dict[str, Stored]:
    """Where a gated MLP's projections are: three matrices."""
    gates = Stored((f"{theirs}.gate_proj", f"{theirs}.up_proj"), "gates_apart")
    return {f"{ours}.gate_up_proj": gates, f"{ours}.down_proj": Stored((f"{theirs}.down_proj",))}


# Where a Llama's parameters are, and so most families'.
LLAMA_TENSORS = {
    "embed_tokens": Stored(("model.embed_tokens",)),
    "layers.*.input_layernorm": Stored(("model.layers.*.input_layernorm",)),
    "layers.*.self_attn.qkv_proj": Stored(
        tuple(f"model.layers.*.self_attn.{part}_proj" for part in "qkv"), "heads_apart"
    ),
    "layers.*.self_attn.o_proj": Stored(("model.layers.*.self_attn.o_proj",)),
    "layers.*.post_attention_layernorm": Stored(("model.layers.*.post_attention_layernorm",)),
    **gated_tensors("layers.*.mlp", "model.layers.*.mlp"),
    "norm": Stored(("model.norm",)),
    "lm_head": Stored(("lm_head",)),
}
QK_NORM_TENSORS = {
    f"layers.*.self_attn.{part}_norm": Stored((f"model.layers.*.self_attn.{part}_norm",)) for part in "qk"
}
ALL_HEADS_TENSORS = {
    f"layers.*.self_attn.{part}_norm.weight": Stored(
        (f"model.layers.*.self_attn.{part}_norm.weight",), "heads_in_a_row"
    )
    for part in "qk"
}
NORMS_AFTER_TENSORS = {
    **{name: stored for name, stored in LLAMA_TENSORS.items() if name != "layers.*.input_layernorm"},
    "layers.*.post_feedforward_layernorm": Stored(("model.layers.*.post_feedforward_layernorm",)),
}
# Of an MLP without gates.
PLAIN_MLP_TENSORS = {"layers.*.mlp.up_proj": Stored(("model.layers.*.mlp.up_proj",))}
_MLP, _EXPERT = "model.layers.*.mlp", "model.layers.*.mlp.experts.#"
# Experts, a matrix each.
EXPERT_TENSORS = {
    "layers.*.mlp.router": Stored((f"{_MLP}.gate",)),
    "layers.*.mlp.gate_up_proj.weight": Stored(
        (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"), "experts_apart"
    ),
    "layers.*.mlp.down_proj.weight": Stored((f"{_EXPERT}.down_proj.weight",), "experts_down_apart"),
}
# Experts as transformers 5 holds them.
FUSED_EXPERT_TENSORS = {
    "layers.*.mlp.router": Stored(("model.layers.*.mlp.gate",)),
    "layers.*.mlp.gate_up_proj.weight": Stored(("model.layers.*.mlp.experts.gate_up_proj",), "experts_whole"),
    "layers.*.mlp.down_proj.weight": Stored(("model.layers.*.mlp.experts.down_proj",), "experts_down_turned"),
}
GEMMA_NORM_TENSORS = {
    f"layers.*.{part}_feedforward_layernorm": Stored((f"model.layers.*.{part}_feedforward_layernorm",))
    for part in ("pre", "post")
}
