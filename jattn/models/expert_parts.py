"""What a mixture of experts is computed of, and what lies between its products and behind them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


class Choices(NamedTuple):
    """What a router chose.

    Attributes:
        experts: Of each token, the best first, none twice.
        scores: Their weights.
        scales_input: A score multiplies its expert's input; else its output.
    """

    experts: Int32[Array, "tokens chosen"]
    scores: Float32[Array, "tokens chosen"]
    scales_input: bool


class Weights(NamedTuple):
    """The experts' parameters."""

    gate_up: Float[Array, "experts 2 intermediate hidden"]
    gate_up_bias: Float[Array, "experts 2 intermediate"] | None
    down: Float[Array, "experts intermediate hidden"]
    down_bias: Float[Array, "experts hidden"] | None

    def of(self, experts: Int32[Array, "..."]) -> "Weights":
        """Those of some experts, or of one."""
        return jax.tree.map(lambda array: array[experts], self)


class How(NamedTuple):
    """What is static.

    Attributes:
        activation: Of gate and up, in f32.
        precision: Of the products, as in `jax.lax.dot`.
    """

    activation: Callable[[Array, Array], Array]
    precision: str | None


def activate(
    gate_up: Float[Array, "*rows 2 intermediate"],
    bias: Float[Array, "... 2 intermediate"] | None,
    scores: Float32[Array, "*rows 1"],
    scales_input: bool,
    how: How,
) -> Float32[Array, "*rows intermediate"]:
    """What lies between the products, scaled: a score of an input scales its first product as well."""
    gate_up = gate_up.astype(jnp.float32)
    gate_up = gate_up * scores[..., None] if scales_input else gate_up
    if bias is not None:
        bias = bias.astype(jnp.float32)
        gate_up = gate_up + bias.reshape((1,) * (gate_up.ndim - bias.ndim) + bias.shape)
    inner = how.activation(gate_up[..., 0, :], gate_up[..., 1, :])
    return inner if scales_input else inner * scores


def scaled_bias(bias: Array | None, scores: Float32[Array, "rows 1"], scales_input: bool) -> Array:
    """What the second product's bias adds to each row."""
    if bias is None:
        return jnp.zeros((1, 1), jnp.float32)
    bias = bias.astype(jnp.float32).reshape(-1, bias.shape[-1])
    return bias if scales_input else bias * scores
