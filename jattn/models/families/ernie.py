"""ERNIE 4.5, dense and with experts."""

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.glm import CORRECTED_TENSORS
from jattn.models.families.layer_builders import experts, gated_mlp, is_nth_layer, llama_layer, rope
from jattn.models.families.tensor_mappings import FUSED_EXPERT_TENSORS, LLAMA_TENSORS
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.routing import Routing
from jattn.models.specs import ExpertsSpec, LayerSpec, MLPSpec


# ERNIE 4.5: a Llama with interleaved RoPE.
def _ernie4_5_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["use_bias"])
    mlp, pairs = gated_mlp(keys, has_bias=has_bias), rope(keys, interleaved=True)
    return llama_layer(keys, rope=pairs, mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    other_architectures=("Ernie4_5_ForCausalLM",),
    defaults={
        **ROPE,
        "rope_theta": 500000.0,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_bias": False,
    },
    build_layer=_ernie4_5_layer,
    tensors=LLAMA_TENSORS,
    ignored_keys=("compression_ratio", "fuse_rope", "use_rmsnorm", "micro_batch_size"),
)


# ERNIE 4.5 with experts: a router with a correction bias, dense layers in between, shared experts.
def _ernie4_5_moe_mlp(keys: Keys, layer: int) -> MLPSpec | ExpertsSpec:
    first, last = keys["moe_layer_start_index"], keys["moe_layer_end_index"]
    last = keys["num_hidden_layers"] - 1 if last == -1 else last
    if not is_nth_layer(keys, "moe_layer_interval", layer) or not first <= layer <= last:
        return gated_mlp(keys)
    size, count = keys["moe_intermediate_size"], keys["moe_num_shared_experts"]
    shared = gated_mlp({**keys, "intermediate_size": size * count}) if count else None
    routing = Routing(renormalize=True, has_correction_bias=True)
    return experts(keys, routing, intermediate_size=size, shared=shared)


def _ernie4_5_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, rope=rope(keys, interleaved=True), mlp=_ernie4_5_moe_mlp(keys, layer))


_ERNIE4_5_MOE_STATICS = "moe_statics.e_score_correction_bias"
ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={
        **{key: value for key, value in ERNIE4_5.defaults.items() if key not in ("head_dim", "use_bias")},
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    build_layer=_ernie4_5_moe_layer,
    tensors={
        **LLAMA_TENSORS,
        **CORRECTED_TENSORS,
        "layers.*.mlp.router_correction": HFTensors(
            (f"model.layers.*.mlp.{_ERNIE4_5_MOE_STATICS}",), "one_row"
        ),
    },
    alternative_tensors={
        **FUSED_EXPERT_TENSORS,
        "layers.*.mlp.router_correction": HFTensors(
            (f"model.layers.*.mlp.gate.{_ERNIE4_5_MOE_STATICS}",), "one_row"
        ),
    },
    aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    supported_values={
        "use_bias": ((False,), "projections have no biases"),
        "moe_use_aux_free": ((True,), "scores have a correction bias"),
        "moe_gate": (("topk", "top2_fused"), "the best experts are selected"),
    },
    ignored_keys=(
        *ERNIE4_5.ignored_keys,
        *("moe_norm_min", "moe_capacity", "moe_gate_act", "moe_group", "moe_orthogonal_loss_lambda"),
        *(
            "moe_aux_loss_lambda",
            "moe_z_loss_lambda",
            "moe_use_hard_gate",
            "moe_multimodal_dispatch_use_allgather",
        ),
        *("multi_token_pred_lambda", "moe_statics"),
    ),
)
