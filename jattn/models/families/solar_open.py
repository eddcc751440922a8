"""Solar Open: a GLM-4.5 whose layers all have experts, and whose heads are rotated whole."""

import dataclasses

from jattn.models.families.corrected_experts import corrected_experts
from jattn.models.families.family import Keys
from jattn.models.families.glm4_moe import GLM4_MOE
from jattn.models.families.reading import llama_layer
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, mlp=corrected_experts(keys, layer), qkv_bias=bool(keys["attention_bias"]))


SOLAR_OPEN = dataclasses.replace(
    GLM4_MOE,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    defaults={
        **GLM4_MOE.defaults,
        "rope_theta": 1e6,
        "partial_rotary_factor": 1.0,
        "head_dim": 128,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1280,
        "intermediate_size": lambda keys: keys["moe_intermediate_size"],
    },
    layer=_layer,
    only={**GLM4_MOE.only, "use_qk_norm": ((False,), "queries and keys are not normalised")},
)
