"""Experts chosen by sigmoids and a learned number each, beside MLPs that all tokens share."""

from jattn.models.experts import Routing
from jattn.models.families.family import Keys
from jattn.models.families.reading import experts, gated_mlp
from jattn.models.families.tensors import EXPERT_TENSORS, gated_tensors
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import ExpertsSpec
from jattn.models.specs import MLPSpec

CORRECTED_KEYS: Keys = {
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
ONE_GROUP = {
    "n_group": ((1,), "experts are chosen among all"),
    "topk_group": ((1,), "experts are chosen among all"),
    "topk_method": (("noaux_tc",), "experts are chosen by corrected scores"),
    "scoring_func": (("sigmoid",), "scores are sigmoids"),
    "moe_layer_freq": ((1,), "all layers behind the first have experts"),
}
_MLP = "model.layers.*.mlp"
CORRECTED_TENSORS = {
    **EXPERT_TENSORS,
    **gated_tensors("layers.*.mlp.shared_expert", f"{_MLP}.shared_experts"),
    "layers.*.mlp.router_correction": Stored((f"{_MLP}.gate.e_score_correction_bias",), "array"),
}


def corrected_experts(keys: Keys, layer: int) -> MLPSpec | ExpertsSpec:
    """A layer's experts, or the dense MLP of one of the first layers."""
    if layer < keys["first_k_dense_replace"]:
        return gated_mlp(keys)
    routing = Routing(
        scores="sigmoid",
        normalizes=bool(keys["norm_topk_prob"]),
        is_corrected=True,
        factor=keys["routed_scaling_factor"],
    )
    size, count = keys["moe_intermediate_size"], keys["n_shared_experts"] or 0
    shared = gated_mlp({**keys, "intermediate_size": size * count}) if count else None
    of_routed = {**keys, "num_experts": keys["n_routed_experts"]}
    return experts(of_routed, routing, intermediate_size=size, shared=shared)
