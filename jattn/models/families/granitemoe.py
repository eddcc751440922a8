"""GraniteMoE: Granite with experts, and perhaps an MLP that all tokens share."""

import dataclasses

from jattn.models.experts import Routing
from jattn.models.families.family import Family, Keys
from jattn.models.families.granite import GRANITE, multipliers
from jattn.models.families.reading import attention, experts, llama_layer
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import MLPSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias, size = bool(keys["attention_bias"]), keys["shared_intermediate_size"]
    shared = MLPSpec(intermediate_size=size, hidden_act=keys["hidden_act"]) if size else None
    mlp = experts(keys, Routing(scores="softmax_of_chosen"), shared=shared)
    scaled = attention(keys, scale=keys["attention_multiplier"])
    return llama_layer(keys, attention=scaled, mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


_MLP, _SHARED = "model.layers.*.block_sparse_moe", "model.layers.*.shared_mlp"
GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    defaults={
        **GRANITE.defaults,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
    },
    layer=_layer,
    model=multipliers,
    tensors={
        **LLAMA_TENSORS,
        "layers.*.mlp.router": Stored((f"{_MLP}.router.layer",)),
        "layers.*.mlp.gate_up_proj.weight": Stored((f"{_MLP}.input_linear.weight",), "experts_whole"),
        "layers.*.mlp.down_proj.weight": Stored((f"{_MLP}.output_linear.weight",), "experts_down_turned"),
        "layers.*.mlp.shared_expert.gate_up_proj": Stored((f"{_SHARED}.input_linear",)),
        "layers.*.mlp.shared_expert.down_proj": Stored((f"{_SHARED}.output_linear",)),
    },
    aliases={"num_local_experts": "num_experts"},
)
GRANITEMOESHARED = dataclasses.replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
)
