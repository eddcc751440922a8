"""block_scores: an upper bound of the scores of each cache block's keys, for each KV head."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels.architectures import ARCHITECTURES, kernel_architecture
from pallas_kernels.block_scores.kernel import BlockScoresDims, score_tiles
from pallas_kernels.checks import (
    forbid_kernel_derivative,
    require,
    require_axes,
    require_positive,
    require_shape,
    unsupported,
)
from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import KERNELS, first_reason, must_be_one_of

MAX_MMA_Q_HEADS = 192  # query heads without wgmma: with 256, the kernel spills registers
KV_HEADS = (8, 16, 32, WARPGROUP_ROWS)  # heads are rows of a tile, which is laid out in groups of 8 rows


def why_not_block_scores(
    *, dtype: DTypeLike, q_heads: int, kv_heads: int, head_dim: int, gpu: str = "9.0"
) -> str | None:
    """Return why block_scores does not support some heads, or None if it does.

    Args:
        dtype: Dtype of the bounds.
        q_heads: Number of query heads.
        kv_heads: Number of KV heads.
        head_dim: Number of elements per head.
        gpu: Compute capability that the kernel is built for.
    """
    kernel = KERNELS["block_scores"]
    has_wgmma, max_q_heads = ARCHITECTURES[gpu].has_wgmma, kernel.maxima["query heads"]
    heads = f"kv_heads={kv_heads} with q_heads={q_heads}"
    reason = first_reason(
        [
            must_be_one_of("block bounds dtype", jnp.dtype(dtype).name, kernel.dtypes),
            must_be_one_of("kv_heads", kv_heads, KV_HEADS, " for block scores"),
            (
                q_heads <= max_q_heads,
                f"q_heads={q_heads} is not supported for block scores; the maximum is {max_q_heads}",
            ),
            (
                has_wgmma or q_heads <= MAX_MMA_Q_HEADS,
                f"q_heads={q_heads} is not supported for block scores on compute capability {gpu}; "
                f"the maximum is {MAX_MMA_Q_HEADS}",
            ),
            must_be_one_of("head_dim", head_dim, kernel.head_dims, " for block scores"),
        ]
    )
    if reason is not None:
        return reason
    if q_heads % kv_heads:
        return f"{heads} is not supported for block scores; q_heads must be a multiple of kv_heads"
    smem_bytes = BlockScoresDims(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, max_blocks=1, block_size=1, gpu=gpu
    ).smem_bytes
    max_smem = ARCHITECTURES[gpu].smem_bytes
    if smem_bytes > max_smem:
        clause = f"{heads} and head_dim={head_dim} is not supported for block scores"
        sizes = f"{smem_bytes >> 10} KB of shared memory, and the GPU has {max_smem >> 10} KB"
        return f"{clause}: it needs {sizes}"
    return None


def block_scores(
    query: Float[Array, "reqs q_heads head_dim"],
    low: Float[Array, "blocks kv_heads head_dim"],
    high: Float[Array, "blocks kv_heads head_dim"],
    block_table: Int32[Array, "reqs max_blocks"],
    seq_lens: Int32[Array, " reqs"],
    *,
    block_size: int,
    interpret: Interpret = None,
) -> Float[Array, "reqs kv_heads max_blocks"]:
    """Return the largest product that any query head of a KV head can have with a block's keys.

    The results are f32 and not scaled.

    Args:
        query: One query token per request.
        low: Minimum of each element over a block's keys.
        high: Maximum of each element over a block's keys.
        block_table: Block ids of each request; entries after a request's last block are never used.
        seq_lens: Number of keys of each request. Results after a request's last block are undefined.
        block_size: Static: keys per block.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Raises:
        ValueError: If shapes or dtypes disagree, or q_heads is not a multiple of kv_heads.
        NotImplementedError: If the kernel does not support these heads, or is differentiated.
    """
    require_axes(3, query=query, low=low, high=high)
    require_axes(2, block_table=block_table)
    require_axes(1, seq_lens=seq_lens)
    reqs, q_heads, head_dim = query.shape
    num_blocks, kv_heads, _ = low.shape
    require_shape("high", high.shape, low.shape, "the shape of low")
    require_shape("low's head_dim", low.shape[2:], (head_dim,), "head_dim of query")
    require_shape("block_table", block_table.shape, (reqs, block_table.shape[1]), "reqs, max_blocks")
    require_shape("seq_lens", seq_lens.shape, (reqs,), "reqs")
    require(
        high.dtype == low.dtype, "high's dtype", f"be {low.dtype.name}, the dtype of low", high.dtype.name
    )
    require_positive(kv_heads=kv_heads, block_size=block_size)
    require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
    gpu = kernel_architecture(low)
    reason = why_not_block_scores(
        dtype=low.dtype, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, gpu=gpu
    )
    if reason is not None:
        raise unsupported("block_scores", reason, "Use jattn.sparsity.block_scores")
    max_blocks = block_table.shape[1]
    if not (reqs and max_blocks and num_blocks):
        return jnp.zeros((reqs, kv_heads, max_blocks), jnp.float32)
    dims = BlockScoresDims(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_blocks=max_blocks,
        block_size=block_size,
        gpu=gpu,
    )
    arrays = query.astype(low.dtype), low, high
    query, low, high = forbid_kernel_derivative(arrays, "block_scores", "Use jattn.sparsity.block_scores")
    scores = score_tiles(query, low, high, block_table, seq_lens, dims=dims, interpret=interpret)
    return scores[:, :, :max_blocks]
