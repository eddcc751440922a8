"""Qwen2-MoE (Qwen1.5-MoE): experts, and one behind a gate that all tokens share; dense layers between."""

from jattn.models.experts import Routing
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.qwen2 import WINDOWS
from jattn.models.families.reading import FULL, SLIDING, experts, is_nth, layer_type, llama_layer, rope
from jattn.models.families.tensors import EXPERT_TENSORS, FUSED_EXPERT_TENSORS, LLAMA_TENSORS, gated_tensors
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import ExpertsSpec, LayerSpec
from jattn.models.specs import MLPSpec

EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
_MLP = "model.layers.*.mlp"


def qwen_mlp(keys: Keys, layer: int, shared: MLPSpec | None = None) -> MLPSpec | ExpertsSpec:
    """A layer's experts, or its dense MLP."""
    is_dense = layer in (keys["mlp_only_layers"] or ()) or keys["num_experts"] == 0
    if is_dense or not is_nth(keys, "decoder_sparse_step", layer):
        return MLPSpec(intermediate_size=keys["intermediate_size"], hidden_act=keys["hidden_act"])
    routing, size = Routing(normalizes=bool(keys["norm_topk_prob"])), keys["moe_intermediate_size"]
    has_shared = shared is not None
    return experts(keys, routing, intermediate_size=size, shared=shared, gates_shared=has_shared)


def _layer(keys: Keys, layer: int) -> LayerSpec:
    is_windowed = keys["use_sliding_window"] and layer % 2 == 0 and layer < keys["max_window_layers"]
    kind = layer_type(keys, layer, SLIDING if is_windowed else FULL)
    has_window = kind == SLIDING and keys["use_sliding_window"]
    size = keys["shared_expert_intermediate_size"]
    return llama_layer(
        keys,
        window=keys["sliding_window"] if has_window else None,
        rope=rope(keys, kind),
        qkv_bias=bool(keys["qkv_bias"]),
        mlp=qwen_mlp(keys, layer, MLPSpec(intermediate_size=size, hidden_act=keys["hidden_act"])),
    )


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    defaults={
        **ROPE,
        **WINDOWS,
        **EXPERTS,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "qkv_bias": True,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
    layer=_layer,
    tensors={
        **LLAMA_TENSORS,
        **EXPERT_TENSORS,
        **gated_tensors("layers.*.mlp.shared_expert", f"{_MLP}.shared_expert"),
        "layers.*.mlp.shared_expert_gate": Stored((f"{_MLP}.shared_expert_gate",)),
    },
    harmless=("attention_bias",),
    other_tensors=FUSED_EXPERT_TENSORS,
)
