"""Granite, dense and with experts, Granite 4, Granite SWA and HyperCLOVA X."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    attention,
    experts,
    gated_mlp,
    layer_type,
    llama_layer,
    rope,
    window_bounds,
)
from jattn.models.families.tensor_mappings import LLAMA_TENSORS
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec, MLPSpec, require_one_per_layer
from pallas_kernels.checks import require_number, require_positive, unsupported


# Granite: a Llama with multipliers of embeddings, residuals, scores and logits.
def _granite_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        attention=attention(keys, scale=keys["attention_multiplier"]),
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def multipliers(keys: Keys) -> Mapping[str, Any]:
    """Return the multipliers of embeddings, logits, and outputs of attention and MLP."""
    require_positive(logits_scaling=keys["logits_scaling"])
    return {
        "embedding_scale": keys["embedding_multiplier"],
        "logit_scale": 1 / keys["logits_scaling"],
        "residual_scale": keys["residual_multiplier"],
    }


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    keys=(
        f"{ROPE} attention_bias mlp_bias embedding_multiplier logits_scaling residual_multiplier "
        "attention_multiplier"
    ),
    build_layer=_granite_layer,
    config_fields=multipliers,
    tensors=LLAMA_TENSORS,
)


# GraniteMoE: Granite with experts and an optional shared expert.
def _granitemoe_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias, size = bool(keys["attention_bias"]), keys["shared_intermediate_size"]
    shared = MLPSpec(intermediate_size=size, hidden_act=keys["hidden_act"]) if size else None
    mlp = experts(keys, Routing(scores="softmax_of_top_k"), shared=shared)
    scaled = attention(keys, scale=keys["attention_multiplier"])
    return llama_layer(keys, attention=scaled, mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


_GRANITEMOE_MLP, _GRANITEMOE_SHARED = "model.layers.*.block_sparse_moe", "model.layers.*.shared_mlp"
GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    keys=(
        f"{ROPE} attention_bias embedding_multiplier logits_scaling residual_multiplier "
        "attention_multiplier num_experts num_experts_per_tok"
    ),
    defaults={"mlp_bias": False, "shared_intermediate_size": 0},
    build_layer=_granitemoe_layer,
    config_fields=multipliers,
    tensors={
        **LLAMA_TENSORS,
        "layers.*.mlp.router": HFTensors((f"{_GRANITEMOE_MLP}.router.layer",)),
        "layers.*.mlp.gate_up_proj.weight": HFTensors(
            (f"{_GRANITEMOE_MLP}.input_linear.weight",), "experts_whole"
        ),
        "layers.*.mlp.down_proj.weight": HFTensors(
            (f"{_GRANITEMOE_MLP}.output_linear.weight",), "experts_down_transposed"
        ),
        "layers.*.mlp.shared_expert.gate_up_proj": HFTensors((f"{_GRANITEMOE_SHARED}.input_linear",)),
        "layers.*.mlp.shared_expert.down_proj": HFTensors((f"{_GRANITEMOE_SHARED}.output_linear",)),
    },
    aliases={"num_local_experts": "num_experts"},
)
GRANITEMOESHARED = dataclasses.replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
)


# Granite 4: only models without Mamba layers; RoPE is optional.
_GRANITEMOEHYBRID_SHARED = "model.layers.*.shared_mlp"


def _granitemoehybrid_layer(keys: Keys, layer: int) -> LayerSpec:
    kind = (keys["layer_types"] or ["mamba"] * keys["num_hidden_layers"])[layer]
    if kind not in ("attention", "full_attention"):
        feature = f"layers_block_type {kind!r}"
        reason = "the layer keeps a recurrent state"
        raise unsupported(feature, reason, "Use a checkpoint with attention layers only")
    dense = {**keys, "intermediate_size": keys["shared_intermediate_size"]}
    spec = (
        GRANITEMOESHARED.build_layer(keys, layer)
        if keys["num_experts"]
        else GRANITE.build_layer(dense, layer)
    )
    return dataclasses.replace(spec, rope=rope(keys) if keys["position_embedding_type"] == "rope" else None)


GRANITEMOEHYBRID = dataclasses.replace(
    GRANITEMOESHARED,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    keys=(
        f"{ROPE} attention_bias embedding_multiplier logits_scaling residual_multiplier "
        "attention_multiplier num_experts num_experts_per_tok shared_intermediate_size layer_types "
        "position_embedding_type"
    ),
    defaults={"mlp_bias": False},
    build_layer=_granitemoehybrid_layer,
    tensors={
        **GRANITEMOESHARED.tensors,
        "layers.*.mlp.gate_up_proj": HFTensors((f"{_GRANITEMOEHYBRID_SHARED}.input_linear",)),
        "layers.*.mlp.down_proj": HFTensors((f"{_GRANITEMOEHYBRID_SHARED}.output_linear",)),
    },
    aliases={
        **GRANITEMOESHARED.aliases,
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
    require_one_per_layer("layer_rope_theta", bases, keys["num_hidden_layers"])
    require_number(layer_rope_theta=bases[layer] or 0)
    return dataclasses.replace(default, rope_theta=float(bases[layer])) if bases[layer] else None


def _granite_swa_layer(keys: Keys, layer: int) -> LayerSpec:
    kind, has_bias = layer_type(keys, layer, SLIDING if layer % 4 else FULL), bool(keys["attention_bias"])
    window = window_bounds(keys["sliding_window"]) if kind == SLIDING else None
    return llama_layer(
        keys,
        attention=attention(keys, scale=keys["attention_multiplier"], window=window),
        rope=_granite_swa_rope(keys, layer),
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_sinks=True,
    )


GRANITE_SWA = dataclasses.replace(
    GRANITE,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    keys=(
        f"{ROPE} attention_bias mlp_bias embedding_multiplier logits_scaling residual_multiplier "
        "attention_multiplier sliding_window layer_types layer_rope_theta"
    ),
    build_layer=_granite_swa_layer,
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.sinks": HFTensors(("model.layers.*.self_attn.sinks",), "array"),
    },
)


# HyperCLOVA X: a Granite with norms before and after attention and MLP, which multiplies logits.
_HYPERCLOVAX_LAYER = "model.layers.*"


def _hyperclovax_model(keys: Keys) -> Mapping[str, Any]:
    return {**multipliers(keys), "logit_scale": keys["logits_scaling"]}


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
    config_fields=_hyperclovax_model,
    norm_placement="around",
    supported_values={"use_post_norm": ((True,), "norms come before and after attention and MLP")},
    tensors={
        **LLAMA_TENSORS,
        "layers.*.post_attention_layernorm": HFTensors((f"{_HYPERCLOVAX_LAYER}.post_norm1",)),
        "layers.*.pre_feedforward_layernorm": HFTensors((f"{_HYPERCLOVAX_LAYER}.post_attention_layernorm",)),
        "layers.*.post_feedforward_layernorm": HFTensors((f"{_HYPERCLOVAX_LAYER}.post_norm2",)),
    },
)
