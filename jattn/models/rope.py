"""Rotary position embedding, with the scalings that checkpoints use."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Float64, Int

from jattn.models.rope_parameters import ROPE_TYPES, read_hf, write_hf
from pallas_kernels.checks import require, require_positive, unsupported


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotates pairs of a head's numbers by `position * inv_freq`. Hashable: static for jit.

    A pair is `(x[i], x[i + rotary_dim / 2])`, or `(x[2 i], x[2 i + 1])` where `interleaved`.

    Two types turn a token by the length of its request: "longrope" by its long factors where the request is
    longer than `original_max_position_embeddings`, "dynamic" by frequencies stretched to that length. As in
    transformers, that is the length with the step's tokens, so all tokens of a prompt that comes in one step
    are turned alike. Keys that are in the cache stay as they were turned: where a request passes the original
    length later on, or its prompt comes in chunks, transformers would have computed them again.

    Attributes:
        head_dim: Width of a head.
        rope_theta: Base of the wavelengths.
        rope_type: "default"; "linear": all frequencies divided by `factor`; "llama3", "yarn": the low ones;
            "dynamic": they shrink with the length; "longrope": each divided by its own factor;
            "proportional": a whole head's, of which only the first are rotated.
        partial_rotary_factor: How much of a head is rotated, its first numbers.
        interleaved: Which numbers are a pair; Llama 4's are neighbours, and rotated in f32.
        turns_back: The other way round, as nanochat's.
        factor: What frequencies are divided by.
        low_freq_factor: llama3: wavelengths above original_max_position_embeddings / this are scaled.
        high_freq_factor: llama3: wavelengths below original_max_position_embeddings / this are not; in
            between, a blend.
        beta_fast: yarn: pairs that turn more often than this in the original context are not scaled.
        beta_slow: yarn: those that turn less often are; in between, a blend.
        truncate: yarn: the blend begins and ends at whole pairs.
        short_factor: longrope: of each pair, up to the original length.
        long_factor: longrope: of each pair, beyond.
        attention_factor: Of sines and cosines.
        long_attention_factor: longrope: the same beyond the original length; None = attention_factor.
        original_max_position_embeddings: The context that the frequencies were made for.

    Source: transformers `modeling_rope_utils`.
    """

    head_dim: int
    rope_theta: float = 10000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    turns_back: bool = False
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
        require_positive(rope_theta=self.rope_theta, factor=self.factor)
        require_positive(original_max_position_embeddings=self.original_max_position_embeddings)
        rule = f"be at least low_freq_factor ({self.low_freq_factor})"
        is_above = self.high_freq_factor >= self.low_freq_factor
        require(is_above, "high_freq_factor", rule, self.high_freq_factor)
        rule = f"be at least beta_slow ({self.beta_slow})"
        require(self.beta_fast >= self.beta_slow > 0, "beta_fast", rule, self.beta_fast)
        least = 4 if self.rope_type == "dynamic" else 2
        rule = f"rotate an even number of a head's {self.head_dim}, at least {least}"
        is_even = least <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0
        require(is_even, "partial_rotary_factor", rule, self.partial_rotary_factor)
        for name in ("short_factor", "long_factor") if self.rope_type == "longrope" else ():
            factors, rule = getattr(self, name), f"have a positive number a pair ({self.rotary_dim // 2})"
            is_whole = len(factors) == self.rotary_dim // 2 and min(factors) > 0
            require(is_whole, name, rule, factors)

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
        """Reads a rope dictionary of a Hugging Face config: rope_parameters, or rope_scaling and rope_theta.

        Args:
            hf: The dictionary; the type may stand under `rope_type` or, as long ago, `type`.
            head_dim: Width of a head.
            default_context: original_max_position_embeddings where the dictionary has none.
            max_context: The config's max_position_embeddings; None = default_context.
            interleaved: The family's pairs are neighbours.

        Raises:
            ValueError: A number that the type needs is missing, or none.
            NotImplementedError: Another type, or a key that no type here knows.
        """
        max_context = default_context if max_context is None else max_context
        parameters = read_hf(hf, default_context=default_context, max_context=max_context)
        return cls(head_dim=head_dim, interleaved=interleaved, **parameters)

    def to_hf(self) -> dict[str, Any]:
        """What `from_hf` reads, and transformers; the family knows whether pairs are interleaved."""
        return write_hf({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @property
    def rotary_dim(self) -> int:
        """How many of a head's numbers may be rotated; of "proportional" some of them by nothing."""
        if self.rope_type == "proportional":
            return self.head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def needs_lengths(self) -> bool:
        """Whether a token is turned by its request's length and not by its position alone."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def turning_length(self) -> int | None:
        """Tokens of a request beyond which all of it is turned by other frequencies; None = of no length.

        "dynamic" has none: its frequencies change with each token, and what is cached stays.
        """
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None

    def longest(self, max_context: int) -> int | None:
        """The longest context that it is scaled for, as vLLM reckons it; None = it says nothing of that.

        "dynamic" says nothing: it stretches with each token, and longer contexts have keys of many stretches.

        Args:
            max_context: The config's max_position_embeddings.
        """
        if self.rope_type == "yarn":
            return round(self.original_max_position_embeddings * self.factor)
        return int(max_context * self.factor) if self.rope_type in ("linear", "proportional") else None

    def inv_freq(self, *, is_long: bool = False) -> Float32[np.ndarray, " half"]:
        """Radians a token of each pair.

        Args:
            is_long: longrope: of requests beyond the original length.
        """
        freq = _default_inv_freq(self.rope_theta, self.rotary_dim)
        context = self.original_max_position_embeddings
        if self.rope_type in ("linear", "proportional"):
            freq = freq / self.factor
        if self.rope_type == "proportional":
            freq = np.where(np.arange(len(freq)) < int(self.partial_rotary_factor * len(freq)), freq, 0)
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
        """Rotates queries or keys. Angles in f32; sine and cosine rounded to x.dtype, as in transformers.

        Args:
            x: Queries or keys.
            positions: Of the tokens.
            lengths: Of their requests, this step's tokens included; None = up to each token. Read where
                `needs_lengths`.
        """
        dtype = jnp.float32 if self.interleaved else x.dtype
        cos, sin = (part[:, None, :] for part in self.cos_sin(positions, lengths, dtype))
        turned, kept = x[..., : self.rotary_dim].astype(dtype), x[..., self.rotary_dim :]
        if self.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = jnp.split(turned, 2, axis=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        if self.interleaved:
            turned = jnp.stack(pair, axis=-1).reshape(turned.shape)
        else:
            turned = jnp.concatenate(pair, axis=-1)
        return (
            jnp.concatenate([turned.astype(x.dtype), kept], axis=-1)
            if kept.shape[-1]
            else turned.astype(x.dtype)
        )

    @property
    def turns_halves(self) -> bool:
        """Whether heads are rotated whole, number i of the first half with number i of the second."""
        return not self.interleaved and self.rotary_dim == self.head_dim

    def cos_sin(
        self,
        positions: Int[Array, " tokens"],
        lengths: Int[Array, " tokens"] | None,
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
        """Of each token's pairs, in dtype; arguments as `__call__` has them."""
        angles, amplitude = self._angles(positions, positions + 1 if lengths is None else lengths)
        cos, sin = ((f(angles) * amplitude).astype(dtype) for f in (jnp.cos, jnp.sin))
        return cos, -sin if self.turns_back else sin

    def _angles(
        self, positions: Int[Array, " tokens"], lengths: Int[Array, " tokens"]
    ) -> tuple[Float32[Array, "tokens half"], Float32[Array, "tokens 1"] | float]:
        """Angles of each pair, and the factor of their sines and cosines."""
        where = positions.astype(jnp.float32)[:, None]
        if self.rope_type == "dynamic":
            return where * self._stretched(lengths), self.attention_factor
        if self.rope_type != "longrope":
            return where * self.inv_freq()[None, :], self.attention_factor
        is_long = (lengths > self.original_max_position_embeddings)[:, None]
        freq = jnp.where(is_long, self.inv_freq(is_long=True)[None, :], self.inv_freq()[None, :])
        if self.long_attention_factor is None:
            return where * freq, self.attention_factor
        return where * freq, jnp.where(is_long, self.long_attention_factor, self.attention_factor)

    def _stretched(self, lengths: Int[Array, " tokens"]) -> Float32[Array, "tokens half"]:
        """dynamic: radians a token of each pair, the base grown with the length beyond the original."""
        exponents = jnp.asarray(np.arange(0, self.rotary_dim, 2) / self.rotary_dim, jnp.float32)
        excess = lengths.astype(jnp.float32) / self.original_max_position_embeddings - 1
        growth = jnp.log1p(self.factor * jnp.maximum(excess, 0)) * self.rotary_dim / (self.rotary_dim - 2)
        return jnp.exp(-growth[:, None] * exponents[None, :]) * self.inv_freq()[None, :]


type Frequencies = Float64[np.ndarray, " half"]


def _default_inv_freq(theta: float, dim: int) -> Frequencies:
    """Wavelengths from 2 pi to about 2 pi theta."""
    return theta ** -(np.arange(0, dim, 2) / dim)


def _llama3_inv_freq(
    freq: Frequencies, factor: float, bounds: tuple[float, float], context: int
) -> Frequencies:
    """Low frequencies are divided by a factor.

    Args:
        freq: Unscaled.
        factor: What they are divided by.
        bounds: Turns in the context: those with fewer than the first are divided, those with more than the
            second are not; in between, a blend, where they are not the same.
        context: In tokens.
    """
    low, high = bounds
    turns = context * freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= high) * 1.0
    return keep * freq + (1 - keep) * freq / factor


def _yarn_inv_freq(
    freq: Frequencies,
    factor: float,
    bounds: tuple[float, float],
    context: int,
    theta: float,
    truncate: bool,
) -> Frequencies:
    """Low frequencies are divided by a factor, with a blend that is linear in the pair's number.

    Args:
        freq: Unscaled.
        factor: What they are divided by.
        bounds: Turns in the context where the blend begins and ends: the many first.
        context: In tokens.
        theta: Base of the wavelengths.
        truncate: The blend begins and ends at whole pairs.
    """
    dim = 2 * len(freq)
    pair_with = lambda turns: dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
    first, last = (pair_with(turns) for turns in bounds)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    scaled = np.clip((np.arange(len(freq)) - first) / width, 0, 1)
    return scaled * freq / factor + (1 - scaled) * freq
