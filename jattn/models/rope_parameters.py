"""Rope dictionaries of Hugging Face configs, in and out."""

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
# type -> what it reads besides rope_theta and partial_rotary_factor
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": _YARN,
    "longrope": _LONGROPE,
    "llama3": _LLAMA3,
    "proportional": ("factor",),
}
_ALIASES = {"su": "longrope"}
_NUMBERS = (
    *("rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "short_mscale", "long_mscale"),
)
_OF_EVERY_TYPE = {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_KNOWN = {"rope_type", "type", "truncate", "short_factor", "long_factor", "finetuned", *_NUMBERS}


def read_hf(hf: Mapping[str, Any], *, default_context: int, max_context: int) -> dict[str, Any]:
    """The fields of `Rope` that a rope dictionary means; null is as good as absent.

    Raises:
        ValueError: A number that the type needs is missing, or none.
        NotImplementedError: A key that no type here knows.
    """
    given = {key: value for key, value in hf.items() if value is not None}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    require(isinstance(rope_type, str), "rope parameter rope_type", "be a name", repr(rope_type))
    rope_type = _ALIASES.get(rope_type, rope_type)
    _check(given, rope_type)
    fields: dict[str, Any] = {"rope_type": rope_type, "rope_theta": float(given.get("rope_theta", 10000.0))}
    fields["partial_rotary_factor"] = float(given.get("partial_rotary_factor", 1.0))
    original = int(given.get("original_max_position_embeddings", default_context))
    require(original > 0, "rope parameter original_max_position_embeddings", "be positive", original)
    read = ROPE_TYPES.get(rope_type, ())
    numbers = [key for key in read if key in _NUMBERS and key in given]
    fields |= {key: float(given[key]) for key in numbers}
    if "original_max_position_embeddings" in read:
        fields["original_max_position_embeddings"] = max_context if rope_type == "dynamic" else original
    if rope_type == "yarn":
        fields["factor"] = factor = float(given.get("factor", max_context / original))
        fields |= {"attention_factor": _yarn_attention(given, factor)}
        fields |= {"truncate": bool(given.get("truncate", True))}
    if rope_type == "longrope":
        fields |= {key: tuple(map(float, given[key])) for key in ("short_factor", "long_factor")}
        fields |= _longrope_attention(given, max_context, original)
    return fields


def write_hf(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rope dictionary that says what the fields of a `Rope` say."""
    read = ROPE_TYPES[fields["rope_type"]]
    hf = {key: fields[key] for key in ("rope_type", "rope_theta", *read)}
    if fields["partial_rotary_factor"] != 1.0:
        hf["partial_rotary_factor"] = fields["partial_rotary_factor"]
    if fields["rope_type"] == "longrope":
        hf |= {key: list(hf[key]) for key in ("short_factor", "long_factor")}
        short, long = fields["attention_factor"], fields["long_attention_factor"]
        hf |= {"attention_factor": short} if long is None else {"short_mscale": short, "long_mscale": long}
    return hf


def _check(given: Mapping[str, Any], rope_type: str) -> None:
    unknown = sorted(given.keys() - _KNOWN)
    if unknown:
        known = "Known: " + ", ".join(sorted(_KNOWN))
        raise unsupported(f"rope parameter {unknown[0]}", f"not known to rope type {rope_type!r}", known)
    is_real = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    is_number = lambda value: is_real(value) and abs(value) < math.inf
    for key in _NUMBERS:
        require(
            key not in given or is_number(given[key]),
            f"rope parameter {key}",
            "be a number",
            repr(given.get(key)),
        )
    for key in ("short_factor", "long_factor"):
        values = given.get(key, [])
        is_list = isinstance(values, list | tuple) and all(map(is_number, values))
        require(is_list, f"rope parameter {key}", "be a list of numbers", repr(values)[:60])
    truncate = given.get("truncate", True)
    require(isinstance(truncate, bool), "rope parameter truncate", "be true or false", repr(truncate))
    is_typed = "rope_type" in given or "type" in given or not given.keys() - _OF_EVERY_TYPE
    require(is_typed, "rope parameters", "have a rope_type", dict(given))
    needed = {"linear": _LLAMA3[:1], "dynamic": _LLAMA3[:1], "llama3": _LLAMA3[:3], "longrope": _LONGROPE[:2]}
    for key in needed.get(rope_type, ()):
        require(key in given, f"rope parameter {key}", f"be given for {rope_type!r}", dict(given))


def _yarn_attention(given: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature, as a factor of queries and keys."""
    if "attention_factor" in given:
        return float(given["attention_factor"])
    scale = lambda mscale: 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    numerator, denominator = given.get("mscale"), given.get("mscale_all_dim")
    return scale(numerator) / scale(denominator) if numerator and denominator else scale(1)


def _longrope_attention(given: Mapping[str, Any], max_context: int, original: int) -> dict[str, float]:
    factor = given.get("factor", max_context / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    both = float(given.get("attention_factor", grown))
    if "short_mscale" not in given and "long_mscale" not in given:
        return {"attention_factor": both}
    short, long = (float(given.get(key, both)) for key in ("short_mscale", "long_mscale"))
    return {"attention_factor": short, "long_attention_factor": long}
