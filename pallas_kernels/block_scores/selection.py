"""select_top_blocks: list the blocks with the highest scores of each request and KV head."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.checks import (
    forbid_kernel_derivative,
    require,
    require_axes,
    require_positive,
    require_shape,
)
from pallas_kernels.ptx.top_k_blocks import MAX_LEN
from pallas_kernels.ptx.top_k_blocks import top_k_blocks as kernel


class SelectedBlocks(NamedTuple):
    """Selected blocks of each request and KV head.

    Attributes:
        threshold: Smallest score of a selected block. All blocks with at least this score are selected, and
            the recent blocks.
        ids: Indices of the selected blocks in ascending order; elements after them are undefined.
        counts: Number of selected blocks.
    """

    threshold: Float32[Array, "reqs kv_heads"]
    ids: Int32[Array, "reqs kv_heads max_blocks"]
    counts: Int32[Array, "reqs kv_heads"]


def select_top_blocks(
    scores: Float32[Array, "reqs kv_heads max_blocks"],
    seq_lens: Int32[Array, " reqs"],
    *,
    block_size: int,
    num_selected: int,
    num_recent: int,
) -> SelectedBlocks:
    """Select the last blocks of each request, and those of the earlier blocks that have the highest scores.

    Args:
        scores: Score of each block, without NaN among a request's blocks; scores past its end are not used.
        seq_lens: Number of keys of each request.
        block_size: Static: keys per block.
        num_selected: Static: number of blocks to select, including the recent ones; all blocks if there are
            fewer. Blocks with the same score as the last selected one are also selected.
        num_recent: Static: number of last blocks, which are always selected.

    Raises:
        ValueError: If there are more than MAX_LEN blocks, the shapes disagree, or a number is out of range.
        NotImplementedError: If it is differentiated.
    """
    require_axes(3, scores=scores)
    require_axes(1, seq_lens=seq_lens)
    require_shape("seq_lens", seq_lens.shape, scores.shape[:1], "reqs")
    require_positive(block_size=block_size, num_selected=num_selected)
    require(num_recent >= 0, "num_recent", "be at least 0", num_recent)
    require(scores.shape[2] <= MAX_LEN, "scores", f"have at most {MAX_LEN} blocks per request", scores.shape)
    if 0 in scores.shape:
        reqs, heads, _ = scores.shape
        threshold = jnp.full((reqs, heads), -jnp.inf, jnp.float32)
        ids, counts = jnp.zeros(scores.shape, jnp.int32), jnp.zeros((reqs, heads), jnp.int32)
        return SelectedBlocks(threshold, ids, counts)
    scores = forbid_kernel_derivative(scores, "select_top_blocks", "Select blocks by jax.lax.top_k")
    num_selected = min(num_selected, scores.shape[2])
    return SelectedBlocks(
        *kernel.by_platform(
            scores, seq_lens, block_size=block_size, num_selected=num_selected, num_recent=num_recent
        )
    )
