"""Phi-1 to Phi-4-mini, Phi-3-small, Phi-3.5-MoE and Persimmon."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    experts,
    gated_mlp,
    llama_layer,
    local_strided,
    plain_mlp,
    qk_norm,
    rope,
)
from jattn.models.families.mistral import MIXTRAL
from jattn.models.families.tensor_mappings import (
    FUSED_EXPERT_TENSORS,
    LLAMA_BLOCK,
    llama_tensors,
    map_tensors,
)
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec


# Phi-1, Phi-1.5, Phi-2: parallel attention and MLP, LayerNorm, partial RoPE, biases everywhere.
def _phi_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        mlp=plain_mlp(keys, has_bias=True),
        qkv_bias=True,
        out_bias=True,
        qk_norm=qk_norm(keys, "layer") if keys["qk_layernorm"] else None,
    )


_PHI_TENSORS: dict[str, str | HFTensors] = {
    ".self_attn.q_norm": ".self_attn.q_layernorm",
    ".self_attn.k_norm": ".self_attn.k_layernorm",
    ".self_attn.o_proj": ".self_attn.dense",
    "norm": "model.final_layernorm",
}
PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    keys=f"{ROPE} qk_layernorm",
    build_layer=_phi_layer,
    config_fields=lambda keys: {"has_head_bias": True},
    norm="layer",
    norm_placement="parallel",
    tensors=llama_tensors({**_PHI_TENSORS, ".mlp.up_proj": ".mlp.fc1", ".mlp.down_proj": ".mlp.fc2"}),
    aliases={"layer_norm_eps": "rms_norm_eps"},
    supported_values={"tie_word_embeddings": ((False,), "its output projection has a bias")},
)
# Persimmon: norms before attention and MLP, one matrix of queries, keys and values per head.
PERSIMMON = dataclasses.replace(
    PHI,
    model_type="persimmon",
    architecture="PersimmonForCausalLM",
    config_fields=lambda keys: {},
    norm_placement="before",
    tensors=llama_tensors(
        {
            **_PHI_TENSORS,
            ".self_attn.qkv_proj": ".self_attn.query_key_value",
            ".mlp.up_proj": ".mlp.dense_h_to_4h",
            ".mlp.down_proj": ".mlp.dense_4h_to_h",
        }
    ),
    supported_values={},
)


# Phi-3, Phi-3.5, Phi-4-mini: a Llama with fused projections, longrope and partial RoPE.
def _phi3_layer(keys: Keys, layer: int) -> LayerSpec:
    parameters = dict(keys["rope_scaling"] or keys["rope_parameters"] or {})
    kind = parameters.pop("type", None)
    parameters["rope_type"] = parameters.get("rope_type", kind)
    if parameters["rope_type"] in ("su", "yarn"):  # older names of longrope
        parameters["rope_type"] = "longrope"
    rotary = rope({**keys, "rope_scaling": None, "rope_parameters": parameters}, is_partial=True)
    return llama_layer(keys, window=keys["sliding_window"], rope=rotary)


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys=f"{ROPE} sliding_window",
    build_layer=_phi3_layer,
    tensors=llama_tensors(
        {
            ".self_attn.qkv_proj": HFTensors((".self_attn.qkv_proj",), "heads_stacked"),
            ".mlp.gate_up_proj": ".mlp.gate_up_proj",
        }
    ),
    supported_values={
        **dict.fromkeys(
            ("attention_bias", "mlp_bias", "lm_head_bias"), ((False,), "its layers have no biases")
        ),
        "full_attn_mod": ((1,), "all its layers are alike"),
        "interpolate_factor": ((1,), "positions are not interpolated"),
    },
)


# Phi-3-small: block-sparse layers between dense ones, muP scales, gegelu.
def _phi3small_layer(keys: Keys, layer: int) -> LayerSpec:
    head_dim, scaling = keys["head_dim"], keys["rope_scaling"]
    if scaling is None and keys["rope_position_scale"] != 1:
        scaling = {"rope_type": "linear", "factor": keys["rope_position_scale"]}
    return llama_layer(
        keys,
        scale=keys["mup_attn_multiplier"] / head_dim if keys["mup_use_scaling"] else head_dim**-0.5,
        sparsity=local_strided(keys, layer),
        rope=rope({**keys, "rope_scaling": scaling}),
        mlp=gated_mlp(keys, kind="gegelu", has_bias=True, limit=keys["gegelu_limit"]),
        qkv_bias=True,
        out_bias=True,
    )


def _phi3small_model(keys: Keys) -> Mapping[str, Any]:
    width = keys["mup_width_multiplier"]
    return {
        "embedding_scale": keys["mup_embedding_multiplier"] or None,
        "logit_scale": 1 / width if width else None,
        "suppressed_token_ids": tuple(keys["dummy_token_indices"] or ()),
    }


PHI3SMALL = Family(
    model_type="phi3small",
    architecture="Phi3SmallForCausalLM",
    config_class="llama",
    keys=f"{ROPE} dummy_token_indices",
    defaults={
        "rope_theta": 1e6,
        "blocksparse_block_size": 64,
        "blocksparse_triton_kernel_block_size": 64,
        "blocksparse_homo_head_pattern": False,
        "blocksparse_num_local_blocks": 16,
        "blocksparse_vert_stride": 8,
        "dense_attention_every_n_layers": 2,
        "rope_position_scale": 1.0,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "hidden_act": "gegelu",
        "gegelu_limit": 20.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "mup_use_scaling": True,
        "mup_width_multiplier": 8.0,
        "mup_embedding_multiplier": 10.0,
        "mup_attn_multiplier": 1.0,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
    },
    build_layer=_phi3small_layer,
    config_fields=_phi3small_model,
    norm="layer",
    tensors=llama_tensors(
        {
            ".self_attn.qkv_proj": ".self_attn.query_key_value",
            ".self_attn.o_proj": ".self_attn.dense",
            ".mlp.gate_up_proj": HFTensors((".mlp.up_proj",), "gates_interleaved"),
            "norm": "model.final_layernorm",
        }
    ),
    aliases={
        "ff_intermediate_size": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps",
        "rope_embedding_base": "rope_theta",
    },
    ignored_keys="attention_bias reorder_and_upcast_attn",
)


# Phi-3.5-MoE: two experts per token, weighted by sparsemixer; LayerNorm, longrope, biases.
def _phimoe_layer(keys: Keys, layer: int) -> LayerSpec:
    routing = Routing(scores="sparsemixer", margin=2 * keys["router_jitter_noise"])
    return llama_layer(keys, window=keys["sliding_window"], mlp=experts(keys, routing))


PHIMOE = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    other_architectures=("PhiMoEForCausalLM",),
    keys=(
        f"{ROPE} sliding_window num_experts num_experts_per_tok router_jitter_noise attention_bias "
        "lm_head_bias"
    ),
    build_layer=_phimoe_layer,
    config_fields=lambda keys: {"has_head_bias": bool(keys["lm_head_bias"])},
    norm="layer",
    tensors=MIXTRAL.tensors,
    alternative_tensors={**FUSED_EXPERT_TENSORS, **map_tensors(LLAMA_BLOCK, {".mlp.router": ".mlp.router"})},
    aliases={"num_local_experts": "num_experts"},
    supported_values={"num_experts_per_tok": ((2,), "its router supports two experts per token")},
    ignored_keys="input_jitter_noise",
)
