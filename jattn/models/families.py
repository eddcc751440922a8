"""What transformers' configuration classes say where a config.json is silent, family by family."""

from collections.abc import Callable, Mapping
from typing import Any

from jattn.models.rope import Rope
from pallas_kernels.checks import require, require_positive, unsupported

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}
LAYER_TYPES = ("full_attention", "sliding_attention")
DTYPES = ("float32", "bfloat16", "float16")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
GEMMA_NUMBERS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}


def read_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DecoderConfig that a Hugging Face config means; what it lacks is as in transformers.

    Raises:
        ValueError: A size is missing or impossible, or a value is of another kind than it should be.
        NotImplementedError: The architecture, or something it asks for, is not one of ours.
    """
    _check_kinds(hf)
    model_type = _model_type(hf)
    _refuse_what_is_not_here(hf, model_type)
    missing = [key for key in REQUIRED if hf.get(key) is None]
    require(not missing, "config", "have the keys " + ", ".join(REQUIRED), f"none of {missing}")
    require_positive(**{key: hf[key] for key in REQUIRED})
    hf = {**_COMMON, **DEFAULTS[model_type], **hf}
    heads = hf["num_attention_heads"]
    if hf["head_dim"] is None:
        rule = f"be a multiple of num_attention_heads ({heads}) where head_dim is not given"
        require(hf["hidden_size"] % heads == 0, "hidden_size", rule, hf["hidden_size"])
    head_dim = hf["head_dim"] or hf["hidden_size"] // heads
    is_biased = model_type == "qwen2" or (model_type != "mistral" and bool(hf.get("attention_bias")))
    window, layer_types = _windows(hf, model_type)
    is_gemma = model_type == "gemma2"
    return {
        "model_type": model_type,
        **{key: hf[key] for key in (*REQUIRED, "max_position_embeddings")},
        "rms_norm_eps": float(hf["rms_norm_eps"]),
        "num_key_value_heads": hf["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "hidden_act": hf["hidden_activation" if is_gemma else "hidden_act"],
        "tie_word_embeddings": bool(hf["tie_word_embeddings"]),
        "attention_bias": is_biased,
        "mlp_bias": model_type == "llama" and bool(hf.get("mlp_bias")),
        "sliding_window": window,
        "layer_types": layer_types,
        "ropes": _ropes(hf, layer_types, head_dim),
        **{key: _number(hf[key]) if is_gemma else None for key in GEMMA_NUMBERS},
        "dtype": _dtype(hf),
        "bos_token_id": hf["bos_token_id"],
        "eos_token_ids": token_ids(hf["eos_token_id"]),
    }


def token_ids(ids: int | list[int] | None) -> tuple[int, ...]:
    """A Hugging Face eos_token_id: none, one, or several."""
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _number(value: int | float | None) -> float | None:
    return None if value is None else float(value)


def _check_kinds(hf: Mapping[str, Any]) -> None:
    """A value that is there must be of its kind; null is as good as absent."""
    for kind, is_one, keys in KINDS:
        for key in keys:
            require(hf.get(key) is None or is_one(hf[key]), key, f"be {kind}", repr(hf.get(key)))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _model_type(hf: Mapping[str, Any]) -> str:
    architectures = hf.get("architectures") or []
    by_name = {name: model_type for model_type, name in ARCHITECTURES.items()}
    model_type = hf.get("model_type") or by_name.get(next(iter(architectures), ""))
    supported = "Supported: " + ", ".join(ARCHITECTURES.values())
    if model_type not in ARCHITECTURES:
        raise unsupported(f"architecture {architectures or model_type}", "no decoder here has it", supported)
    if architectures and ARCHITECTURES[model_type] not in architectures:
        raise unsupported(f"architecture {architectures[0]}", f"not a decoder for {model_type}", supported)
    return model_type


def _refuse_what_is_not_here(hf: Mapping[str, Any], model_type: str) -> None:
    quantization = hf.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", quantization)
        raise unsupported(f"quantization_config {method!r}", "weights are read as floats", "Dequantize first")
    if model_type == "gemma2" and hf.get("use_bidirectional_attention"):
        raise unsupported("use_bidirectional_attention True", "decoders are causal", "Leave it out")


def _windows(hf: Mapping[str, Any], model_type: str) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window, and each layer's type."""
    layers, window = hf["num_hidden_layers"], hf["sliding_window"]
    if model_type == "llama" or (model_type.startswith("qwen") and not hf.get("use_sliding_window")):
        window = None
    if model_type in ("llama", "mistral"):  # which do not read layer_types
        return window, (LAYER_TYPES[window is not None],) * layers
    types = hf.get("layer_types")
    if types is None and model_type == "gemma2":
        types = [LAYER_TYPES[(i + 1) % 2] for i in range(layers)]
    if types is None:
        first_sliding = hf.get("max_window_layers", 28)
        types = [LAYER_TYPES[window is not None and i >= first_sliding] for i in range(layers)]
    return window, tuple(types)


def _ropes(hf: Mapping[str, Any], layer_types: tuple[str, ...], head_dim: int) -> tuple[Rope, ...]:
    """Each layer's rope: one dictionary for all, or one a layer type."""
    context = hf["max_position_embeddings"]
    base = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if hf.get(key) is not None}
    given = {**(hf.get("rope_parameters") or {}), **(hf.get("rope_scaling") or {})}
    if hf.get("original_max_position_embeddings"):
        context = hf["original_max_position_embeddings"]
        given.pop("original_max_position_embeddings", None)
    is_per_type = any(isinstance(given.get(kind), Mapping) for kind in LAYER_TYPES)
    ropes = {}
    for kind in sorted(set(layer_types)):
        require(not is_per_type or kind in given, "rope_parameters", f"have {kind!r}", sorted(given))
        own = {**base, **(given[kind] if is_per_type else given)}
        ropes[kind] = Rope.from_hf(own, head_dim=head_dim, default_context=context)
    return tuple(ropes[kind] for kind in layer_types)


def _dtype(hf: Mapping[str, Any]) -> str | None:
    name = hf.get("dtype") or hf.get("torch_dtype")
    name = None if name in (None, "auto") else str(name).removeprefix("torch.")
    if name is not None and name not in DTYPES:
        raise unsupported(
            f"dtype {name!r}", "no decoder here computes in it", "Supported: " + ", ".join(DTYPES)
        )
    return name


# What the values of a config.json are.
KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "an int",
        _is_int,
        (
            *REQUIRED,
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "original_max_position_embeddings",
            "sliding_window",
            "max_window_layers",
            "bos_token_id",
        ),
    ),
    ("a number", _is_number, ("rms_norm_eps", "rope_theta", "partial_rotary_factor", *GEMMA_NUMBERS)),
    ("a name", lambda value: isinstance(value, str), ("model_type", "hidden_act", "hidden_activation")),
    ("a list", lambda value: isinstance(value, list | tuple), ("architectures", "layer_types")),
    (
        "an object",
        lambda value: isinstance(value, Mapping),
        ("rope_scaling", "rope_parameters", "quantization_config"),
    ),
    (
        "an int or a list of them",
        lambda value: _is_int(value) or (isinstance(value, list | tuple) and all(map(_is_int, value))),
        ("eos_token_id",),
    ),
)
