"""Families derived from Llama, such as Arcee, Helium, SmolLM3, Seed-OSS, Nemotron, InternLM and MiniCPM."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import (
    FULL,
    SLIDING,
    layer_has_rope,
    layer_type,
    llama_layer,
    plain_mlp,
    qk_norm,
    rope,
    typed_layer,
)
from jattn.models.families.llama import LLAMA
from jattn.models.families.tensor_mappings import (
    AFTER_NORM_TENSORS,
    LLAMA_BLOCK,
    LLAMA_TENSORS,
    PLAIN_MLP_TENSORS,
    QK_NORM_TENSORS,
    llama_tensors,
    map_tensors,
    separate_gates,
    separate_heads,
)
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.specs import LayerSpec

# Arcee's AFM: a Llama whose MLPs have no gates. Jais 2: LayerNorm as well.
ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias",
    build_layer=lambda keys, layer: llama_layer(keys, mlp=plain_mlp(keys)),
    tensors=llama_tensors(PLAIN_MLP_TENSORS),
)
JAIS2 = dataclasses.replace(
    ARCEE,
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    norm="layer",
    aliases={"layer_norm_eps": "rms_norm_eps"},
)
# Nemotron, Minitron: LayerNorm scaled by 1 + weight, MLPs without gates, RoPE in half of each head.
NEMOTRON = dataclasses.replace(
    ARCEE,
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    aliases={"norm_eps": "rms_norm_eps"},
    build_layer=lambda keys, layer: llama_layer(keys, rope=rope(keys, is_partial=True), mlp=plain_mlp(keys)),
    norm="layer_offset",
)
# Helium: a Llama with interleaved RoPE, whose norms round once.
HELIUM = dataclasses.replace(
    LLAMA,
    model_type="helium",
    architecture="HeliumForCausalLM",
    build_layer=lambda keys, layer: llama_layer(keys, rope=rope(keys, interleaved=True), out_bias=False),
    norm="rms_f32",
)
# Seed-OSS: a Llama with biases for queries, keys and values.
SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    keys=f"{ROPE} attention_bias mlp_bias attention_out_bias",
    build_layer=lambda keys, layer: llama_layer(keys, out_bias=bool(keys["attention_out_bias"])),
    tensors=LLAMA_TENSORS,
)


# CWM: a Llama with a sliding window in three of four layers.
def _cwm_layer(keys: Keys, layer: int) -> LayerSpec:
    return typed_layer(keys, layer_type(keys, layer, SLIDING if layer % 4 else FULL), out_bias=False)


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
    has_rope = layer_has_rope(keys, layer)
    has_window = bool(keys["use_sliding_window"]) and keys["sliding_window"] is not None
    attention_type = layer_type(keys, layer, SLIDING if has_window and not has_rope else FULL)
    return llama_layer(
        keys,
        window=keys["sliding_window"] if has_window and attention_type == SLIDING else None,
        rope=rope(keys, attention_type) if has_rope else None,
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


# MiniCPM: a Llama with scaled embeddings, residuals and logits.
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
    build_layer=LLAMA.build_layer,
    config_fields=_minicpm_model,
    tensors=LLAMA_TENSORS,
)

# EXAONE 3 and 3.5: a Llama with GPT-2's names of tensors.
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
    tensors=map_tensors(
        "transformer.h.*",
        {
            "embed_tokens": "transformer.wte",
            ".input_layernorm": ".ln_1",
            ".self_attn.qkv_proj": separate_heads(*(f".attn.attention.{part}_proj" for part in "qkv")),
            ".self_attn.o_proj": ".attn.attention.out_proj",
            ".post_attention_layernorm": ".ln_2",
            ".mlp.gate_up_proj": separate_gates(".mlp.c_fc_0", ".mlp.c_fc_1"),
            ".mlp.down_proj": ".mlp.c_proj",
            "norm": "transformer.ln_f",
            "lm_head": "lm_head",
        },
    ),
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
        is_last = layer == keys["num_hidden_layers"] - 1
        return FULL if is_last or pattern[layer % len(pattern)] != "L" else SLIDING
    return SLIDING if (layer + 1) % pattern else FULL


def _exaone4_layer(keys: Keys, layer: int) -> LayerSpec:
    kind = layer_type(keys, layer, _exaone4_pattern(keys, layer))
    has_rope = keys["sliding_window"] is None or kind == SLIDING
    return typed_layer(keys, kind, rope=rope(keys, kind) if has_rope else None, qk_norm=qk_norm(keys))


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    keys=f"{ROPE} sliding_window layer_types",
    defaults={"sliding_window_pattern": None},
    build_layer=_exaone4_layer,
    norm_placement="after",
    tensors=llama_tensors({**AFTER_NORM_TENSORS, **QK_NORM_TENSORS}),
)


# nanochat: norms without weights, also after the embedding and after RoPE, which is reversed.
def _nanochat_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(
        keys,
        rope=dataclasses.replace(rope(keys), is_reversed=True),
        mlp=plain_mlp(keys),
        qk_norm=qk_norm(keys, "rms_no_weight", comes_after_rope=True, has_weight=False),
    )


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
    tensors=llama_tensors({".mlp.up_proj": ".mlp.fc1", ".mlp.down_proj": ".mlp.fc2"}),
)

# Apertus: MLPs without gates, a learned activation (xIELU), norms of queries and keys.
APERTUS = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    keys=f"{ROPE} attention_bias",
    build_layer=lambda keys, layer: llama_layer(keys, mlp=plain_mlp(keys), qk_norm=qk_norm(keys)),
    tensors=llama_tensors(
        {
            **QK_NORM_TENSORS,
            **PLAIN_MLP_TENSORS,
            ".input_layernorm": ".attention_layernorm",
            ".post_attention_layernorm": ".feedforward_layernorm",
            **{
                f".mlp.activation.{name}": HFTensors((f".mlp.act_fn.{name}",), "array")
                for name in ("alpha_p", "alpha_n", "beta", "eps")
            },
        }
    ),
    supported_values={
        "mlp_bias": ((False,), "MLPs have no biases"),
        "post_norm": ((False,), "norms come before attention and MLP"),
        "qk_norm": ((True,), "queries and keys are normalized"),
    },
)


# StableLM: a Llama with LayerNorm and RoPE in a quarter of each head.
def _stablelm_layer(keys: Keys, layer: int) -> LayerSpec:
    norm = qk_norm(keys, "layer_no_bias", over="own_head") if keys["qk_layernorm"] else None
    has_bias = bool(keys["use_qkv_bias"])
    return llama_layer(keys, rope=rope(keys, is_partial=True), qkv_bias=has_bias, qk_norm=norm)


STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    other_architectures=("StableLMEpochForCausalLM",),
    keys=f"{ROPE} use_qkv_bias qk_layernorm use_parallel_residual",
    build_layer=_stablelm_layer,
    config_fields=lambda keys: {"norm_placement": "parallel" if keys["use_parallel_residual"] else "before"},
    norm="layer",
    tensors=llama_tensors(
        {
            f".self_attn.{part}_norm.weight": HFTensors(
                (f".self_attn.{part}_layernorm.norms.#.weight",), "rows_separate"
            )
            for part in "qk"
        }
    ),
    aliases={"layer_norm_eps": "rms_norm_eps"},
)

# InternLM2 and 2.5: a Llama with other tensor names; queries, keys and values in one matrix.
INTERNLM2 = Family(
    model_type="internlm2",
    architecture="InternLM2ForCausalLM",
    config_class="llama",
    keys=ROPE,
    defaults={"bias": True},
    build_layer=lambda keys, layer: llama_layer(
        keys, qkv_bias=bool(keys["bias"]), out_bias=bool(keys["bias"])
    ),
    tensors=map_tensors(
        LLAMA_BLOCK,
        {
            "embed_tokens": "model.tok_embeddings",
            ".input_layernorm": ".attention_norm",
            ".self_attn.qkv_proj": ".attention.wqkv",
            ".self_attn.o_proj": ".attention.wo",
            ".post_attention_layernorm": ".ffn_norm",
            ".mlp.gate_up_proj": separate_gates(".feed_forward.w1", ".feed_forward.w3"),
            ".mlp.down_proj": ".feed_forward.w2",
            "norm": "model.norm",
            "lm_head": "output",
        },
    ),
)
# InternLM3 and IQuest-Coder: a Llama with other defaults. The former's `bias` is not for Q, K and V.
INTERNLM3 = dataclasses.replace(
    LLAMA,
    model_type="internlm3",
    architecture="InternLM3ForCausalLM",
    other_architectures=("LlamaForCausalLM",),
    config_class="llama",
    keys=ROPE,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    build_layer=lambda keys, layer: llama_layer(keys, out_bias=bool(keys["mlp_bias"])),
)
IQUESTCODER = dataclasses.replace(
    LLAMA,
    model_type="iquestcoder",
    architecture="IQuestCoderForCausalLM",
    other_architectures=("LlamaForCausalLM",),
    config_class="llama",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    supported_values={**LLAMA.supported_values, "clip_qkv": ((), "no checkpoint has it")},
)
