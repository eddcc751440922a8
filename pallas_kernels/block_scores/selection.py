"""best_blocks: the blocks with the largest scores, as lists, and the score that they reach."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.checks import require, require_axes, require_positive, require_shape
from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.ptx.top_k_blocks import MAX_LEN
from pallas_kernels.ptx.top_k_blocks import top_k_blocks as kernel


class BestBlocks(NamedTuple):
    """Which blocks each list names.

    Attributes:
        least: The recent blocks and those whose score reaches this are chosen.
        ids: The chosen blocks, ascending. What follows is garbage.
        counts: How many are chosen.
    """

    least: Float32[Array, "reqs kv_heads"]
    ids: Int32[Array, "reqs kv_heads max_blocks"]
    counts: Int32[Array, "reqs kv_heads"]


def best_blocks(
    scores: Float32[Array, "reqs kv_heads max_blocks"],
    seq_lens: Int32[Array, " reqs"],
    *,
    block_size: int,
    num_selected: int,
    num_recent: int,
) -> BestBlocks:
    """Chooses the last blocks of each request, and of the others those with the largest scores.

    Args:
        scores: No NaN among a request's blocks; what is past its end is never used.
        seq_lens: Keys of each request.
        block_size: Static: keys of a block.
        num_selected: Static: how many to choose, the recent ones included, all where there are no more; what
            scores as the last of them is chosen, too.
        num_recent: Static: how many of the last blocks are chosen whatever they score.

    Raises:
        ValueError: There are more blocks than are counted, lengths of other requests, or a number is out of
            range.
        NotImplementedError: It is differentiated.
    """
    require_axes(3, scores=scores)
    require_axes(1, seq_lens=seq_lens)
    require_shape("seq_lens", seq_lens.shape, scores.shape[:1], "reqs")
    require_positive(block_size=block_size, num_selected=num_selected)
    require(num_recent >= 0, "num_recent", "be at least 0", num_recent)
    require(scores.shape[2] <= MAX_LEN, "scores", f"have at most {MAX_LEN} blocks a request", scores.shape)
    if 0 in scores.shape:
        reqs, heads, _ = scores.shape
        least, none = jnp.full((reqs, heads), -jnp.inf, jnp.float32), jnp.zeros((reqs, heads), jnp.int32)
        return BestBlocks(least, jnp.zeros(scores.shape, jnp.int32), none)
    scores = forbid_kernel_derivative(scores, "best_blocks", "Choose by jax.lax.top_k")
    counts = {"num_selected": min(num_selected, scores.shape[2]), "num_recent": num_recent}
    return BestBlocks(*kernel.by_platform(scores, seq_lens, block_size=block_size, **counts))
