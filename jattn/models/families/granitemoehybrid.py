"""Granite 4: of its hybrids those whose layers all have attention; perhaps no rope."""

import dataclasses

from jattn.models.families.family import Keys
from jattn.models.families.granite import GRANITE
from jattn.models.families.granitemoe import GRANITEMOESHARED
from jattn.models.families.reading import rope
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from pallas_kernels.checks import unsupported

_SHARED = "model.layers.*.shared_mlp"


def _layer(keys: Keys, layer: int) -> LayerSpec:
    kind = (keys["layer_types"] or ["mamba"] * keys["num_hidden_layers"])[layer]
    if kind not in ("attention", "full_attention"):
        what = f"layers_block_type {kind!r}"
        raise unsupported(what, "the layer has a state of its own", "Supported: attention")
    dense = {**keys, "intermediate_size": keys["shared_intermediate_size"]}
    spec = GRANITEMOESHARED.layer(keys, layer) if keys["num_experts"] else GRANITE.layer(dense, layer)
    return dataclasses.replace(spec, rope=rope(keys) if keys["position_embedding_type"] == "rope" else None)


GRANITEMOEHYBRID = dataclasses.replace(
    GRANITEMOESHARED,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    defaults={
        **GRANITEMOESHARED.defaults,
        "shared_intermediate_size": 1024,
        "layer_types": None,
        "position_embedding_type": None,
    },
    layer=_layer,
    tensors={
        **GRANITEMOESHARED.tensors,
        "layers.*.mlp.gate_up_proj": Stored((f"{_SHARED}.input_linear",)),
        "layers.*.mlp.down_proj": Stored((f"{_SHARED}.output_linear",)),
    },
    aliases={**GRANITEMOESHARED.aliases, "layers_block_type": "layer_types"},
    harmless=(
        *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
        *("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
        *("normalization_function", "init_method"),
    ),
)
