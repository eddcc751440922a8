"""ERNIE 4.5 with experts: chosen by corrected scores, between dense layers, beside MLPs that are shared."""

from jattn.models.experts import Routing
from jattn.models.families.corrected_experts import CORRECTED_TENSORS
from jattn.models.families.ernie4_5 import ERNIE4_5
from jattn.models.families.family import Family, Keys
from jattn.models.families.reading import experts, gated_mlp, is_nth, llama_layer, rope
from jattn.models.families.tensors import FUSED_EXPERT_TENSORS, LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import ExpertsSpec, LayerSpec
from jattn.models.specs import MLPSpec


def _mlp(keys: Keys, layer: int) -> MLPSpec | ExpertsSpec:
    first, last = keys["moe_layer_start_index"], keys["moe_layer_end_index"]
    last = keys["num_hidden_layers"] - 1 if last == -1 else last
    if not is_nth(keys, "moe_layer_interval", layer) or not first <= layer <= last:
        return gated_mlp(keys)
    size, count = keys["moe_intermediate_size"], keys["moe_num_shared_experts"]
    shared = gated_mlp({**keys, "intermediate_size": size * count}) if count else None
    routing = Routing(normalizes=True, is_corrected=True)
    return experts(keys, routing, intermediate_size=size, shared=shared)


def _layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, rope=rope(keys, interleaved=True), mlp=_mlp(keys, layer))


_STATICS = "moe_statics.e_score_correction_bias"
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
    layer=_layer,
    tensors={
        **LLAMA_TENSORS,
        **CORRECTED_TENSORS,
        "layers.*.mlp.router_correction": Stored((f"model.layers.*.mlp.{_STATICS}",), "one_row"),
    },
    other_tensors={
        **FUSED_EXPERT_TENSORS,
        "layers.*.mlp.router_correction": Stored((f"model.layers.*.mlp.gate.{_STATICS}",), "one_row"),
    },
    aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    only={
        "use_bias": ((False,), "projections have no biases"),
        "moe_use_aux_free": ((True,), "scores are corrected"),
        "moe_gate": (("topk", "top2_fused"), "the best are chosen"),
    },
    harmless=(
        *ERNIE4_5.harmless,
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
