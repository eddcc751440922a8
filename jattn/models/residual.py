"""The residual stream between the parts of a decoder's layers."""

from typing import Any

import jax
from jaxtyping import Array, Float

from jattn.cache.fused_qkv import rounds_as_kernels
from pallas_kernels import support
from pallas_kernels.add_norm import add_norm


def add_and_norm(
    x: Float[Array, "tokens hidden"],
    delta: Float[Array, "tokens hidden"],
    norm: Any,
    *,
    may_take_kernel: bool,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    """The sum x + delta, and its norm: by one kernel where it can, which has no gradient.

    Args:
        x: The stream.
        delta: What a part gave.
        norm: Of the next part; None = it reads the sum.
        may_take_kernel: Static.

    Source: vLLM `RMSNorm.forward(x, residual)`.
    """
    if may_take_kernel and _why_no_kernel(x, delta, norm) is None:
        return _add_norm(x, delta, norm.weight[...], eps=norm.eps, is_offset=norm.is_offset)
    x = x + delta
    return x, x if norm is None else norm(x)


_add_norm = jax.jit(add_norm, static_argnames=("eps", "is_offset"))  # lowered once for all that call it


def _why_no_kernel(x: Array, delta: Array, norm: Any) -> str | None:
    """Why `add_norm` does not serve; None if it does."""
    if not rounds_as_kernels(norm):
        return "the norm is no RMS norm that rounds as Llama's or Gemma's"
    others = (delta.dtype, norm.weight[...].dtype)
    return support.why_not_on(x) or support.why_not_add_norm(dtype=x.dtype, others=others, width=x.shape[-1])
