"""Merging attention outputs over disjoint sets of keys."""

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
    """Merge attention over a prefix and attention over a suffix of the keys.

    An LSE of +inf means that there is no key, as -inf does. If neither side has a key, the output is
    prefix_out and the LSE -inf. A side without keys never affects the output, even if it holds NaN.

    Args:
        prefix_out: Attention over the first keys.
        prefix_lse: Log-sum-exp (natural logarithm) of the prefix's scores.
        suffix_out: Attention over the remaining keys.
        suffix_lse: Log-sum-exp of the suffix's scores. Include a sink on one side only.

    Returns:
        Output in prefix_out's dtype, and its LSE.

    Raises:
        ValueError: If shapes do not match, or outputs are not floating-point arrays.

    Source: vLLM `merge_attn_states` (CUDA).
    """
    outputs = {"prefix_out": prefix_out, "suffix_out": suffix_out}
    for name, array in {**outputs, "prefix_lse": prefix_lse, "suffix_lse": suffix_lse}.items():
        require(isinstance(array, jax.Array | np.ndarray), name, "be an array", type(array).__name__)
    for name, out in outputs.items():
        require(jnp.issubdtype(out.dtype, jnp.floating), name, "hold floats", out.dtype)
    require(prefix_out.ndim == 3, "prefix_out", "have 3 axes, tokens, q_heads and head_dim", prefix_out.shape)
    require_shape("suffix_out", suffix_out.shape, prefix_out.shape, "the shape of prefix_out")
    tokens, q_heads, _ = prefix_out.shape
    for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        require_shape(name, lse.shape, (q_heads, tokens), "q_heads, tokens")
    return merge_attention_outputs([prefix_out, suffix_out], [prefix_lse, suffix_lse])


def merge_attention_outputs(
    outs: Sequence[Float[Array, "tokens q_heads head_dim"]], lses: Sequence[Float[Array, "q_heads tokens"]]
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Merge any number of attention outputs; see `merge_attn_states`.

    Without any keys the result is the first output.
    """
    lses = [jnp.where(lse == jnp.inf, -jnp.inf, lse) for lse in lses]
    max_lse = functools.reduce(jnp.maximum, lses)
    finite_max = jnp.where(jnp.isneginf(max_lse), 0.0, max_lse)
    weights = [jnp.exp(lse - finite_max) for lse in lses]
    weight_sum = functools.reduce(jnp.add, weights)
    safe_sum = jnp.where(weight_sum == 0, 1.0, weight_sum)
    terms = []
    for weight, out in zip(weights, outs, strict=True):
        per_token = (weight / safe_sum).T[..., None]
        # Outputs without weight are cleared before the product: its gradient would be 0 * NaN.
        cleared = jnp.where(per_token > 0, out.astype(per_token.dtype), 0.0)
        terms.append(per_token * cleared)
    merged = functools.reduce(jnp.add, terms)
    merged = jnp.where((weight_sum == 0).T[..., None], outs[0], merged.astype(outs[0].dtype))
    # log(0) is avoided: its gradient would be NaN.
    return merged, jnp.where(weight_sum == 0, -jnp.inf, finite_max + jnp.log(safe_sum))
