"""The keys of a config.json: their kinds, their defaults, and which of them no decoder here knows."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.loading.quantized_weights import check_quantization
from pallas_kernels.checks import require, require_number, require_positive, unsupported

DTYPES = ("float32", "bfloat16", "float16")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
COMMON: Keys = {
    **dict.fromkeys(SIZES),
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPE: Keys = {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}
# Block-sparse layers between dense ones.
LOCAL_STRIDED: Keys = {
    "blocksparse_block_size": 64,
    "blocksparse_triton_kernel_block_size": 64,
    "blocksparse_homo_head_pattern": False,
    "blocksparse_num_local_blocks": 16,
    "blocksparse_vert_stride": 8,
    "dense_attention_every_n_layers": 2,
}
# What changes no logit: how a model was made, trained, saved or served, how tokens are picked, other heads.
_HARMLESS = """
model_type architectures quantization_config transformers_version transformers.js_config auto_map
name_or_path _name_or_path _commit_hash custom_pipelines tokenizer_class tokenizer_type
unsloth_fixed unsloth_version torchscript use_cache use_bfloat16 use_flash_attn use_flash_attention
use_flash_attention_2 attn_implementation _attn_implementation _attn_implementation_autoset
_attn_implementation_internal _experts_implementation _flash_attn_2_enabled is_llama_config
attn_impl cache_implementation return_dict return_dict_in_generate output_attentions
output_hidden_states output_router_logits output_scores is_decoder is_encoder_decoder
add_cross_attention cross_attention_hidden_size tie_encoder_decoder chunk_size_feed_forward prefix
finetuning_task problem_type task_specific_params id2label label2id num_labels
decoder_start_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids
pruned_heads tf_legacy_loss do_sample temperature top_k top_p typical_p min_p repetition_penalty
length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_beams num_beam_groups
num_return_sequences diversity_penalty early_stopping max_length min_length max_new_tokens
remove_invalid_values exponential_decay_length_penalty initializer_range initializer_factor
init_device init_std layerdrop attention_softmax_in_fp32
gradient_checkpointing pretraining_tp router_aux_loss_coef router_jitter_noise model_max_length
seq_length max_sequence_length output_past _num_labels training_args kv_cache_dtype
num_nextn_predict_layers num_mtp_layers num_mtp_modules
"""
HARMLESS = frozenset(_HARMLESS.split())
# Who has none of it may say so with False; a checkpoint that has a bias nevertheless has tensors too many.
SWITCHES = (
    *("attention_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "bias", "use_bias", "lm_head_bias"),
    *("use_qk_norm", "qk_layernorm", "use_sliding_window", "use_bidirectional_attention"),
)
ALWAYS_ON = ("is_causal",)  # what every decoder here is, and a config may say
# Where null is a value: nothing of the kind.
NULLABLE = (
    *("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping"),
    *("num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id", "gegelu_limit"),
    *("mup_width_multiplier", "mup_embedding_multiplier", "dense_attention_every_n_layers"),
)
NULL_IS_SILENCE = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq", "sliding_window_pattern")
# What would change the result, and why it is not here.
REFUSED = {
    "dual_chunk_attention_config": "positions of far chunks are folded, and no kernel here does that",
    **dict.fromkeys(("is_causal", "use_bidirectional_attention"), "decoders are causal"),
}


def filled(hf: Keys, family: Family) -> dict[str, Any]:
    """A config.json's keys by the names that all families share, those it lacks as in transformers.

    Raises:
        ValueError: A size is missing or impossible, or a value is of another kind than it should be.
        NotImplementedError: A key is not known, or has a value that is not served.
    """
    hf, names = _by_common_names(_flat(hf, family), family)
    check_kinds(hf)
    known = {**COMMON, **family.defaults}
    _refuse_what_is_not_here(hf, family, known)
    said = {key: value for key, value in hf.items() if key in known}
    said = {key: value for key, value in said.items() if value is not None or not callable(known[key])}
    keys = known | {key: _as(known[key], key, names.get(key, key), said[key]) for key in said}
    missing = [names.get(key, key) for key in SIZES if keys[key] is None]
    require(not missing, "config", "have the keys " + ", ".join(SIZES), f"none of {missing}")
    keys = {key: value(keys) if callable(value) else value for key, value in keys.items()}
    require_positive(**{key: keys[key] for key in SIZES})
    require_number(rms_norm_eps=keys["rms_norm_eps"])
    for key in ("num_key_value_heads", "head_dim", "query_pre_attn_scalar"):
        if keys.get(key) is not None:
            require_positive(**{names.get(key, key): keys[key]})
    heads = keys["num_attention_heads"]
    if keys["head_dim"] is None:
        rule = f"be a multiple of num_attention_heads ({heads}) where head_dim is not given"
        require(keys["hidden_size"] % heads == 0, "hidden_size", rule, keys["hidden_size"])
        keys["head_dim"] = keys["hidden_size"] // heads
    if keys["num_key_value_heads"] is None:
        keys["num_key_value_heads"] = heads
    return keys


def _as(default: Any, key: str, name: str, value: Any) -> Any:
    """The value, as the default is: a float where that is one.

    Args:
        default: What silence means; None = the value may be anything that its kind is.
        key: Its name among all families.
        name: What the config calls it.
        value: What it says. null is a value of its own where it can be one (`NULLABLE`), the default of a
            rope's numbers, and false of a switch.

    Raises:
        ValueError: The default is a number, a switch or a name, and the value none.
    """
    if value is None and key in NULL_IS_SILENCE:
        return default
    if isinstance(default, bool):
        require(value is None or _is_switch(value), name, "be true or false", repr(value))
        return value
    if default is None or (value is None and key in NULLABLE):
        return value
    if isinstance(default, float):
        require(_is_number(value), name, "be a number", repr(value))
        return float(value)
    if isinstance(default, int):
        is_ids = key == "eos_token_id" and are_token_ids(value)
        require(_is_int(value) or is_ids, name, "be an int", repr(value))
    if isinstance(default, str):
        require(isinstance(value, str), name, "be a name", repr(value))
    return value


def _flat(hf: Keys, family: Family) -> dict[str, Any]:
    """The same keys, those of nested dictionaries among them."""
    for key in family.nested:
        is_object = hf.get(key) is None or isinstance(hf[key], Mapping)
        require(is_object, key, "be an object", repr(hf.get(key)))
    inner = {f"{key}.{name}": value for key in family.nested for name, value in (hf.get(key) or {}).items()}
    outer = {key: value for key, value in hf.items() if key not in family.nested}
    return outer | inner


def _by_common_names(flat: Keys, family: Family) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys by the names that all families share, and what the config calls each of them.

    Raises:
        ValueError: Two names of one thing say different things: the order in the file would tell.
    """
    hf: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in flat.items():
        common = family.aliases.get(key, key)
        if hf.get(common) is not None:
            is_same = value is None or value == hf[common]
            require(is_same, f"{names[common]} and {key}", "be the same", f"{hf[common]!r} and {value!r}")
        else:
            hf[common], names[common] = value, key
    return hf, names


def _refuse_what_is_not_here(hf: Keys, family: Family, known: Keys) -> None:
    for key, (values, reason) in family.only.items():
        if hf.get(key) is not None and hf[key] not in values:
            supported = ", ".join(map(repr, values)) or "none"
            raise unsupported(f"{key} {hf[key]!r}", reason, f"Supported: {supported}")
    is_idle = lambda key, value: (
        value is None or (value is False and key in SWITCHES) or (value is True and key in ALWAYS_ON)
    )
    said = [key for key, value in hf.items() if not is_idle(key, value)]
    unknown = [key for key in said if key not in known and key not in family.only]
    for key in unknown:
        if not _is_harmless(key) and key not in family.harmless:
            reason = REFUSED.get(key, f"no {family.architecture} here knows what it changes")
            raise unsupported(
                f"config key {key!r} ({hf[key]!r})", reason, "Leave it out if it changes nothing"
            )
    _refuse_a_switch_of_others(hf, known)


def _is_harmless(key: str) -> bool:
    names = {key, key.rpartition(".")[2]}
    return bool(names & HARMLESS) or "dropout" in key or key.endswith("pdrop")


def _refuse_a_switch_of_others(hf: Keys, known: Keys) -> None:
    """A window switched off by a key that its family does not have: vLLM obeys it, transformers does not."""
    window = hf.get("sliding_window", known.get("sliding_window"))
    is_off = hf.get("use_sliding_window") is False and "use_sliding_window" not in known
    if is_off and window is not None and "sliding_window" in known:
        what, reason = (
            f"use_sliding_window False beside a sliding_window of {window}",
            "its family has no switch",
        )
        raise unsupported(what, reason, "Make sliding_window null, or leave the switch out")


def normalised(hf: Keys, family: Family) -> dict[str, Any]:
    """A config.json of the floats: with a model_type and an architecture, and one key for the dtype.

    Raises:
        NotImplementedError: The weights are stored in a way that is not read here.
    """
    check_quantization(hf.get("quantization_config"))
    hf = {**hf, "torch_dtype": dtype_of(hf)}
    for key in ("dtype", "quantization_config"):
        hf.pop(key, None)
    return hf | {"model_type": family.model_type, "architectures": [family.architecture]}


def dtype_of(hf: Keys) -> str | None:
    """What a checkpoint is meant to run in; None = it does not say.

    Raises:
        NotImplementedError: In what no decoder here computes in.
    """
    name = hf.get("dtype") or hf.get("torch_dtype")
    name = None if name in (None, "auto") else str(name).removeprefix("torch.")
    if name is not None and name not in DTYPES:
        supported = "Supported: " + ", ".join(DTYPES)
        raise unsupported(f"dtype {name!r}", "no decoder here computes in it", supported)
    return name


def token_ids(ids: int | list[int] | None) -> tuple[int, ...]:
    """A Hugging Face eos_token_id: none, one, or several."""
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def are_token_ids(ids: Any) -> bool:
    """Whether it is a Hugging Face eos_token_id."""
    return _is_int(ids) or _are_ints(ids)


def check_kinds(hf: Keys) -> None:
    """A value that is there must be of its kind; null is none.

    Raises:
        ValueError: It is of another.
    """
    for kind, is_one, names in KINDS:
        for key in names:
            require(hf.get(key) is None or is_one(hf[key]), key, f"be {kind}", repr(hf.get(key)))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether it is a finite one: Python reads NaN and Infinity where JSON has none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_switch(value: Any) -> bool:
    """Whether it is true or false, or an int that transformers takes as such (Llama 4 has a 4)."""
    return isinstance(value, int)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _are(is_one: Callable[[Any], bool], value: Any) -> bool:
    """Whether it is a list of such ones."""
    return isinstance(value, list | tuple) and all(map(is_one, value))


def _are_ints(value: Any) -> bool:
    return _are(_is_int, value)


# What the values of a config.json are.
KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "an int",
        _is_int,
        (
            *SIZES,
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "original_max_position_embeddings",
            "sliding_window",
            "max_window_layers",
            "bos_token_id",
            *("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"),
            *("rotary_dim", "word_embed_proj_dim", "n_shared_experts", "num_ln_in_parallel_attn"),
        ),
    ),
    (
        "a number",
        _is_number,
        (
            "rms_norm_eps",
            "rope_theta",
            "partial_rotary_factor",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            *("clip_qkv", "attn_config.clip_qkv", "attn_config.softmax_scale"),
        ),
    ),
    ("true or false", _is_switch, ("tie_word_embeddings",)),
    ("a name", _is_name, ("model_type", "hidden_act", "hidden_activation")),
    ("a list of names", lambda value: _are(_is_name, value), ("architectures", "layer_types")),
    ("a list of ints", _are_ints, ("dummy_token_indices", "mlp_only_layers", "moe_layers")),
    ("a list of ints", lambda value: _are(_is_switch, value), ("no_rope_layers",)),
    (
        "an object",
        lambda value: isinstance(value, Mapping),
        ("rope_scaling", "rope_parameters", "quantization_config"),
    ),
    ("an int or a list of them", are_token_ids, ("eos_token_id",)),
)
