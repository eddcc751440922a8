"""GPT-2, StarCoder, GPT-Neo, GPT-J, GPT-NeoX, OPT and StarCoder2."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import attention, llama_layer, plain_mlp, rope, window_bounds
from jattn.models.families.tensor_mappings import LLAMA_TENSORS
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.rope import Rope
from jattn.models.specs import LayerSpec, require_one_per_layer
from pallas_kernels.checks import require, require_one_of, unsupported


# GPT-2: learned positions, LayerNorm, matrices stored as [in, out].
def _gpt2_layer(keys: Keys, layer: int) -> LayerSpec:
    scale = keys["head_dim"] ** -0.5 if keys["scale_attn_weights"] else 1.0
    by_layer = layer + 1 if keys["scale_attn_by_inverse_layer_idx"] else 1
    return LayerSpec(
        attention=attention(keys, scale=scale / by_layer),
        mlp=plain_mlp(keys, has_bias=True),
        qkv_bias=True,
        out_bias=True,
    )


_GPT2_BLOCK = "transformer.h.*"
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys="scale_attn_weights scale_attn_by_inverse_layer_idx",
    defaults={"intermediate_size": lambda keys: 4 * keys["hidden_size"]},
    build_layer=_gpt2_layer,
    config_fields=lambda keys: {"position_offset": 0},
    norm="layer",
    tensors={
        "embed_tokens": HFTensors(("transformer.wte",)),
        "embed_positions": HFTensors(("transformer.wpe",)),
        "layers.*.input_layernorm": HFTensors((f"{_GPT2_BLOCK}.ln_1",)),
        "layers.*.self_attn.qkv_proj": HFTensors(
            (f"{_GPT2_BLOCK}.attn.c_attn",), "heads_stacked", is_transposed=True
        ),
        "layers.*.self_attn.o_proj": HFTensors((f"{_GPT2_BLOCK}.attn.c_proj",), is_transposed=True),
        "layers.*.post_attention_layernorm": HFTensors((f"{_GPT2_BLOCK}.ln_2",)),
        "layers.*.mlp.up_proj": HFTensors((f"{_GPT2_BLOCK}.mlp.c_fc",), is_transposed=True),
        "layers.*.mlp.down_proj": HFTensors((f"{_GPT2_BLOCK}.mlp.c_proj",), is_transposed=True),
        "norm": HFTensors(("transformer.ln_f",)),
        "lm_head": HFTensors(("lm_head",)),
    },
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
    multi_query = attention(keys, num_kv_heads=1, scale=scale)
    return LayerSpec(attention=multi_query, mlp=plain_mlp(keys, has_bias=True), qkv_bias=True, out_bias=True)


GPT_BIGCODE = dataclasses.replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    keys="scale_attn_weights",
    defaults={"intermediate_size": GPT2.defaults["intermediate_size"], "num_key_value_heads": 1},
    build_layer=_gpt_bigcode_layer,
    tensors={name: HFTensors(stored.names, stored.layout) for name, stored in GPT2.tensors.items()},
    supported_values={
        "multi_query": ((True,), "all query heads have the same keys"),
        "scale_attn_by_inverse_layer_idx": ((False,), "all layers scale scores alike"),
    },
    ignored_keys=f"{GPT2.ignored_keys} attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
)


# GPT-Neo: learned positions, LayerNorm, a sliding window in every other layer, unscaled scores.
_GPT_NEO_KINDS = ("global", "local")


def _gpt_neo_is_pair(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and isinstance(value[0], list | tuple) and isinstance(value[1], int)


def _gpt_neo_layer(keys: Keys, layer: int) -> LayerSpec:
    attention_types = keys["attention_types"] or [[_GPT_NEO_KINDS, keys["num_hidden_layers"] // 2]]
    are_pairs = isinstance(attention_types, list | tuple) and all(map(_gpt_neo_is_pair, attention_types))
    rule = "be a list of pairs of layer kinds and a count"
    require(are_pairs, "attention_types", rule, repr(attention_types)[:60])
    kinds = [kind for cycle, count in attention_types for kind in list(cycle) * count]
    require_one_per_layer("attention_types", kinds, keys["num_hidden_layers"])
    require_one_of("attention_types", kinds[layer], _GPT_NEO_KINDS)
    window = window_bounds(keys["window_size"]) if kinds[layer] == "local" else None
    mlp = plain_mlp(keys, has_bias=True)
    return LayerSpec(attention=attention(keys, window=window, scale=1.0), mlp=mlp, out_bias=True)


_GPT_NEO_BLOCK = "transformer.h.*"
GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    keys="attention_types window_size",
    defaults={"intermediate_size": GPT2.defaults["intermediate_size"]},
    build_layer=_gpt_neo_layer,
    config_fields=GPT2.config_fields,
    norm="layer",
    tensors={
        **{name: HFTensors(stored.names) for name, stored in GPT2.tensors.items()},
        "layers.*.self_attn.qkv_proj": HFTensors(
            tuple(f"{_GPT_NEO_BLOCK}.attn.attention.{part}_proj" for part in "qkv"), "heads_separate"
        ),
        "layers.*.self_attn.o_proj": HFTensors((f"{_GPT_NEO_BLOCK}.attn.attention.out_proj",)),
    },
    aliases={
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    ignored_keys=GPT2.ignored_keys,
    prefix="transformer.",
)


# GPT-J: parallel attention and MLP after one LayerNorm; interleaved, partial RoPE.
def _gptj_layer(keys: Keys, layer: int) -> LayerSpec:
    part = (keys["rotary_dim"] or keys["head_dim"]) / keys["head_dim"]
    pairs = Rope(head_dim=keys["head_dim"], partial_rotary_factor=part, interleaved=True)
    return llama_layer(keys, rope=pairs, mlp=plain_mlp(keys, has_bias=True))


_GPTJ_BLOCK = "transformer.h.*"
GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    keys="rotary_dim",
    defaults={"intermediate_size": GPT2.defaults["intermediate_size"]},
    build_layer=_gptj_layer,
    config_fields=lambda keys: {"has_head_bias": True},
    norm="layer",
    norm_placement="parallel",
    tensors={
        "embed_tokens": HFTensors(("transformer.wte",)),
        "layers.*.input_layernorm": HFTensors((f"{_GPTJ_BLOCK}.ln_1",)),
        "layers.*.self_attn.qkv_proj": HFTensors(
            tuple(f"{_GPTJ_BLOCK}.attn.{part}_proj" for part in "qkv"), "heads_separate"
        ),
        "layers.*.self_attn.o_proj": HFTensors((f"{_GPTJ_BLOCK}.attn.out_proj",)),
        "layers.*.mlp.up_proj": HFTensors((f"{_GPTJ_BLOCK}.mlp.fc_in",)),
        "layers.*.mlp.down_proj": HFTensors((f"{_GPTJ_BLOCK}.mlp.fc_out",)),
        "norm": HFTensors(("transformer.ln_f",)),
        "lm_head": HFTensors(("lm_head",)),
    },
    aliases=GPT2.aliases,
    supported_values={
        "tie_word_embeddings": ((False,), "its output projection has a bias"),
        "rotary": ((True,), "positions use rotary embeddings"),
        "scale_attn_weights": ((True,), "scores are scaled"),
    },
    ignored_keys=GPT2.ignored_keys,
    prefix="transformer.",
)


# GPT-NeoX, Pythia: parallel attention and MLP, each with its own LayerNorm; partial RoPE.
def _gpt_neox_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        mlp=plain_mlp(keys, has_bias=True),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


_GPT_NEOX_LAYER = "gpt_neox.layers.*"
GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys=f"{ROPE} attention_bias use_parallel_residual",
    defaults={"partial_rotary_factor": 0.25},
    build_layer=_gpt_neox_layer,
    config_fields=lambda keys: {
        "norm_placement": "parallel_separate_norms" if keys["use_parallel_residual"] else "before"
    },
    norm="layer",
    tensors={
        "embed_tokens": HFTensors(("gpt_neox.embed_in",)),
        "layers.*.input_layernorm": HFTensors((f"{_GPT_NEOX_LAYER}.input_layernorm",)),
        "layers.*.attention_layernorm": HFTensors((f"{_GPT_NEOX_LAYER}.input_layernorm",)),
        "layers.*.mlp_layernorm": HFTensors((f"{_GPT_NEOX_LAYER}.post_attention_layernorm",)),
        "layers.*.self_attn.qkv_proj": HFTensors((f"{_GPT_NEOX_LAYER}.attention.query_key_value",)),
        "layers.*.self_attn.o_proj": HFTensors((f"{_GPT_NEOX_LAYER}.attention.dense",)),
        "layers.*.post_attention_layernorm": HFTensors((f"{_GPT_NEOX_LAYER}.post_attention_layernorm",)),
        "layers.*.mlp.up_proj": HFTensors((f"{_GPT_NEOX_LAYER}.mlp.dense_h_to_4h",)),
        "layers.*.mlp.down_proj": HFTensors((f"{_GPT_NEOX_LAYER}.mlp.dense_4h_to_h",)),
        "norm": HFTensors(("gpt_neox.final_layer_norm",)),
        "lm_head": HFTensors(("embed_out",)),
    },
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
    return LayerSpec(attention=attention(keys), mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


def _opt_model(keys: Keys) -> Mapping[str, Any]:
    width, hidden_size = keys["word_embed_proj_dim"] or keys["hidden_size"], keys["hidden_size"]
    if width != hidden_size:
        reason, fix = "embeddings are not projected", f"Supported: {hidden_size}, the hidden_size"
        raise unsupported(f"word_embed_proj_dim {width}", reason, fix)
    return {"position_offset": 2}


_OPT_DECODER, _OPT_LAYER = "model.decoder", "model.decoder.layers.*"
_OPT_QKV = tuple(f"{_OPT_LAYER}.self_attn.{part}_proj" for part in "qkv")
OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    keys="enable_bias word_embed_proj_dim",
    defaults={"rms_norm_eps": 1e-5},
    build_layer=_opt_layer,
    config_fields=_opt_model,
    norm="layer",
    tensors={
        "embed_tokens": HFTensors((f"{_OPT_DECODER}.embed_tokens",)),
        "embed_positions": HFTensors((f"{_OPT_DECODER}.embed_positions",)),
        "layers.*.input_layernorm": HFTensors((f"{_OPT_LAYER}.self_attn_layer_norm",)),
        "layers.*.self_attn.qkv_proj": HFTensors(_OPT_QKV, "heads_separate"),
        "layers.*.self_attn.o_proj": HFTensors((f"{_OPT_LAYER}.self_attn.out_proj",)),
        "layers.*.post_attention_layernorm": HFTensors((f"{_OPT_LAYER}.final_layer_norm",)),
        "layers.*.mlp.up_proj": HFTensors((f"{_OPT_LAYER}.fc1",)),
        "layers.*.mlp.down_proj": HFTensors((f"{_OPT_LAYER}.fc2",)),
        "norm": HFTensors((f"{_OPT_DECODER}.final_layer_norm",)),
        "lm_head": HFTensors(("lm_head",)),
    },
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
    return llama_layer(
        keys,
        window=keys["sliding_window"],
        mlp=plain_mlp(keys, has_bias=has_bias),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


_STARCODER2_MLP = "model.layers.*.mlp"
STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    keys=f"{ROPE} sliding_window use_bias",
    build_layer=_starcoder2_layer,
    norm="layer",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.mlp.up_proj": HFTensors((f"{_STARCODER2_MLP}.c_fc",)),
        "layers.*.mlp.down_proj": HFTensors((f"{_STARCODER2_MLP}.c_proj",)),
    },
    aliases={"norm_epsilon": "rms_norm_eps"},
    supported_values={
        "mlp_type": (("default",), "its MLPs are plain"),
        "norm_type": (("layer_norm",), "its norms are LayerNorms"),
    },
    ignored_keys="layer_types",
)
