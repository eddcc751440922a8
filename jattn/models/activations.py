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

from pallas_kernels.checks import require_positive, unsupported

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
    """gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`, gate below `limit` and up within it on both sides.

    Attributes:
        alpha: Slope of the sigmoid.
        limit: Of both inputs.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        require_positive(limit=self.limit)

    def __call__(self, gate: Array, up: Array) -> Array:
        """What lies between an expert's two products."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclasses.dataclass(frozen=True)
class Gated:
    """`act(gate) * up`.

    Attributes:
        hidden_act: Which `act`, a key of `jattn.models.activations.ACTIVATIONS`.
    """

    hidden_act: str

    def __post_init__(self) -> None:
        if self.hidden_act not in ACTIVATIONS:
            supported = "Supported: " + ", ".join(ACTIVATIONS)
            raise unsupported(f"activation {self.hidden_act!r}", "not implemented", supported)

    def __call__(self, gate: Array, up: Array) -> Array:
        """What lies between an expert's two products."""
        return ACTIVATIONS[self.hidden_act](gate) * up


def gegelu(gate: Array, up: Array, limit: float | None) -> Array:
    """Phi-3-small's activation, computed in f32, in gate.dtype."""
    wide_gate, wide_up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if limit is not None:
        wide_gate, wide_up = jnp.minimum(wide_gate, limit), jnp.clip(wide_up, -limit, limit)
    return (wide_gate * jax.nn.sigmoid(1.702 * wide_gate) * (wide_up + 1.0)).astype(gate.dtype)


class Constant(nnx.Variable[Any]):
    """What a checkpoint stores beside its parameters, and training leaves as it is."""


class XIELU(nnx.Module):
    """`alpha_p * x * x + beta * x` above 0, `alpha_n * (exp(min(x, eps)) - 1 - x) + beta * x` below.

    Both alphas are learned, through a softplus; alpha_n is beta at least.

    Source: "Deriving Activation Functions Using Integration" (2024), as transformers has it.
    """

    def __init__(self, *, dtype: DTypeLike) -> None:
        """Makes both alphas 0.8."""
        before_softplus = lambda alpha: jnp.log(jnp.expm1(jnp.full((1,), alpha, jnp.float32))).astype(dtype)
        self.alpha_p = nnx.Param(before_softplus(0.8))
        self.alpha_n = nnx.Param(before_softplus(0.8 - 0.5))
        self.beta = Constant(jnp.asarray(0.5, dtype))
        self.eps = Constant(jnp.asarray(-1e-6, dtype))

    def __call__(self, x: Float32[Array, "tokens width"]) -> Float32[Array, "tokens width"]:
        """The activation."""
        beta, eps = self.beta[...].astype(jnp.float32), self.eps[...].astype(jnp.float32)
        alpha_p, alpha_n = (
            jax.nn.softplus(alpha[0].astype(jnp.float32)) for alpha in (self.alpha_p, self.alpha_n)
        )
        below = (alpha_n + beta) * (jnp.expm1(jnp.minimum(x, eps)) - x)
        return jnp.where(x > 0, alpha_p * x * x, below) + beta * x
