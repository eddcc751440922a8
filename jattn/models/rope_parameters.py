"""Reading the rope dictionaries of config.json."""

import math
from collections.abc import Mapping
from typing import Any

from pallas_kernels.checks import require, unsupported

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = (
    "factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "original_max_position_embeddings",
)
_LONGROPE = ("short_factor", "long_factor", "original_max_position_embeddings")
# Keys that each type reads in addition to rope_theta and partial_rotary_factor.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": _YARN,
    "longrope": _LONGROPE,
    "llama3": _LLAMA3,
}
_ALIASES = {"su": "longrope"}
_NUMBERS = (
    *("rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "short_mscale", "long_mscale"),
)
_COMMON_KEYS = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_KNOWN = {"rope_type", "type", "truncate", "short_factor", "long_factor", "finetuned", *_NUMBERS}


def read_hf(hf: Mapping[str, Any], *, default_context: int, max_context: int) -> dict[str, Any]:
    """Return the fields of `Rope` for a rope dictionary. null counts as absent.

    Raises:
        ValueError: If a number that the type requires is missing or invalid.
        NotImplementedError: If a key is not supported.
    """
    parameters = {key: value for key, value in hf.items() if value is not None}
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    rope_type = _ALIASES.get(rope_type, rope_type)
    _check(parameters, rope_type)
    fields: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": float(parameters.get("rope_theta", 10000.0)),
    }
    fields["partial_rotary_factor"] = float(parameters.get("partial_rotary_factor", 1.0))
    original = int(parameters.get("original_max_position_embeddings", default_context))
    read = ROPE_TYPES.get(rope_type, ())
    numbers = [key for key in read if key in _NUMBERS and key in parameters]
    fields |= {key: float(parameters[key]) for key in numbers}
    if "original_max_position_embeddings" in read:
        fields["original_max_position_embeddings"] = max_context if rope_type == "dynamic" else original
    if rope_type == "yarn":
        fields["factor"] = factor = float(parameters.get("factor", max_context / original))
        fields |= {"attention_factor": _yarn_attention_factor(parameters, factor)}
        fields |= {"truncate": bool(parameters.get("truncate", True))}
    if rope_type == "longrope":
        fields |= {key: tuple(map(float, parameters[key])) for key in ("short_factor", "long_factor")}
        fields |= _longrope_attention_factors(parameters, max_context, original)
    return fields


def _check(parameters: Mapping[str, Any], rope_type: str) -> None:
    unknown = sorted(parameters.keys() - _KNOWN)
    if unknown:
        known_keys = "Known: " + ", ".join(sorted(_KNOWN))
        raise unsupported(f"rope parameter {unknown[0]}", f"not a key of rope type {rope_type!r}", known_keys)
    has_rope_type = "rope_type" in parameters or "type" in parameters or not parameters.keys() - _COMMON_KEYS
    require(has_rope_type, "rope parameters", "have a rope_type", dict(parameters))
    required_keys = {
        "linear": _LLAMA3[:1],
        "dynamic": _LLAMA3[:1],
        "llama3": _LLAMA3[:3],
        "longrope": _LONGROPE[:2],
    }
    for key in required_keys.get(rope_type, ()):
        require(key in parameters, f"rope parameter {key}", f"be given for {rope_type!r}", dict(parameters))


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's attention temperature, as a multiplier of queries and keys."""
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])

    def scale(mscale: float | int) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(numerator) / scale(denominator) if numerator and denominator else scale(1)


def _longrope_attention_factors(
    parameters: Mapping[str, Any], max_context: int, original: int
) -> dict[str, float]:
    factor = parameters.get("factor", max_context / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention_factor = float(parameters.get("attention_factor", default))
    if "short_mscale" not in parameters and "long_mscale" not in parameters:
        return {"attention_factor": attention_factor}
    short, long = (float(parameters.get(key, attention_factor)) for key in ("short_mscale", "long_mscale"))
    return {"attention_factor": short, "long_attention_factor": long}
