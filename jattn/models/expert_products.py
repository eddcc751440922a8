"""The products of a mixture of experts: several ways, chosen by static sizes alone, with one result.

An expert's weights lie with `hidden` last, those of both products: all experts together are then one matrix
for the first product and one for the second, and nothing has to be transposed.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jattn.models.expert_parts import Choices, How, Weights, activate, scaled_bias
from jattn.models.expert_tiles import num_kernel_rows, tiles_by_kernel, tiles_by_xla, why_no_kernel

# Beyond, all tokens through all experts takes longer than copies of the weights do.
MAX_DENSE_TOKENS = 512
# Beyond so many times the kernel's rows, too. On an H200 the kernel is faster from about 170 tokens on at
# gpt-oss-20b's widths (1.15 times), from about 290 at Qwen3-30B-A3B's (2 times).
MAX_DENSE_ROWS = 1.25
MAX_PARTS = 16  # sums over experts that are computed beside each other


def run_experts(
    x: Float[Array, "tokens hidden"],
    choices: Choices,
    weights: Weights,
    how: How,
    *,
    may_take_kernel: bool = True,
) -> Float32[Array, "tokens hidden"]:
    """The weighted sum of each token's experts: one executable whatever the router chooses.

    Args:
        x: Tokens.
        choices: Their experts.
        weights: Of all experts.
        how: Static.
        may_take_kernel: Static; False leaves the kernel out where there is one.
    """
    num_tokens, num_chosen = choices.experts.shape
    sizes = {"num_tokens": num_tokens, "num_chosen": num_chosen, "num_experts": len(weights.down)}
    has_kernel = may_take_kernel and why_no_kernel(x, weights) is None
    return way(**sizes, has_kernel=has_kernel)(x, choices, weights, how)


def way(*, num_tokens: int, num_chosen: int, num_experts: int, has_kernel: bool) -> Callable[..., Array]:
    """How experts are computed, by the sizes.

    - Fewer rows (tokens times experts a token) than experts: each row reads its expert's weights in place.
    - Few tokens: all of them through all experts. Nearly every expert is some token's; each is read once, in
      place.
    - More: rows sorted by expert, in tiles of one expert each, by the kernel where there is one and it has
      much fewer rows to multiply. Else XLA copies a tile's weights before the product.
    """
    num_rows = num_tokens * num_chosen
    if num_rows < num_experts:
        return each_row
    if has_kernel:
        is_dense = num_tokens * num_experts <= MAX_DENSE_ROWS * num_kernel_rows(num_rows, num_experts)
        return all_experts if is_dense else tiles_by_kernel
    return all_experts if num_tokens <= MAX_DENSE_TOKENS else tiles_by_xla


def each_row(x: Array, choices: Choices, weights: Weights, how: How) -> Float32[Array, "tokens hidden"]:
    """For few rows. Sums of products: XLA reads an expert's weights inside them, and makes no copy."""
    own, num_chosen = weights.of(choices.experts.reshape(-1)), choices.experts.shape[1]
    scores = choices.scores.reshape(-1, 1)
    wide = jnp.repeat(x, num_chosen, axis=0).astype(jnp.float32)
    gate_up = jnp.sum(wide[:, None, None, :] * own.gate_up.astype(jnp.float32), axis=-1)
    inner = activate(gate_up, own.gate_up_bias, scores, choices.scales_input, how).astype(x.dtype)
    out = jnp.sum(inner.astype(jnp.float32)[:, :, None] * own.down.astype(jnp.float32), axis=1)
    out = out + scaled_bias(own.down_bias, scores, choices.scales_input)
    return jnp.sum(out.reshape(*choices.experts.shape, out.shape[-1]), axis=1)


def all_experts(x: Array, choices: Choices, weights: Weights, how: How) -> Float32[Array, "tokens hidden"]:
    """All tokens through all experts: two matrix products, and zeros for what was not chosen."""
    num_experts, _, hidden = weights.down.shape
    is_chosen, scores = _by_expert(choices, num_experts)
    gate_up = jnp.einsum("th,egfh->tegf", x, weights.gate_up, precision=how.precision)
    inner = activate(gate_up, weights.gate_up_bias, scores[:, :, None], choices.scales_input, how)
    inner = jnp.where(is_chosen[:, :, None], inner, 0).astype(x.dtype)
    # A sum over all experts' neurons has few results and is long: parts of it keep the device busy.
    parts = max(n for n in range(1, MAX_PARTS + 1) if num_experts % n == 0)
    inner = inner.reshape(len(x), parts, math.prod(inner.shape[1:]) // parts)
    down = weights.down.reshape(parts, -1, hidden)
    how_summed = {"precision": how.precision, "preferred_element_type": jnp.float32}
    out = jnp.sum(jnp.einsum("tpf,pfh->pth", inner, down, **how_summed), axis=0)
    if weights.down_bias is None:
        return out
    scores = is_chosen.astype(jnp.float32) if choices.scales_input else scores
    return out + jnp.matmul(scores, weights.down_bias.astype(jnp.float32), precision="highest")


def _by_expert(
    choices: Choices, num_experts: int
) -> tuple[Bool[Array, "tokens experts"], Float32[Array, "tokens experts"]]:
    """Whether each expert is a token's, and its score; 0 where it is not."""
    is_it = choices.experts[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    return is_it.any(axis=1), jnp.sum(jnp.where(is_it, choices.scores[:, :, None], 0), axis=1)
