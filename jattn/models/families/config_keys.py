"""The keys of a config.json: names, defaults, and which are ignored or refused."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.loading.files import optional_module
from jattn.models.loading.quantized_weights import check_quantization
from pallas_kernels.checks import require, unsupported

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
# Keys of several families; see `Family.keys`.
ROPE = "rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings"
WINDOWS = "use_sliding_window sliding_window max_window_layers layer_types"
# Keys that do not change logits, although configuration classes have them or other families read them.
_IGNORED = """
add_cross_attention architectures chunk_size_feed_forward id2label init_device init_std initializer_range
is_decoder is_encoder_decoder label2id layerdrop model_max_length num_nextn_predict_layers
output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type return_dict
router_aux_loss_coef router_jitter_noise seq_length transformers_version use_cache
"""
IGNORED_KEYS = frozenset(_IGNORED.split())
_OFF: tuple[Any, ...] = (False, 0, "", [], {})  # values of a key that switch its feature off
ALWAYS_ON = ("is_causal",)  # keys whose value True describes every supported model
# Keys whose null is a value: the model does not have the feature. Other nulls mean the default, or false.
NULLABLE = (
    *("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping"),
    *("num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id", "gegelu_limit"),
    *("mup_width_multiplier", "mup_embedding_multiplier", "dense_attention_every_n_layers"),
)
# Keys that would change the result, and why they are not supported.
REFUSED = {
    "dual_chunk_attention_config": "dual chunk attention is not supported",
    **dict.fromkeys(("is_causal", "use_bidirectional_attention"), "decoders are causal"),
    "compression_config": "this format is not supported",
}


@functools.cache
def config_class(model_type: str) -> Any:
    """Return the configuration class of a model type in transformers.

    Raises:
        ImportError: If transformers is not installed, or does not have the class.
    """
    classes = optional_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    if model_type not in classes:
        raise ImportError(f"transformers has no configuration of {model_type}. Install a newer version.")
    return classes[model_type]


@functools.cache
def class_defaults(model_type: str) -> dict[str, Any]:
    """Return the default values of a configuration class in transformers by the names of its fields."""
    cls = config_class(model_type)
    required = dataclasses.MISSING
    defaults = {
        field.name: field.default for field in dataclasses.fields(cls) if field.default is not required
    }
    unset = 1.0  # a base that no class has
    rope = cls(rope_theta=unset).rope_parameters if "rope_parameters" in defaults else None
    if rope is None:
        return defaults
    if isinstance(rope.get("rope_type"), str):  # not one dictionary per layer type
        if "partial_rotary_factor" in rope:
            defaults["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if rope["rope_theta"] == unset:
            del rope["rope_theta"]
        defaults["rope_parameters"] = rope if rope["rope_type"] != "default" else None
    return defaults | {"rope_theta": cls.default_theta}


@functools.cache
def key_names(family: Family) -> dict[str, str]:
    """Return the family's and the class's names of keys, mapped to the names that all families share."""
    shared = {*COMMON, *family.read_keys, *family.defaults}
    synonyms = config_class(family.config_class or family.model_type).attribute_map
    names = {
        field if name in shared else name: name if name in shared else field
        for name, field in synonyms.items()
    }
    return {**names, **family.aliases}


@functools.cache
def default_keys(family: Family) -> dict[str, Any]:
    """Return the keys that a family reads, with default values or functions that compute them."""
    names, read = key_names(family), {*COMMON, *family.read_keys}
    stored = class_defaults(family.config_class or family.model_type)
    stored = {names.get(field, field): value for field, value in stored.items()}
    if rope := stored.get("rope_parameters"):
        stored["rope_parameters"] = lambda keys: None if keys["rope_scaling"] else rope
    return {
        **dict.fromkeys(family.read_keys),
        **COMMON,
        **{key: value for key, value in stored.items() if key in read},
        **family.defaults,
    }


def fill_defaults(hf: Keys, family: Family, served_keys: Collection[str] = ()) -> dict[str, Any]:
    """Return a config.json's keys by the names that all families share, with transformers' defaults.

    Args:
        hf: Keys of config.json.
        family: The model's family.
        served_keys: Keys that any family reads. One that this family does not read is refused, because it
            would change the result in another family.

    Raises:
        ValueError: If the width of a head is not an integer, or two names of a key have different values.
        NotImplementedError: If a key that would change the result is not read by the family, or has an
            unsupported value.
    """
    hf = _rename_aliases(_flatten(hf, family), key_names(family))
    defaults = default_keys(family)
    _check_supported(hf, family, served_keys)
    keys = dict(defaults)
    for key in defaults.keys() & hf.keys():
        value, default = hf[key], defaults[key]
        if value is not None:
            keys[key] = float(value) if type(default) is float else value
        elif key in NULLABLE or isinstance(default, bool):
            keys[key] = None
    keys = {key: value(keys) if callable(value) else value for key, value in keys.items()}
    heads = keys["num_attention_heads"]
    if keys["head_dim"] is None:
        rule = f"be a multiple of num_attention_heads ({heads}) if head_dim is not set"
        require(keys["hidden_size"] % heads == 0, "hidden_size", rule, keys["hidden_size"])
        keys["head_dim"] = keys["hidden_size"] // heads
    if keys["num_key_value_heads"] is None:
        keys["num_key_value_heads"] = heads
    return keys


def _flatten(hf: Keys, family: Family) -> dict[str, Any]:
    """Return the keys; keys of nested dictionaries become `key.inner`."""
    inner = {
        f"{key}.{name}": value for key in family.nested_keys for name, value in (hf.get(key) or {}).items()
    }
    outer = {key: value for key, value in hf.items() if key not in family.nested_keys}
    return outer | inner


def _rename_aliases(flat: Keys, shared_names: Mapping[str, str]) -> dict[str, Any]:
    """Rename keys to the names that all families share.

    Raises:
        ValueError: If two names of one key have different values, so that their order would decide.
    """
    hf: dict[str, Any] = {}
    for key, value in flat.items():
        common = shared_names.get(key, key)
        known = hf.get(common)
        rule = f"equal the key's other name ({known!r})"
        require(known is None or value in (None, known), key, rule, repr(value))
        hf[common] = value if known is None else known
    return hf


def _check_supported(hf: Keys, family: Family, served_keys: Collection[str]) -> None:
    """Refuse keys that would change the result and that the family does not read.

    These are fields of the configuration class with another value than their default, keys of other families
    that are not null, false, zero or empty, and REFUSED.
    """
    for key, (values, reason) in family.supported_values.items():
        if hf.get(key) is not None and hf[key] not in values:
            supported = ", ".join(map(repr, values)) or "none"
            raise unsupported(f"{key} {hf[key]!r}", reason, f"Supported: {supported}")
    defaults, fields = default_keys(family), class_defaults(family.config_class or family.model_type)
    harmless = {*defaults, *family.supported_values, *family.ignored_keys.split(), *IGNORED_KEYS}
    for key, value in hf.items():
        if {key, key.rpartition(".")[2]} & harmless or "dropout" in key or key.endswith("pdrop"):
            continue
        unchanged = [fields[key]] if key in fields else [True] if key in ALWAYS_ON else list(_OFF)
        is_served_elsewhere = key in fields or key in REFUSED or key in served_keys
        if is_served_elsewhere and value is not None and value not in unchanged:
            reason = REFUSED.get(key, f"{family.architecture} does not support this key")
            raise unsupported(f"config key {key!r} ({hf[key]!r})", reason, "Remove it if it has no effect")
    _check_sliding_window_switch(hf, defaults)


def _check_sliding_window_switch(hf: Keys, defaults: Keys) -> None:
    """Refuse use_sliding_window in a family without that key: vLLM obeys it, transformers ignores it."""
    window = hf.get("sliding_window", defaults.get("sliding_window"))
    is_off = hf.get("use_sliding_window") is False and "use_sliding_window" not in defaults
    if is_off and window is not None and "sliding_window" in defaults:
        feature, reason = (
            f"use_sliding_window False with a sliding_window of {window}",
            "the family does not have this key",
        )
        raise unsupported(feature, reason, "Set sliding_window to null, or remove use_sliding_window")


def normalize_config(hf: Keys, family: Family) -> dict[str, Any]:
    """Return a config.json for the dequantized model, with model_type, architectures and torch_dtype set.

    Raises:
        NotImplementedError: If the quantization format is not supported.
    """
    check_quantization(hf.get("quantization_config"))
    hf = {**hf, "torch_dtype": checkpoint_dtype(hf)}
    for key in ("dtype", "quantization_config"):
        hf.pop(key, None)
    return hf | {"model_type": family.model_type, "architectures": [family.architecture]}


def checkpoint_dtype(hf: Keys) -> str | None:
    """Return the dtype that a checkpoint is meant to run in, or None if config.json has none.

    Raises:
        NotImplementedError: If the dtype is not supported.
    """
    name = hf.get("dtype") or hf.get("torch_dtype")
    name = None if name in (None, "auto") else str(name).removeprefix("torch.")
    if name is not None and name not in DTYPES:
        supported = "Supported: " + ", ".join(DTYPES)
        raise unsupported(f"dtype {name!r}", "models cannot run in it", supported)
    return name


def token_ids(ids: int | list[int] | None) -> tuple[int, ...]:
    """Return eos_token_id, which may be null, an int or a list, as a tuple."""
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
