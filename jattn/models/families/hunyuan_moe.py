"""HunYuan's mixtures (A13B): its dense layers with experts, and an MLP that all tokens share."""

import dataclasses
from typing import Any

from jattn.models.experts import Routing
from jattn.models.families.family import Keys
from jattn.models.families.hunyuan import HUNYUAN_V1_DENSE
from jattn.models.families.reading import experts, gated_mlp
from jattn.models.families.tensors import EXPERT_TENSORS, FUSED_EXPERT_TENSORS, gated_tensors
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec, require_one_a_layer
from pallas_kernels.checks import require_int

_LISTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert")


def _of_layer(keys: Keys, name: str, layer: int) -> Any:
    """A number for all layers, or one a layer.

    Raises:
        ValueError: It is none, or there is not one a layer.
    """
    value = keys[name]
    if isinstance(value, list):
        require_one_a_layer(name, value, keys["num_hidden_layers"])
        value = value[layer]
    if value is not None or name != "moe_intermediate_size":
        require_int(**{name: value})
    return value


def _layer(keys: Keys, layer: int) -> LayerSpec:
    of = {name: _of_layer(keys, name, layer) for name in _LISTS}
    size = of["moe_intermediate_size"] or keys["intermediate_size"]
    shared = gated_mlp({**keys, "intermediate_size": size * of["num_shared_expert"]})
    routing = Routing(scores="softmax", normalizes=True)
    mlp = experts({**keys, **of}, routing, intermediate_size=size, shared=shared)
    return dataclasses.replace(HUNYUAN_V1_DENSE.layer(keys, layer), mlp=mlp)


_MLP = "model.layers.*.mlp"
HUNYUAN_V1_MOE = dataclasses.replace(
    HUNYUAN_V1_DENSE,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    defaults={
        **HUNYUAN_V1_DENSE.defaults,
        "moe_intermediate_size": None,
        # Functions of the keys: what is said may be an int or a list of them.
        **dict.fromkeys(("num_experts", "num_experts_per_tok", "num_shared_expert"), lambda keys: 1),
    },
    layer=_layer,
    tensors={
        **HUNYUAN_V1_DENSE.tensors,
        **EXPERT_TENSORS,
        **gated_tensors("layers.*.mlp.shared_expert", f"{_MLP}.shared_mlp"),
        "layers.*.mlp.router": Stored((f"{_MLP}.gate.wg",)),
    },
    other_tensors={**FUSED_EXPERT_TENSORS, "layers.*.mlp.router": Stored((f"{_MLP}.gate.wg",))},
    aliases={
        **HUNYUAN_V1_DENSE.aliases,
        "moe_topk": "num_experts_per_tok",
        "num_local_experts": "num_experts",
    },
    only={
        **{name: values for name, values in HUNYUAN_V1_DENSE.only.items() if name != "num_experts"},
        "use_mixed_mlp_moe": ((True,), "all tokens share an MLP beside the experts"),
        "norm_topk_prob": ((True,), "scores of the chosen experts are divided by their sum"),
        "moe_layer_num_skipped": ((0,), "all layers have experts"),
        "group_limited_greedy": ((False,), "experts are chosen among all"),
        "routed_scaling_factor": ((1, 1.0), "experts are not scaled"),
    },
    harmless=(
        *HUNYUAN_V1_DENSE.harmless,
        *("sep_token_id", "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"),
    ),
)
