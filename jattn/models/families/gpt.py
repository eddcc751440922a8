"""GPT-2, StarCoder, GPT-Neo, GPT-J, GPT-NeoX, OPT, StarCoder2 and gpt-oss."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.activations import ClampedSwiGLU
from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    experts,
    layer_type,
    llama_layer,
    plain_mlp,
    rope,
    typed_layer,
)
from jattn.models.families.tensor_mappings import (
    SINKS_TENSORS,
    llama_tensors,
    map_tensors,
    separate_heads,
)
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec
from pallas_kernels.checks import require_one_of, unsupported


def _biased_layer(keys: Keys, **changes: Any) -> LayerSpec:
    """Return a layer with a plain MLP and biases in all projections, without a rotary embedding."""
    fields = {"rope": None, "mlp": plain_mlp(keys, has_bias=True), "qkv_bias": True, "out_bias": True}
    return llama_layer(keys, **fields | changes)


# GPT-2: learned positions, LayerNorm, matrices stored as [in, out].
def _gpt2_layer(keys: Keys, layer: int) -> LayerSpec:
    scale = keys["head_dim"] ** -0.5 if keys["scale_attn_weights"] else 1.0
    return _biased_layer(keys, scale=scale / (layer + 1 if keys["scale_attn_by_inverse_layer_idx"] else 1))


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys="scale_attn_weights scale_attn_by_inverse_layer_idx",
    defaults={"intermediate_size": lambda keys: 4 * keys["hidden_size"]},
    build_layer=_gpt2_layer,
    config_fields=lambda keys: {"position_offset": 0},
    norm="layer",
    tensors=map_tensors(
        "transformer.h.*",
        {
            "embed_tokens": "transformer.wte",
            "embed_positions": "transformer.wpe",
            ".input_layernorm": ".ln_1",
            ".self_attn.qkv_proj": HFTensors((".attn.c_attn",), "heads_stacked", is_transposed=True),
            ".self_attn.o_proj": HFTensors((".attn.c_proj",), is_transposed=True),
            ".post_attention_layernorm": ".ln_2",
            ".mlp.up_proj": HFTensors((".mlp.c_fc",), is_transposed=True),
            ".mlp.down_proj": HFTensors((".mlp.c_proj",), is_transposed=True),
            "norm": "transformer.ln_f",
            "lm_head": "lm_head",
        },
    ),
    aliases={
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    ignored_keys=(
        "reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels"
    ),
    prefix="transformer.",
)


# StarCoder, SantaCoder: GPT-2 with one kv head.
def _gpt_bigcode_layer(keys: Keys, layer: int) -> LayerSpec:
    scale = keys["head_dim"] ** -0.5 if keys["scale_attn_weights"] else 1.0
    return _biased_layer(keys, num_kv_heads=1, scale=scale)


GPT_BIGCODE = dataclasses.replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    keys="scale_attn_weights",
    defaults={**GPT2.defaults, "num_key_value_heads": 1},
    build_layer=_gpt_bigcode_layer,
    tensors={name: dataclasses.replace(stored, is_transposed=False) for name, stored in GPT2.tensors.items()},
    supported_values={
        "multi_query": ((True,), "all query heads have the same keys"),
        "scale_attn_by_inverse_layer_idx": ((False,), "all layers scale scores alike"),
    },
    ignored_keys=f"{GPT2.ignored_keys} attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
)


# GPT-Neo: learned positions, LayerNorm, a sliding window in every other layer, unscaled scores.
_GPT_NEO_KINDS = ("global", "local")


def _gpt_neo_layer(keys: Keys, layer: int) -> LayerSpec:
    attention_types = keys["attention_types"] or [[_GPT_NEO_KINDS, keys["num_hidden_layers"] // 2]]
    kinds = [kind for cycle, count in attention_types for kind in list(cycle) * count]
    require_one_of("attention_types", kinds[layer], _GPT_NEO_KINDS)
    window = keys["window_size"] if kinds[layer] == "local" else None
    return _biased_layer(keys, window=window, scale=1.0, qkv_bias=False)


GPT_NEO = dataclasses.replace(
    GPT2,
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    keys="attention_types window_size",
    build_layer=_gpt_neo_layer,
    tensors={
        **{name: HFTensors(stored.names) for name, stored in GPT2.tensors.items()},
        **map_tensors(
            "transformer.h.*",
            {
                ".self_attn.qkv_proj": separate_heads(*(f".attn.attention.{part}_proj" for part in "qkv")),
                ".self_attn.o_proj": ".attn.attention.out_proj",
            },
        ),
    },
    aliases={"activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"},
)


# GPT-J: parallel attention and MLP after one LayerNorm; interleaved, partial RoPE.
def _gptj_layer(keys: Keys, layer: int) -> LayerSpec:
    part = (keys["rotary_dim"] or keys["head_dim"]) / keys["head_dim"]
    pairs = Rope(head_dim=keys["head_dim"], partial_rotary_factor=part, interleaved=True)
    return _biased_layer(keys, rope=pairs, qkv_bias=False, out_bias=False)


GPTJ = dataclasses.replace(
    GPT2,
    model_type="gptj",
    architecture="GPTJForCausalLM",
    keys="rotary_dim",
    build_layer=_gptj_layer,
    config_fields=lambda keys: {"has_head_bias": True},
    norm_placement="parallel",
    tensors=map_tensors(
        "transformer.h.*",
        {
            "embed_tokens": "transformer.wte",
            ".input_layernorm": ".ln_1",
            ".self_attn.qkv_proj": separate_heads(*(f".attn.{part}_proj" for part in "qkv")),
            ".self_attn.o_proj": ".attn.out_proj",
            ".mlp.up_proj": ".mlp.fc_in",
            ".mlp.down_proj": ".mlp.fc_out",
            "norm": "transformer.ln_f",
            "lm_head": "lm_head",
        },
    ),
    supported_values={
        "tie_word_embeddings": ((False,), "its output projection has a bias"),
        "rotary": ((True,), "positions use rotary embeddings"),
        "scale_attn_weights": ((True,), "scores are scaled"),
    },
)


# GPT-NeoX, Pythia: parallel attention and MLP, each with its own LayerNorm; partial RoPE.
def _gpt_neox_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, rope=rope(keys, is_partial=True), mlp=plain_mlp(keys, has_bias=True))


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys=f"{ROPE} attention_bias use_parallel_residual",
    build_layer=_gpt_neox_layer,
    config_fields=lambda keys: {
        "norm_placement": "parallel_separate_norms" if keys["use_parallel_residual"] else "before"
    },
    norm="layer",
    tensors=map_tensors(
        "gpt_neox.layers.*",
        {
            "embed_tokens": "gpt_neox.embed_in",
            ".input_layernorm": ".input_layernorm",
            ".attention_layernorm": ".input_layernorm",
            ".mlp_layernorm": ".post_attention_layernorm",
            ".self_attn.qkv_proj": ".attention.query_key_value",
            ".self_attn.o_proj": ".attention.dense",
            ".post_attention_layernorm": ".post_attention_layernorm",
            ".mlp.up_proj": ".mlp.dense_h_to_4h",
            ".mlp.down_proj": ".mlp.dense_4h_to_h",
            "norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
        },
    ),
    aliases={
        "layer_norm_eps": "rms_norm_eps",
        "rotary_pct": "partial_rotary_factor",
        "rotary_emb_base": "rope_theta",
    },
    prefix="gpt_neox.",
)


# OPT: learned positions, LayerNorm, plain MLPs.
def _opt_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["enable_bias"])
    mlp = plain_mlp(keys, has_bias=has_bias)
    return llama_layer(keys, rope=None, mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


def _opt_model(keys: Keys) -> Mapping[str, Any]:
    width, hidden_size = keys["word_embed_proj_dim"] or keys["hidden_size"], keys["hidden_size"]
    if width != hidden_size:
        reason, fix = "embeddings are not projected", f"Supported: {hidden_size}, the hidden_size"
        raise unsupported(f"word_embed_proj_dim {width}", reason, fix)
    return {"position_offset": 2}


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    keys="enable_bias word_embed_proj_dim",
    defaults={"rms_norm_eps": 1e-5},
    build_layer=_opt_layer,
    config_fields=_opt_model,
    norm="layer",
    tensors=map_tensors(
        "model.decoder.layers.*",
        {
            "embed_tokens": "model.decoder.embed_tokens",
            "embed_positions": "model.decoder.embed_positions",
            ".input_layernorm": ".self_attn_layer_norm",
            ".self_attn.qkv_proj": separate_heads(*(f".self_attn.{part}_proj" for part in "qkv")),
            ".self_attn.o_proj": ".self_attn.out_proj",
            ".post_attention_layernorm": ".final_layer_norm",
            ".mlp.up_proj": ".fc1",
            ".mlp.down_proj": ".fc2",
            "norm": "model.decoder.final_layer_norm",
            "lm_head": "lm_head",
        },
    ),
    aliases={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    supported_values={
        "do_layer_norm_before": ((True,), "norms come before attention and MLP"),
        "_remove_final_layer_norm": ((False,), "a norm follows the last layer"),
        "layer_norm_elementwise_affine": ((True,), "its norms have weights"),
    },
)


# StarCoder2: LayerNorm, plain MLPs, biases, an optional sliding window in every layer.
def _starcoder2_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["use_bias"])
    mlp = plain_mlp(keys, has_bias=has_bias)
    return llama_layer(keys, window=keys["sliding_window"], mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    keys=f"{ROPE} sliding_window use_bias",
    build_layer=_starcoder2_layer,
    norm="layer",
    tensors=llama_tensors({".mlp.up_proj": ".mlp.c_fc", ".mlp.down_proj": ".mlp.c_proj"}),
    aliases={"norm_epsilon": "rms_norm_eps"},
    supported_values={
        "mlp_type": (("default",), "its MLPs are plain"),
        "norm_type": (("layer_norm",), "its norms are LayerNorms"),
    },
    ignored_keys="layer_types",
)


# gpt-oss: sinks, alternating windows, YaRN, biases, experts with clamped gates.
def _gpt_oss_layer(keys: Keys, layer: int) -> LayerSpec:
    clamped = ClampedSwiGLU(alpha=keys["swiglu_alpha"], limit=keys["swiglu_limit"])
    routing = Routing(scores="softmax_of_top_k", has_bias=True)
    return typed_layer(
        keys,
        layer_type(keys, layer, FULL if layer % 2 else SLIDING),
        mlp=experts(keys, routing, activation=clamped, has_bias=True),
        has_sinks=True,
    )


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys=f"{ROPE} sliding_window layer_types attention_bias num_experts num_experts_per_tok",
    defaults={
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    build_layer=_gpt_oss_layer,
    norm="rms_f32",
    tensors=llama_tensors(
        {
            **SINKS_TENSORS,
            ".mlp.router": ".mlp.router",
            ".mlp.gate_up_proj.weight": HFTensors((".mlp.experts.gate_up_proj",), "experts_interleaved"),
            ".mlp.gate_up_proj.bias": HFTensors((".mlp.experts.gate_up_proj_bias",), "experts_interleaved"),
            ".mlp.down_proj.weight": HFTensors((".mlp.experts.down_proj",), "array"),
            ".mlp.down_proj.bias": HFTensors((".mlp.experts.down_proj_bias",), "array"),
        }
    ),
    supported_values={"hidden_act": (("silu",), "its gates are clamped SwiGLU")},
)
