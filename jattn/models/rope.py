"""Rotary position embedding, with the frequency scalings that Llama checkpoints use."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.checks import require, require_positive, unsupported

ROPE_TYPES = ("default", "linear", "llama3")
_LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotates pairs `(x[i], x[i + head_dim / 2])` by `position * inv_freq[i]`. Hashable: static for jit.

    Attributes:
        head_dim: Width of a head; even.
        rope_theta: Base of the wavelengths.
        rope_type: "default", "linear" (all frequencies divided by `factor`) or "llama3" (the low ones).
        factor: What frequencies are divided by.
        low_freq_factor: llama3: wavelengths above original_max_position_embeddings / this are scaled.
        high_freq_factor: llama3: wavelengths below original_max_position_embeddings / this are not; in
            between, a blend.
        original_max_position_embeddings: llama3: the context that the frequencies were made for.

    Source: transformers `modeling_rope_utils`.
    """

    head_dim: int
    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            supported = ", ".join(ROPE_TYPES)
            raise unsupported(f"rope_type {self.rope_type!r}", "not implemented", f"Supported: {supported}")
        require(self.head_dim > 0 and self.head_dim % 2 == 0, "head_dim", "be even", self.head_dim)
        require_positive(rope_theta=self.rope_theta, factor=self.factor)
        rule = f"be above low_freq_factor ({self.low_freq_factor})"
        require(self.high_freq_factor > self.low_freq_factor, "high_freq_factor", rule, self.high_freq_factor)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, head_dim: int, default_context: int) -> "Rope":
        """Reads a rope dictionary of a Hugging Face config: rope_parameters, or rope_scaling and rope_theta.

        Args:
            hf: The dictionary; the type may stand under `rope_type` or, as long ago, `type`.
            head_dim: Width of a head.
            default_context: original_max_position_embeddings where the dictionary has none.

        Raises:
            ValueError: A number that the type needs is missing, or none.
            NotImplementedError: Another type, or rotation of a part of the head only.
        """
        rope_type = hf.get("rope_type") or hf.get("type") or "default"
        for key in ("rope_theta", "factor", *_LLAMA3_KEYS, "original_max_position_embeddings"):
            is_number = isinstance(hf.get(key), int | float | None) and not isinstance(hf.get(key), bool)
            require(is_number, f"rope parameter {key}", "be a number", repr(hf.get(key)))
        partial = hf.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            raise unsupported(f"partial_rotary_factor {partial}", "heads are rotated whole", "Supported: 1.0")
        numbers: dict[str, Any] = {"rope_theta": float(hf.get("rope_theta") or 10000.0)}
        needed = {"linear": ("factor",), "llama3": ("factor", *_LLAMA3_KEYS)}.get(rope_type, ())
        for key in needed:
            require(hf.get(key) is not None, f"rope parameter {key}", f"be given for {rope_type!r}", dict(hf))
            numbers[key] = float(hf[key])
        if rope_type == "llama3":
            original = hf.get("original_max_position_embeddings") or default_context
            numbers["original_max_position_embeddings"] = int(original)
        return cls(head_dim=head_dim, rope_type=rope_type, **numbers)

    def to_hf(self) -> dict[str, Any]:
        """What `from_hf` reads."""
        hf: dict[str, Any] = {"rope_type": self.rope_type, "rope_theta": self.rope_theta}
        if self.rope_type != "default":
            hf["factor"] = self.factor
        if self.rope_type == "llama3":
            for key in (*_LLAMA3_KEYS, "original_max_position_embeddings"):
                hf[key] = getattr(self, key)
        return hf

    def inv_freq(self) -> Float32[np.ndarray, " half"]:
        """Radians a token of each pair."""
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        freq = self.rope_theta**-exponents
        if self.rope_type == "linear":
            freq = freq / self.factor
        if self.rope_type == "llama3":
            periods = self.original_max_position_embeddings * freq / (2 * math.pi)  # in that context
            span = self.high_freq_factor - self.low_freq_factor
            keep = np.clip((periods - self.low_freq_factor) / span, 0.0, 1.0)
            freq = keep * freq + (1 - keep) * freq / self.factor
        return freq.astype(np.float32)

    def __call__(
        self, x: Float[Array, "tokens heads head_dim"], positions: Int[Array, " tokens"]
    ) -> Float[Array, "tokens heads head_dim"]:
        """Rotates queries or keys. Angles in f32; sine and cosine rounded to x.dtype, as in transformers."""
        angles = positions.astype(jnp.float32)[:, None] * self.inv_freq()[None, :]
        cos, sin = (f(angles).astype(x.dtype)[:, None, :] for f in (jnp.cos, jnp.sin))
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
