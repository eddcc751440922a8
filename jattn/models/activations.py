"""Activations of MLPs and experts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float32

from pallas_kernels.checks import unsupported

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_fast": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_python": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "linear": lambda x: x,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """gpt-oss's activation: `(up + 1) * gate * sigmoid(alpha * gate)`, with clipped inputs.

    Attributes:
        alpha: Slope of the sigmoid.
        limit: gate is clipped to at most `limit`, up to [-limit, limit].
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: Array, up: Array) -> Array:
        """Apply the activation to the two halves of an expert's first projection."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclasses.dataclass(frozen=True)
class GatedActivation:
    """A gated activation: `act(gate) * up`.

    Attributes:
        hidden_act: Name of `act`, a key of `jattn.models.activations.ACTIVATIONS`.
    """

    hidden_act: str

    def __post_init__(self) -> None:
        if self.hidden_act not in ACTIVATIONS:
            supported = "Supported: " + ", ".join(ACTIVATIONS)
            raise unsupported(f"activation {self.hidden_act!r}", "not implemented", supported)

    def __call__(self, gate: Array, up: Array) -> Array:
        """Apply the activation to the two halves of an expert's first projection."""
        return ACTIVATIONS[self.hidden_act](gate) * up


def gegelu(gate: Array, up: Array, limit: float | None) -> Array:
    """Apply Phi-3-small's activation in f32 and return it in gate.dtype."""
    gate_f32, up_f32 = gate.astype(jnp.float32), up.astype(jnp.float32)
    if limit is not None:
        gate_f32, up_f32 = jnp.minimum(gate_f32, limit), jnp.clip(up_f32, -limit, limit)
    return (gate_f32 * jax.nn.sigmoid(1.702 * gate_f32) * (up_f32 + 1.0)).astype(gate.dtype)


class Constant(nnx.Variable[Any]):
    """A value that checkpoints store and training does not change."""


class XIELU(nnx.Module):
    """The learned activation xIELU.

    `alpha_p * x * x + beta * x` for x > 0, else `alpha_n * (exp(min(x, eps)) - 1 - x) + beta * x`. Both
    alphas are learned, through a softplus; alpha_n is at least beta.

    Source: "Deriving Activation Functions Using Integration" (2024), as implemented in transformers.
    """

    def __init__(self, *, dtype: DTypeLike) -> None:
        """Initialize both alphas to 0.8."""

        def inverse_softplus(alpha: float) -> Array:
            return jnp.log(jnp.expm1(jnp.full((1,), alpha, jnp.float32))).astype(dtype)

        self.alpha_p = nnx.Param(inverse_softplus(0.8))
        self.alpha_n = nnx.Param(inverse_softplus(0.8 - 0.5))
        self.beta = Constant(jnp.asarray(0.5, dtype))
        self.eps = Constant(jnp.asarray(-1e-6, dtype))

    def __call__(self, x: Float32[Array, "tokens width"]) -> Float32[Array, "tokens width"]:
        """Apply the activation."""
        beta, eps = self.beta[...].astype(jnp.float32), self.eps[...].astype(jnp.float32)
        alpha_p, alpha_n = (
            jax.nn.softplus(alpha[0].astype(jnp.float32)) for alpha in (self.alpha_p, self.alpha_n)
        )
        below = (alpha_n + beta) * (jnp.expm1(jnp.minimum(x, eps)) - x)
        return jnp.where(x > 0, alpha_p * x * x, below) + beta * x
