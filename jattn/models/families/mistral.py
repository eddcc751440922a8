"""Mistral: a window in every layer, unless it is switched off."""

from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import FULL, SLIDING, experts, layer_type, llama_layer, rope
from jattn.models.families.tensor_mappings import ALL_HEADS_TENSORS, FUSED_EXPERT_TENSORS, LLAMA_TENSORS
from jattn.models.loading.tensor_layouts import Stored
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec, NormSpec, QKNorm, Temperature
from pallas_kernels.checks import require_number

# Mistral: a window in every layer, unless it is switched off.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        **ROPE,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    layer=lambda keys, layer: llama_layer(keys, window=keys["sliding_window"]),
    tensors=LLAMA_TENSORS,
    harmless=("layer_types", "attention_bias", "mlp_bias"),
)


# Ministral: windows by layer; Ministral 3: yarn, and a temperature by position.
def _ministral(keys: Keys, layer: int) -> LayerSpec:
    kind = layer_type(keys, layer, FULL if keys["sliding_window"] is None else SLIDING)
    window = keys["sliding_window"] if kind == SLIDING else None
    return llama_layer(keys, window=window, rope=rope(keys, kind))


def _ministral3(keys: Keys, layer: int) -> LayerSpec:
    said = (keys["rope_parameters"] or keys["rope_scaling"] or {}).items()
    given = {key: value for key, value in said if value is not None}
    beta: Any = given.pop("llama_4_scaling_beta", 0)
    given.pop("max_position_embeddings", None)
    turned = rope({**keys, "rope_parameters": given, "rope_scaling": None})
    original: Any = given.get("original_max_position_embeddings", keys["max_position_embeddings"])
    require_number(llama_4_scaling_beta=beta)
    tuned = Temperature(floor_scale=float(original), attn_scale=float(beta), first=0) if beta else None
    return llama_layer(keys, window=keys["sliding_window"], rope=turned, temperature=tuned)


_MINISTRAL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    defaults={**MISTRAL.defaults, "layer_types": None},
    layer=_ministral,
    tensors=LLAMA_TENSORS,
)
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        **ROPE,
        "rope_parameters": lambda keys: None if keys["rope_scaling"] else _MINISTRAL_YARN,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    layer=_ministral3,
    tensors=LLAMA_TENSORS,
    harmless=("layer_types",),
)


# Mixtral: Mistral with experts for MLPs.
def _mixtral_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, window=keys["sliding_window"], mlp=experts(keys, Routing(normalizes=True)))


_MIXTRAL_MOE, _MIXTRAL_EXPERT = "model.layers.*.block_sparse_moe", "model.layers.*.block_sparse_moe.experts.#"
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        **ROPE,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    layer=_mixtral_layer,
    tensors={
        **LLAMA_TENSORS,
        "layers.*.mlp.router": Stored((f"{_MIXTRAL_MOE}.gate",)),
        "layers.*.mlp.gate_up_proj.weight": Stored(
            (f"{_MIXTRAL_EXPERT}.w1.weight", f"{_MIXTRAL_EXPERT}.w3.weight"), "experts_apart"
        ),
        "layers.*.mlp.down_proj.weight": Stored((f"{_MIXTRAL_EXPERT}.w2.weight",), "experts_down_apart"),
    },
    other_tensors=FUSED_EXPERT_TENSORS,
    aliases={"num_local_experts": "num_experts"},
    harmless=("layer_types", "attention_bias"),
)


# MiniMax-M2: experts by corrected sigmoids, a part of each head rotated, all heads normalised as one.
def _minimax_m2_layer(keys: Keys, layer: int) -> LayerSpec:
    part = keys["partial_rotary_factor"]
    if part is None and keys["rotary_dim"]:
        part = keys["rotary_dim"] / keys["head_dim"]
    return llama_layer(
        keys,
        rope=rope({**keys, "partial_rotary_factor": part}, is_partial=True),
        mlp=experts(keys, Routing(scores="sigmoid", normalizes=True, is_corrected=True)),
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"]), over="all_heads"),
    )


_MINIMAX_M2_MLP = "model.layers.*.block_sparse_moe"
MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        **ROPE,
        "rope_theta": 5e6,
        "rotary_dim": None,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    layer=_minimax_m2_layer,
    tensors={
        **MIXTRAL.tensors,
        **ALL_HEADS_TENSORS,
        "layers.*.mlp.router_correction": Stored((f"{_MINIMAX_M2_MLP}.e_score_correction_bias",), "array"),
    },
    other_tensors={
        **FUSED_EXPERT_TENSORS,
        "layers.*.mlp.router_correction": Stored(("model.layers.*.mlp.e_score_correction_bias",), "array"),
    },
    aliases={"num_local_experts": "num_experts"},
    only={
        "scoring_func": (("sigmoid",), "scores are sigmoids"),
        "use_qk_norm": ((True,), "queries and keys are normalised"),
        "qk_norm_type": (("per_layer",), "all heads are normalised as one"),
        "shared_intermediate_size": ((0,), "tokens share no expert"),
        "use_routing_bias": ((True,), "scores are corrected"),
    },
    harmless=(
        *("attn_type_list", "use_mtp", "mtp_transformer_layers"),
        "mlp_intermediate_size",  # of the dense layers that it has none of
        *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
    ),
)
