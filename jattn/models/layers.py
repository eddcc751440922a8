"""The parts of a decoder layer that are not attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class RMSNorm(nnx.Module):
    """Divides by the root mean square, in f32, and multiplies by a learned weight."""

    def __init__(self, width: int, *, eps: float, is_offset: bool, dtype: DTypeLike) -> None:
        """Makes the weight.

        Args:
            width: Of the last axis.
            eps: Added to the mean square.
            is_offset: Gemma's: the factor is 1 + weight, and the product is rounded once. Else Llama's: the
                normalised input is rounded before it is multiplied.
            dtype: Of the weight.
        """
        self.eps, self.is_offset = eps, is_offset
        self.weight = nnx.Param((jnp.zeros if is_offset else jnp.ones)(width, dtype))

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """The normalised x, in x.dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.is_offset:
            return (wide * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
        return wide.astype(x.dtype) * weight.astype(x.dtype)


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        hidden_act: str,
        use_bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the projections, gate and up as one; `hidden_act` is a key of ACTIVATIONS."""
        how: Any = {"use_bias": use_bias, "param_dtype": dtype, "precision": matmul_precision(dtype)}
        self.hidden_act = hidden_act
        self.gate_up_proj = nnx.LinearGeneral(hidden_size, (2, intermediate_size), rngs=rngs, **how)
        self.down_proj = nnx.Linear(intermediate_size, hidden_size, rngs=rngs, **how)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """The layer's output, in x.dtype; the activation is computed in f32."""
        gate, up = jnp.moveaxis(self.gate_up_proj(x), 1, 0)
        gate = ACTIVATIONS[self.hidden_act](gate.astype(jnp.float32)).astype(gate.dtype)
        return self.down_proj(gate * up)


def matmul_precision(dtype: DTypeLike) -> str | None:
    """Full f32 products where the parameters are f32 (a GPU would use TF32)."""
    return None if jnp.dtype(dtype).itemsize == 2 else "highest"
