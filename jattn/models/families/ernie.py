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
    keys=f"{ROPE} use_bias",
    build_layer=_ernie4_5_layer,
    tensors=LLAMA_TENSORS,
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
    keys=(
        f"{ROPE} moe_intermediate_size num_experts num_experts_per_tok moe_num_shared_experts "
        "moe_layer_start_index moe_layer_end_index moe_layer_interval"
    ),
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
    supported_values={
        "use_bias": ((False,), "projections have no biases"),
        "moe_use_aux_free": ((True,), "scores have a correction bias"),
        "moe_gate": (("topk", "top2_fused"), "the best experts are selected"),
    },
    ignored_keys=f"{ERNIE4_5.ignored_keys} moe_norm_min",
)
