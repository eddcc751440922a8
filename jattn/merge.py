"""Partial attentions over disjoint keys become one."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.checks import require, require_shape


def merge_attn_states(
    prefix_out: Float[Array, "tokens q_heads head_dim"],
    prefix_lse: Float[Array, "q_heads tokens"],
    suffix_out: Float[Array, "tokens q_heads head_dim"],
    suffix_lse: Float[Array, "q_heads tokens"],
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Merges attention over a prefix and over a suffix of the keys.

    An LSE of +inf means "no key", as -inf does. Where both sides have no key the output is prefix_out and
    the LSE -inf. A side without keys never reaches the output, whatever it holds.

    Args:
        prefix_out: Attention over the first keys.
        prefix_lse: Natural log of the sum of its exponentiated scores.
        suffix_out: Attention over the other keys.
        suffix_lse: Its log-sum-exp. Count a sink on one side only.

    Returns:
        Output in prefix_out's dtype, and its LSE.

    Raises:
        ValueError: Shapes disagree, or outputs are no floats, in which results would be cut off.

    Source: vLLM `merge_attn_states` (CUDA).
    """
    named = {"prefix_out": prefix_out, "suffix_out": suffix_out}
    for name, array in {**named, "prefix_lse": prefix_lse, "suffix_lse": suffix_lse}.items():
        require(isinstance(array, jax.Array | np.ndarray), name, "be an array", type(array).__name__)
    for name, out in named.items():
        require(jnp.issubdtype(out.dtype, jnp.floating), name, "hold floats", out.dtype)
    require(prefix_out.ndim == 3, "prefix_out", "have 3 axes, tokens, q_heads and head_dim", prefix_out.shape)
    require_shape("suffix_out", suffix_out.shape, prefix_out.shape, "as prefix_out")
    tokens, q_heads, _ = prefix_out.shape
    for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        require_shape(name, lse.shape, (q_heads, tokens), "q_heads, tokens")
    return merge_attention_outputs([prefix_out, suffix_out], [prefix_lse, suffix_lse])


def merge_attention_outputs(
    outs: Sequence[Float[Array, "tokens q_heads head_dim"]], lses: Sequence[Float[Array, "q_heads tokens"]]
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """`merge_attn_states` of any number of parts; without keys the output is the first one's."""
    lses = [jnp.where(lse == jnp.inf, -jnp.inf, lse) for lse in lses]
    top = functools.reduce(jnp.maximum, lses)
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = [jnp.exp(lse - finite_top) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    safe_total = jnp.where(total == 0, 1.0, total)
    per_token = lambda weight: (weight / safe_total).T[..., None]
    # Cleared before the product, whose gradient would get 0 * NaN of what a side without keys holds.
    part = lambda weight, out: weight * jnp.where(weight > 0, out.astype(weight.dtype), 0.0)
    merged = functools.reduce(
        jnp.add, [part(per_token(weight), out) for weight, out in zip(weights, outs, strict=True)]
    )
    out = jnp.where((total == 0).T[..., None], outs[0], merged.astype(outs[0].dtype))
    # The logarithm of 0 has no gradient: one of 0 became NaN.
    return out, jnp.where(total == 0, -jnp.inf, finite_top + jnp.log(safe_total))
