"""Granite, dense and with experts, Granite 4, Granite SWA and HyperCLOVA X."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    experts,
    gated_mlp,
    layer_type,
    llama_layer,
    rope,
    typed_layer,
)
from jattn.models.families.tensor_mappings import LLAMA_TENSORS, SINKS_TENSORS, llama_tensors
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec
from pallas_kernels.checks import unsupported

_SCALES = "embedding_multiplier logits_scaling residual_multiplier attention_multiplier"


def _multipliers(keys: Keys) -> Mapping[str, Any]:
    """Return the multipliers of embeddings, logits, and outputs of attention and MLP."""
    return {
        "embedding_scale": keys["embedding_multiplier"],
        "logit_scale": 1 / keys["logits_scaling"],
        "residual_scale": keys["residual_multiplier"],
    }


# Granite: a Llama with multipliers of embeddings, residuals, scores and logits.
GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias {_SCALES}",
    build_layer=lambda keys, layer: llama_layer(keys, scale=keys["attention_multiplier"]),
    config_fields=_multipliers,
    tensors=LLAMA_TENSORS,
)


# GraniteMoE: Granite with experts and an optional shared expert.
def _granitemoe_layer(keys: Keys, layer: int) -> LayerSpec:
    size = keys["shared_intermediate_size"]
    shared = gated_mlp(keys, size) if size else None
    mlp = experts(keys, Routing(scores="softmax_of_top_k"), shared=shared)
    return llama_layer(keys, scale=keys["attention_multiplier"], mlp=mlp)


GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    keys=f"{ROPE} attention_bias {_SCALES} num_experts num_experts_per_tok",
    defaults={"mlp_bias": False, "shared_intermediate_size": 0},
    build_layer=_granitemoe_layer,
    config_fields=_multipliers,
    tensors=llama_tensors(
        {
            ".mlp.router": ".block_sparse_moe.router.layer",
            ".mlp.gate_up_proj.weight": HFTensors(
                (".block_sparse_moe.input_linear.weight",), "experts_whole"
            ),
            ".mlp.down_proj.weight": HFTensors(
                (".block_sparse_moe.output_linear.weight",), "experts_down_transposed"
            ),
            ".mlp.shared_expert.gate_up_proj": ".shared_mlp.input_linear",
            ".mlp.shared_expert.down_proj": ".shared_mlp.output_linear",
        }
    ),
    aliases={"num_local_experts": "num_experts"},
)
GRANITEMOESHARED = dataclasses.replace(
    GRANITEMOE, model_type="granitemoeshared", architecture="GraniteMoeSharedForCausalLM"
)


# Granite 4: only models without Mamba layers; RoPE is optional.
def _granitemoehybrid_layer(keys: Keys, layer: int) -> LayerSpec:
    kind = (keys["layer_types"] or ["mamba"] * keys["num_hidden_layers"])[layer]
    if kind not in ("attention", "full_attention"):
        feature = f"layers_block_type {kind!r}"
        reason = "the layer keeps a recurrent state"
        raise unsupported(feature, reason, "Use a checkpoint with attention layers only")
    rotary = rope(keys) if keys["position_embedding_type"] == "rope" else None
    if keys["num_experts"]:
        return dataclasses.replace(_granitemoe_layer(keys, layer), rope=rotary)
    mlp = gated_mlp(keys, keys["shared_intermediate_size"])
    return llama_layer(keys, scale=keys["attention_multiplier"], rope=rotary, mlp=mlp)


GRANITEMOEHYBRID = dataclasses.replace(
    GRANITEMOE,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    keys=f"{GRANITEMOE.keys} shared_intermediate_size layer_types position_embedding_type",
    defaults={"mlp_bias": False},
    build_layer=_granitemoehybrid_layer,
    tensors={
        **GRANITEMOE.tensors,
        "layers.*.mlp.gate_up_proj": GRANITEMOE.tensors["layers.*.mlp.shared_expert.gate_up_proj"],
        "layers.*.mlp.down_proj": GRANITEMOE.tensors["layers.*.mlp.shared_expert.down_proj"],
    },
    ignored_keys=(
        "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand "
        "mamba_chunk_size mamba_conv_bias mamba_proj_bias time_step_limit"
    ),
)


# Granite SWA: sliding windows in three of four layers, sinks in all, a RoPE base per layer or none.
def _granite_swa_rope(keys: Keys, layer: int) -> Rope | None:
    bases = keys["layer_rope_theta"]
    default = rope(keys)
    if bases is None:
        return default
    return dataclasses.replace(default, rope_theta=float(bases[layer])) if bases[layer] else None


def _granite_swa_layer(keys: Keys, layer: int) -> LayerSpec:
    kind, rotary = layer_type(keys, layer, SLIDING if layer % 4 else FULL), _granite_swa_rope(keys, layer)
    return typed_layer(keys, kind, scale=keys["attention_multiplier"], rope=rotary, has_sinks=True)


GRANITE_SWA = dataclasses.replace(
    GRANITE,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    keys=f"{GRANITE.keys} sliding_window layer_types layer_rope_theta",
    build_layer=_granite_swa_layer,
    tensors=llama_tensors(SINKS_TENSORS),
)


# HyperCLOVA X: a Granite with norms before and after attention and MLP, which multiplies logits.
HYPERCLOVAX = dataclasses.replace(
    GRANITE,
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias embedding_multiplier logits_scaling residual_multiplier",
    defaults={
        "attention_multiplier": lambda keys: (
            (keys["head_dim"] or keys["hidden_size"] // keys["num_attention_heads"]) ** -0.5
        )
    },
    config_fields=lambda keys: {**_multipliers(keys), "logit_scale": keys["logits_scaling"]},
    norm_placement="around",
    supported_values={"use_post_norm": ((True,), "norms come before and after attention and MLP")},
    tensors=llama_tensors(
        {
            ".post_attention_layernorm": ".post_norm1",
            ".pre_feedforward_layernorm": ".post_attention_layernorm",
            ".post_feedforward_layernorm": ".post_norm2",
        }
    ),
)
