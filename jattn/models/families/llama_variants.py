"""Families derived from Llama, such as Arcee, Helium, SmolLM3, Seed-OSS, Nemotron and MiniCPM."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    gated_mlp,
    layer_has_rope,
    layer_type,
    llama_layer,
    plain_mlp,
    rope,
)
from jattn.models.families.llama import LLAMA
from jattn.models.families.tensor_mappings import (
    LLAMA_TENSORS,
    NORMS_AFTER_TENSORS,
    PLAIN_MLP_TENSORS,
    QK_NORM_TENSORS,
)
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.specs import LayerSpec, NormSpec, QKNorm
from pallas_kernels.checks import require, require_int


# Arcee's AFM: a Llama whose MLPs have no gates.
def _arcee_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias, mlp = bool(keys["attention_bias"]), plain_mlp(keys, has_bias=bool(keys["mlp_bias"]))
    return llama_layer(keys, mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias",
    build_layer=_arcee_layer,
    tensors={**LLAMA_TENSORS, **PLAIN_MLP_TENSORS},
)


# Jais 2: a Llama with LayerNorm and MLPs without gates.
JAIS2 = dataclasses.replace(
    ARCEE,
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias",
    norm="layer",
    aliases={"layer_norm_eps": "rms_norm_eps"},
)


# Helium: a Llama with interleaved RoPE, whose norms round once.
def _helium_layer(keys: Keys, layer: int) -> LayerSpec:
    mlp, pairs = gated_mlp(keys, has_bias=bool(keys["mlp_bias"])), rope(keys, interleaved=True)
    return llama_layer(keys, rope=pairs, mlp=mlp, qkv_bias=bool(keys["attention_bias"]))


HELIUM = dataclasses.replace(
    LLAMA,
    model_type="helium",
    architecture="HeliumForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias",
    build_layer=_helium_layer,
    norm="rms_f32",
)


# CWM: a Llama with a sliding window in three of four layers.
_CWM_LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _cwm_layer(keys: Keys, layer: int) -> LayerSpec:
    attention_type = layer_type(keys, layer, SLIDING if layer % 4 else FULL)
    parameters = keys["rope_parameters"] or keys["rope_scaling"]
    rope_keys = {
        **keys,
        "rope_parameters": parameters or {**_CWM_LLAMA3, "original_max_position_embeddings": 8192},
    }
    return llama_layer(
        keys,
        window=keys["sliding_window"] if attention_type == SLIDING else None,
        rope=rope({**rope_keys, "rope_scaling": None}, attention_type),
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
    )


CWM = Family(
    model_type="cwm",
    architecture="CwmForCausalLM",
    keys=f"{ROPE} sliding_window layer_types mlp_bias",
    defaults={"eos_token_id": lambda keys: [128001, 128008, 128009]},
    build_layer=_cwm_layer,
    tensors=LLAMA_TENSORS,
)


# SmolLM3: every fourth layer has no RoPE, and a sliding window if it is enabled.
def _smollm3_layer(keys: Keys, layer: int) -> LayerSpec:
    has_rope, has_bias = layer_has_rope(keys, layer), bool(keys["attention_bias"])
    has_window = bool(keys["use_sliding_window"]) and keys["sliding_window"] is not None
    attention_type = layer_type(keys, layer, SLIDING if has_window and not has_rope else FULL)
    return llama_layer(
        keys,
        window=keys["sliding_window"] if has_window and attention_type == SLIDING else None,
        rope=rope(keys, attention_type) if has_rope else None,
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys=(
        f"{ROPE} use_sliding_window sliding_window layer_types no_rope_layers no_rope_layer_interval "
        "attention_bias mlp_bias"
    ),
    build_layer=_smollm3_layer,
    tensors=LLAMA_TENSORS,
    ignored_keys="max_window_layers",
)


# Seed-OSS: a Llama with biases for queries, keys and values.
def _seed_oss_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(
        keys,
        mlp=gated_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=bool(keys["attention_bias"]),
        out_bias=bool(keys["attention_out_bias"]),
    )


SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias attention_out_bias",
    build_layer=_seed_oss_layer,
    tensors=LLAMA_TENSORS,
)


# Nemotron, Minitron: LayerNorm scaled by 1 + weight, MLPs without gates, RoPE in half of each head.
def _nemotron_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        mlp=plain_mlp(keys, has_bias=bool(keys["mlp_bias"])),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias",
    defaults={"partial_rotary_factor": 0.5},
    aliases={"norm_eps": "rms_norm_eps"},
    build_layer=_nemotron_layer,
    norm="layer_offset",
    tensors={**LLAMA_TENSORS, **PLAIN_MLP_TENSORS},
)


# MiniCPM: a Llama with scaled embeddings, residuals and logits.
def _minicpm_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(keys, qkv_bias=has_bias, out_bias=has_bias)


def _minicpm_model(keys: Keys) -> Mapping[str, Any]:
    return {
        "embedding_scale": keys["scale_emb"],
        "logit_scale": keys["dim_model_base"] / keys["hidden_size"],
        "residual_scale": keys["scale_depth"] / keys["num_hidden_layers"] ** 0.5,
    }


MINICPM = Family(
    model_type="minicpm",
    architecture="MiniCPMForCausalLM",
    config_class="llama",
    keys=f"{ROPE} attention_bias",
    defaults={"tie_word_embeddings": True, "scale_emb": 1.0, "dim_model_base": 1, "scale_depth": 1.0},
    build_layer=_minicpm_layer,
    config_fields=_minicpm_model,
    tensors=LLAMA_TENSORS,
)


# EXAONE 3 and 3.5: a Llama with GPT-2's names of tensors.
_EXAONE_BLOCK = "transformer.h.*"
EXAONE = dataclasses.replace(
    LLAMA,
    model_type="exaone",
    architecture="ExaoneForCausalLM",
    config_class="llama",
    defaults={
        "rope_theta": 500000.0,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 361,
    },
    aliases={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    supported_values={},
    ignored_keys="",
    tensors={
        "embed_tokens": HFTensors(("transformer.wte",)),
        "layers.*.input_layernorm": HFTensors((f"{_EXAONE_BLOCK}.ln_1",)),
        "layers.*.self_attn.qkv_proj": HFTensors(
            tuple(f"{_EXAONE_BLOCK}.attn.attention.{part}_proj" for part in "qkv"), "heads_separate"
        ),
        "layers.*.self_attn.o_proj": HFTensors((f"{_EXAONE_BLOCK}.attn.attention.out_proj",)),
        "layers.*.post_attention_layernorm": HFTensors((f"{_EXAONE_BLOCK}.ln_2",)),
        "layers.*.mlp.gate_up_proj": HFTensors(
            (f"{_EXAONE_BLOCK}.mlp.c_fc_0", f"{_EXAONE_BLOCK}.mlp.c_fc_1"), "gates_separate"
        ),
        "layers.*.mlp.down_proj": HFTensors((f"{_EXAONE_BLOCK}.mlp.c_proj",)),
        "norm": HFTensors(("transformer.ln_f",)),
        "lm_head": HFTensors(("lm_head",)),
    },
    prefix="transformer.",
)


# EXAONE 4: norms after attention and MLP; sliding windows in some layers, RoPE in these only.
def _exaone4_pattern(keys: Keys, layer: int) -> str:
    """Return a layer's type by sliding_window_pattern.

    The pattern is the interval of full-attention layers, or a string with a letter per layer, L for a window.
    """
    pattern, window = keys["sliding_window_pattern"], keys["sliding_window"]
    pattern = 4 if pattern is None else pattern
    if window is None or not pattern:
        return FULL
    if isinstance(pattern, str):
        require(not set(pattern) - {"L", "G"}, "sliding_window_pattern", "have letters L and G", pattern)
        is_last = layer == keys["num_hidden_layers"] - 1
        return FULL if is_last or pattern[layer % len(pattern)] != "L" else SLIDING
    require_int(sliding_window_pattern=pattern)
    return SLIDING if (layer + 1) % pattern else FULL


def _exaone4_layer(keys: Keys, layer: int) -> LayerSpec:
    kind, window = layer_type(keys, layer, _exaone4_pattern(keys, layer)), keys["sliding_window"]
    return llama_layer(
        keys,
        window=window if kind == SLIDING else None,
        rope=rope(keys, kind) if window is None or kind == SLIDING else None,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
    )


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    keys=f"{ROPE} sliding_window layer_types",
    defaults={"sliding_window_pattern": None},
    build_layer=_exaone4_layer,
    norm_placement="after",
    tensors={**NORMS_AFTER_TENSORS, **QK_NORM_TENSORS},
)


# nanochat: norms without weights, also after the embedding and after RoPE, which is reversed.
def _nanochat_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias, norm = bool(keys["attention_bias"]), NormSpec("rms_no_weight", keys["rms_norm_eps"])
    return llama_layer(
        keys,
        rope=dataclasses.replace(rope(keys), is_reversed=True),
        mlp=plain_mlp(keys, has_bias=False),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=norm, comes_after_rope=True, has_weight=False),
    )


_NANOCHAT_ATTENTION = ("qkv_proj", "o_proj")
_NANOCHAT_MLP = "model.layers.*.mlp"
NANOCHAT = Family(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    keys=f"{ROPE} final_logit_softcapping attention_bias",
    build_layer=_nanochat_layer,
    config_fields=lambda keys: {
        "has_embedding_norm": True,
        "final_logit_softcapping": keys["final_logit_softcapping"] and float(keys["final_logit_softcapping"]),
    },
    norm="rms_no_weight",
    tensors={
        **{name: LLAMA_TENSORS[name] for name in ("embed_tokens", "lm_head")},
        **{
            f"layers.*.self_attn.{name}": LLAMA_TENSORS[f"layers.*.self_attn.{name}"]
            for name in _NANOCHAT_ATTENTION
        },
        "layers.*.mlp.up_proj": HFTensors((f"{_NANOCHAT_MLP}.fc1",)),
        "layers.*.mlp.down_proj": HFTensors((f"{_NANOCHAT_MLP}.fc2",)),
    },
)


# Apertus: MLPs without gates, a learned activation (xIELU), norms of queries and keys.
_APERTUS_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _apertus_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        mlp=plain_mlp(keys, has_bias=False),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"])),
    )


_APERTUS_LAYER = "model.layers.*"
APERTUS = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    keys=f"{ROPE} attention_bias",
    defaults={"rope_parameters": lambda keys: None if keys["rope_scaling"] else _APERTUS_LLAMA3},
    build_layer=_apertus_layer,
    tensors={
        **LLAMA_TENSORS,
        **QK_NORM_TENSORS,
        **PLAIN_MLP_TENSORS,
        "layers.*.input_layernorm": HFTensors((f"{_APERTUS_LAYER}.attention_layernorm",)),
        "layers.*.post_attention_layernorm": HFTensors((f"{_APERTUS_LAYER}.feedforward_layernorm",)),
        **{
            f"layers.*.mlp.activation.{name}": HFTensors((f"{_APERTUS_LAYER}.mlp.act_fn.{name}",), "array")
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        },
    },
    supported_values={
        "mlp_bias": ((False,), "MLPs have no biases"),
        "post_norm": ((False,), "norms come before attention and MLP"),
        "qk_norm": ((True,), "queries and keys are normalized"),
    },
)


# StableLM: a Llama with LayerNorm and RoPE in a quarter of each head.
def _stablelm_layer(keys: Keys, layer: int) -> LayerSpec:
    norm = QKNorm(norm=NormSpec("layer_no_bias", keys["rms_norm_eps"]), over="own_head")
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        qkv_bias=bool(keys["use_qkv_bias"]),
        qk_norm=norm if keys["qk_layernorm"] else None,
    )


_STABLELM_ATTENTION = "model.layers.*.self_attn"
STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    other_architectures=("StableLMEpochForCausalLM",),
    keys=f"{ROPE} use_qkv_bias qk_layernorm use_parallel_residual",
    defaults={"partial_rotary_factor": 0.25},
    build_layer=_stablelm_layer,
    config_fields=lambda keys: {"norm_placement": "parallel" if keys["use_parallel_residual"] else "before"},
    norm="layer",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.q_norm.weight": HFTensors(
            (f"{_STABLELM_ATTENTION}.q_layernorm.norms.#.weight",), "rows_separate"
        ),
        "layers.*.self_attn.k_norm.weight": HFTensors(
            (f"{_STABLELM_ATTENTION}.k_layernorm.norms.#.weight",), "rows_separate"
        ),
    },
    aliases={"layer_norm_eps": "rms_norm_eps"},
)
