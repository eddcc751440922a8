"""BLOOM, MPT, DBRX and Falcon."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    alibi_slopes,
    experts,
    llama_layer,
    plain_mlp,
    rope,
)
from jattn.models.families.tensor_mappings import map_tensors
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec


# BLOOM: ALiBi, LayerNorm, a norm after the embedding.
def _bloom_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(
        keys,
        rope=None,
        alibi_slopes=alibi_slopes(keys["num_attention_heads"]),
        mlp=plain_mlp(keys, hidden_act="gelu_pytorch_tanh", has_bias=True),
        qkv_bias=True,
        out_bias=True,
    )


def _bloom_model(keys: Keys) -> Mapping[str, Any]:
    residual_after_norm = bool(keys["apply_residual_connection_post_layernorm"])
    return {"has_embedding_norm": True, "residual_after_norm": residual_after_norm}


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    keys="apply_residual_connection_post_layernorm",
    defaults={"intermediate_size": lambda keys: 4 * keys["hidden_size"], "max_position_embeddings": 2048},
    build_layer=_bloom_layer,
    config_fields=_bloom_model,
    norm="layer",
    tensors=map_tensors(
        "transformer.h.*",
        {
            "embed_tokens": "transformer.word_embeddings",
            "embedding_norm": "transformer.word_embeddings_layernorm",
            ".input_layernorm": ".input_layernorm",
            ".self_attn.qkv_proj": ".self_attention.query_key_value",
            ".self_attn.o_proj": ".self_attention.dense",
            ".post_attention_layernorm": ".post_attention_layernorm",
            ".mlp.up_proj": ".mlp.dense_h_to_4h",
            ".mlp.down_proj": ".mlp.dense_4h_to_h",
            "norm": "transformer.ln_f",
            "lm_head": "lm_head",
        },
    ),
    aliases={
        "n_embed": "hidden_size",
        "layer_norm_epsilon": "rms_norm_eps",
        "seq_length": "max_position_embeddings",
    },
    ignored_keys="slow_but_exact attention_softmax_in_fp32",
    prefix="transformer.",
)


# MPT: ALiBi, LayerNorm without biases, a plain MLP.
def _mpt_layer(keys: Keys, layer: int) -> LayerSpec:
    clip_qkv, scale = keys["attn_config.clip_qkv"], keys["attn_config.softmax_scale"]
    return llama_layer(
        keys,
        scale=float(scale or keys["head_dim"] ** -0.5),
        rope=None,
        alibi_slopes=alibi_slopes(keys["num_attention_heads"], keys["attn_config.alibi_bias_max"]),
        clip_qkv=float(clip_qkv) if clip_qkv else None,
        mlp=plain_mlp(keys, hidden_act="gelu"),
    )


MPT = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    other_architectures=("MPTForCausalLM",),
    nested_keys=("attn_config",),
    keys="attn_config.clip_qkv attn_config.softmax_scale",
    defaults={
        "intermediate_size": lambda keys: int(keys["expansion_ratio"] * keys["hidden_size"]),
        "expansion_ratio": 4.0,
        "attn_config.alibi_bias_max": 8.0,
    },
    build_layer=_mpt_layer,
    norm="layer_no_bias",
    tensors=map_tensors(
        "transformer.blocks.*",
        {
            "embed_tokens": "transformer.wte",
            ".input_layernorm": ".norm_1",
            ".self_attn.qkv_proj": HFTensors((".attn.Wqkv",), "heads_stacked"),
            ".self_attn.o_proj": ".attn.out_proj",
            ".post_attention_layernorm": ".norm_2",
            ".mlp.up_proj": ".ffn.up_proj",
            ".mlp.down_proj": ".ffn.down_proj",
            "norm": "transformer.norm_f",
            "lm_head": "lm_head",
        },
    ),
    aliases={
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    supported_values={
        "no_bias": ((True,), "its layers have no biases"),
        "norm_type": (("low_precision_layernorm", "layernorm"), "its norms are LayerNorms"),
        "logit_scale": ((), "logits are not scaled"),
        "attn_config.alibi": ((True,), "positions use only ALiBi"),
        "attn_config.attn_type": (("multihead_attention",), "each query head has its own keys"),
        "attn_config.prefix_lm": ((False,), "decoders are causal"),
        "attn_config.qk_ln": ((False,), "queries and keys are not normalized"),
    },
    ignored_keys="embedding_fraction learned_pos_emb",
    prefix="transformer.",
)


# DBRX: LayerNorm without biases, clipped projections, fine-grained experts (4 of 16).
def _dbrx_layer(keys: Keys, layer: int) -> LayerSpec:
    clip_qkv, norm = keys["attn_config.clip_qkv"], keys["ffn_config.moe_normalize_expert_weights"]
    routing = Routing(scores="softmax", renormalize=norm is not None)
    return llama_layer(
        keys,
        rope=Rope(head_dim=keys["head_dim"], rope_theta=keys["rope_theta"]),
        clip_qkv=float(clip_qkv) if clip_qkv else None,
        mlp=experts(keys, routing),
    )


DBRX = Family(
    model_type="dbrx",
    architecture="DbrxForCausalLM",
    nested_keys=("attn_config", "ffn_config"),
    keys="rope_theta attn_config.clip_qkv",
    defaults={
        "num_key_value_heads": 1,
        "intermediate_size": 3584,
        "rms_norm_eps": 1e-5,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "ffn_config.moe_normalize_expert_weights": 1.0,
    },
    build_layer=_dbrx_layer,
    norm="layer_no_bias",
    tensors=map_tensors(
        "transformer.blocks.*",
        {
            "embed_tokens": "transformer.wte",
            ".input_layernorm": ".norm_attn_norm.norm_1",
            ".self_attn.qkv_proj": HFTensors((".norm_attn_norm.attn.Wqkv",), "heads_stacked"),
            ".self_attn.o_proj": ".norm_attn_norm.attn.out_proj",
            ".post_attention_layernorm": ".norm_attn_norm.norm_2",
            ".mlp.router": ".ffn.router.layer",
            ".mlp.gate_up_proj.weight": HFTensors(
                (".ffn.experts.mlp.w1", ".ffn.experts.mlp.v1"), "experts_flattened"
            ),
            ".mlp.down_proj.weight": HFTensors((".ffn.experts.mlp.w2",), "experts_down_below"),
            "norm": "transformer.norm_f",
            "lm_head": "lm_head",
        },
    ),
    aliases={
        "attn_config.kv_n_heads": "num_key_value_heads",
        "attn_config.rope_theta": "rope_theta",
        "ffn_config.ffn_hidden_size": "intermediate_size",
        "ffn_config.moe_num_experts": "num_experts",
        "ffn_config.moe_top_k": "num_experts_per_tok",
    },
    supported_values={
        "tie_word_embeddings": ((False,), "the output projection is not the embedding"),
        "ffn_config.ffn_act_fn": (({"name": "silu"},), "its experts are gated by silu"),
        "ffn_config.moe_normalize_expert_weights": ((1, 1.0), "scores are divided by their sum"),
    },
    ignored_keys="rope_parameters",
    prefix="transformer.",
)


# Falcon: parallel attention and MLP; RoPE or ALiBi; one kv head, several, or one per query head.
def _falcon_num_kv_heads(keys: Keys) -> int:
    if keys["new_decoder_architecture"] or not keys["multi_query"]:
        return int(keys["num_key_value_heads"])
    return 1


def _falcon_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias, scale = bool(keys["bias"]), keys["head_dim"] ** -0.5
    # ALiBi is added before the scale.
    slopes = tuple(slope * scale for slope in alibi_slopes(keys["num_attention_heads"]))
    return llama_layer(
        keys,
        num_kv_heads=_falcon_num_kv_heads(keys),
        rope=None if keys["alibi"] else rope(keys),
        alibi_slopes=slopes if keys["alibi"] else None,
        mlp=plain_mlp(keys, has_bias=has_bias),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def _falcon_model(keys: Keys) -> Mapping[str, Any]:
    is_new, count = keys["new_decoder_architecture"], keys["num_ln_in_parallel_attn"]
    has_two = is_new and (2 if count is None else count) == 2
    placement = (
        "before"
        if not (is_new or keys["parallel_attn"])
        else "parallel_separate_norms"
        if has_two
        else "parallel"
    )
    return {"num_key_value_heads": _falcon_num_kv_heads(keys), "norm_placement": placement}


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    other_architectures=("RWForCausalLM",),
    keys=f"{ROPE} alibi new_decoder_architecture multi_query parallel_attn num_ln_in_parallel_attn bias",
    defaults={"intermediate_size": lambda keys: 4 * keys["hidden_size"]},
    build_layer=_falcon_layer,
    config_fields=_falcon_model,
    norm="layer",
    tensors={
        **BLOOM.tensors,
        **map_tensors("transformer.h.*", {".attention_layernorm": ".ln_attn", ".mlp_layernorm": ".ln_mlp"}),
    },
    aliases={
        **BLOOM.aliases,
        "n_head_kv": "num_key_value_heads",
        "num_kv_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
    },
    ignored_keys="apply_residual_connection_post_layernorm",  # its code ignores this key
    prefix="transformer.",
)
