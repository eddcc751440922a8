"""Rotary position embedding (RoPE), with the scaling methods that checkpoints use."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Float64, Int

from jattn.models.rope_parameters import ROPE_TYPES, read_hf
from pallas_kernels.checks import require, unsupported


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: rotates pairs of a head's elements by `position * inv_freq`. Static for jit.

    A pair is `(x[i], x[i + rotary_dim / 2])`, or `(x[2 i], x[2 i + 1])` where `interleaved`.

    Two types depend on the length of a token's request: "longrope" uses its long factors where the request is
    longer than `original_max_position_embeddings`, "dynamic" uses frequencies scaled for that length. As in
    transformers, the length includes the step's tokens, so all tokens of a prompt that is processed in one
    step use the same frequencies. Cached keys are not rotated again. Where a request exceeds the original
    length later, or its prompt is processed in chunks, transformers would recompute them.

    Attributes:
        head_dim: Width of a head.
        rope_theta: Base of the wavelengths.
        rope_type: "default"; "linear": all frequencies are divided by `factor`; "llama3" and "yarn": the low
            ones are; "dynamic": frequencies shrink with the request's length; "longrope": each is divided by
            a separate factor.
        partial_rotary_factor: Fraction of a head that is rotated, its first elements.
        interleaved: Whether adjacent elements form a pair (GPT-J style), instead of elements of the head's
            two halves (GPT-NeoX style). Interleaved pairs are rotated in f32, as in Llama 4.
        is_reversed: Whether pairs are rotated in the opposite direction (nanochat).
        factor: Divisor of the frequencies.
        low_freq_factor: llama3: wavelengths above original_max_position_embeddings / low_freq_factor are
            scaled.
        high_freq_factor: llama3: wavelengths below original_max_position_embeddings / high_freq_factor are
            not scaled; those in between are interpolated.
        beta_fast: yarn: pairs with more rotations than this in the original context are not scaled.
        beta_slow: yarn: pairs with fewer rotations than this are scaled; those in between are interpolated.
        truncate: yarn: whether the interpolated range is extended to integer pair indices.
        short_factor: longrope: divisor of each frequency up to the original length.
        long_factor: longrope: divisor of each frequency beyond the original length.
        attention_factor: Multiplier of sines and cosines.
        long_attention_factor: longrope: multiplier beyond the original length; None = attention_factor.
        original_max_position_embeddings: Context in tokens that the model was trained with before scaling.

    Source: transformers `modeling_rope_utils`.
    """

    head_dim: int
    rope_theta: float = 10000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    is_reversed: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0
    long_attention_factor: float | None = None
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            supported = ", ".join(ROPE_TYPES)
            raise unsupported(f"rope_type {self.rope_type!r}", "not implemented", f"Supported: {supported}")
        require(self.head_dim > 0 and self.head_dim % 2 == 0, "head_dim", "be even", self.head_dim)
        min_dim = 4 if self.rope_type == "dynamic" else 2
        if not (min_dim <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0):
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} rotates {self.rotary_dim} elements of a "
                f"head, but it must rotate an even number from {min_dim} to head_dim ({self.head_dim})."
            )

    @classmethod
    def from_hf(
        cls,
        hf: Mapping[str, Any],
        *,
        head_dim: int,
        default_context: int,
        max_context: int | None = None,
        interleaved: bool = False,
    ) -> "Rope":
        """Read a rope dictionary of config.json: rope_parameters, or rope_scaling and rope_theta.

        Args:
            hf: The dictionary. Its type is in `rope_type` or, in older files, `type`.
            head_dim: Width of a head.
            default_context: Value of original_max_position_embeddings if the dictionary has none.
            max_context: The config's max_position_embeddings; None = default_context.
            interleaved: Whether the family's pairs are adjacent elements.

        Raises:
            ValueError: If a number that the type requires is missing or invalid.
            NotImplementedError: If the type or a key is not supported.
        """
        max_context = default_context if max_context is None else max_context
        parameters = read_hf(hf, default_context=default_context, max_context=max_context)
        return cls(head_dim=head_dim, interleaved=interleaved, **parameters)

    @property
    def rotary_dim(self) -> int:
        """Number of rotated elements of a head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def needs_lengths(self) -> bool:
        """Whether the rotation depends on the request's length as well as on the position."""
        return self.rope_type in ("dynamic", "longrope")

    @functools.cached_property
    def longrope_threshold(self) -> int | None:
        """Request length in tokens beyond which all its tokens use other frequencies; None = there is none.

        "dynamic" has none: its frequencies change with each token, and cached keys are not rotated again.
        """
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None

    def scaled_context(self, max_context: int) -> int | None:
        """Return the context in tokens that the rope is scaled for, as vLLM computes it, or None.

        "dynamic" returns None: its scale changes with each token, so that the cached keys of longer contexts
        have different scales.

        Args:
            max_context: The config's max_position_embeddings.
        """
        if self.rope_type == "yarn":
            return round(self.original_max_position_embeddings * self.factor)
        return int(max_context * self.factor) if self.rope_type == "linear" else None

    def inv_freq(self, *, is_long: bool = False) -> Float32[np.ndarray, " half"]:
        """Return the angle per token of each pair, in radians.

        Args:
            is_long: For longrope: whether to return the angles for requests beyond the original length.
        """
        freq = _default_inv_freq(self.rope_theta, self.rotary_dim)
        context = self.original_max_position_embeddings
        if self.rope_type == "linear":
            freq = freq / self.factor
        if self.rope_type == "llama3":
            bounds = (self.low_freq_factor, self.high_freq_factor)
            freq = _llama3_inv_freq(freq, self.factor, bounds, context)
        if self.rope_type == "yarn":
            bounds = (self.beta_fast, self.beta_slow)
            freq = _yarn_inv_freq(freq, self.factor, bounds, context, self.rope_theta, self.truncate)
        if self.rope_type == "longrope":
            freq = freq / np.asarray(self.long_factor if is_long else self.short_factor)
        return freq.astype(np.float32)

    def __call__(
        self,
        x: Float[Array, "tokens heads head_dim"],
        positions: Int[Array, " tokens"],
        lengths: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens heads head_dim"]:
        """Rotate queries or keys. Angles are f32; sine and cosine are rounded to x.dtype, as in transformers.

        Args:
            x: Queries or keys.
            positions: Position of each token.
            lengths: Length of each token's request, including the step's tokens; None = position + 1. Used
                only if `needs_lengths`.
        """
        dtype = jnp.float32 if self.interleaved else x.dtype
        cos, sin = (part[:, None, :] for part in self.cos_sin(positions, lengths, dtype))
        rotated, passed = x[..., : self.rotary_dim].astype(dtype), x[..., self.rotary_dim :]
        if self.interleaved:
            first, second = rotated[..., ::2], rotated[..., 1::2]
        else:
            first, second = jnp.split(rotated, 2, axis=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        if self.interleaved:
            rotated = jnp.stack(pair, axis=-1).reshape(rotated.shape)
        else:
            rotated = jnp.concatenate(pair, axis=-1)
        rotated = rotated.astype(x.dtype)
        return jnp.concatenate([rotated, passed], axis=-1) if passed.shape[-1] else rotated

    @property
    def pairs_halves(self) -> bool:
        """Whether full heads are rotated, with pairs of elements of the two halves."""
        return not self.interleaved and self.rotary_dim == self.head_dim

    def cos_sin(
        self,
        positions: Int[Array, " tokens"],
        lengths: Int[Array, " tokens"] | None,
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
        """Return cosine and sine of each token's pairs, in dtype; see `__call__` for the arguments."""
        angles, amplitude = self._angles(positions, positions + 1 if lengths is None else lengths)
        cos, sin = ((f(angles) * amplitude).astype(dtype) for f in (jnp.cos, jnp.sin))
        return cos, -sin if self.is_reversed else sin

    def _angles(
        self, positions: Int[Array, " tokens"], lengths: Int[Array, " tokens"]
    ) -> tuple[Float32[Array, "tokens half"], Float32[Array, "tokens 1"] | float]:
        """Return the angle of each pair and the multiplier of its sine and cosine."""
        column = positions.astype(jnp.float32)[:, None]
        if self.rope_type == "dynamic":
            return column * self._dynamic_inv_freq(lengths), self.attention_factor
        if self.rope_type != "longrope":
            return column * self.inv_freq()[None, :], self.attention_factor
        is_long = (lengths > self.original_max_position_embeddings)[:, None]
        freq = jnp.where(is_long, self.inv_freq(is_long=True)[None, :], self.inv_freq()[None, :])
        if self.long_attention_factor is None:
            return column * freq, self.attention_factor
        return column * freq, jnp.where(is_long, self.long_attention_factor, self.attention_factor)

    def _dynamic_inv_freq(self, lengths: Int[Array, " tokens"]) -> Float32[Array, "tokens half"]:
        """Return the angle per token of each pair for "dynamic", whose base grows with the length."""
        exponents = jnp.asarray(np.arange(0, self.rotary_dim, 2) / self.rotary_dim, jnp.float32)
        excess = lengths.astype(jnp.float32) / self.original_max_position_embeddings - 1
        growth = jnp.log1p(self.factor * jnp.maximum(excess, 0)) * self.rotary_dim / (self.rotary_dim - 2)
        return jnp.exp(-growth[:, None] * exponents[None, :]) * self.inv_freq()[None, :]


type Frequencies = Float64[np.ndarray, " half"]


def _default_inv_freq(theta: float, dim: int) -> Frequencies:
    """Return unscaled frequencies, whose wavelengths run from 2 pi to about 2 pi theta."""
    return theta ** -(np.arange(0, dim, 2) / dim)


def _llama3_inv_freq(
    freq: Frequencies, factor: float, bounds: tuple[float, float], context: int
) -> Frequencies:
    """Divide the low frequencies by a factor.

    Args:
        freq: Unscaled frequencies.
        factor: Divisor of the low frequencies.
        bounds: Numbers of rotations in the context: frequencies with fewer than the first are divided, those
            with more than the second are not, those in between are interpolated.
        context: Original context in tokens.
    """
    low, high = bounds
    rotations = context * freq / (2 * math.pi)
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0) if high > low else (rotations >= high) * 1.0
    return keep * freq + (1 - keep) * freq / factor


def _yarn_inv_freq(
    freq: Frequencies,
    factor: float,
    bounds: tuple[float, float],
    context: int,
    theta: float,
    truncate: bool,
) -> Frequencies:
    """Divide the low frequencies by a factor, interpolating linearly in the pair's index.

    Args:
        freq: Unscaled frequencies.
        factor: Divisor of the low frequencies.
        bounds: Numbers of rotations in the context between which frequencies are interpolated, the larger
            first.
        context: Original context in tokens.
        theta: Base of the wavelengths.
        truncate: Whether the interpolated range is extended to integer pair indices.
    """
    dim = 2 * len(freq)
    first, last = (
        dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta)) for rotations in bounds
    )
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    scaled = np.clip((np.arange(len(freq)) - first) / width, 0, 1)
    return scaled * freq / factor + (1 - scaled) * freq
