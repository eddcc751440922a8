"""block_scores: the most that a product with a key of a cache block can be, for each kv head."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_scores.kernel import MAX_SMEM, ROWS, Shape, score_tiles
from pallas_kernels.checks import require, require_axes, require_positive, require_shape, unsupported
from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import DTYPES

KV_HEADS = (8, 16, 32, ROWS)  # a row of a tile is a head; 8 rows are what is laid out as one
MAX_Q_HEADS = 256
HEAD_DIMS = (64, 128, 256)


def why_not_block_scores(*, dtype: DTypeLike, q_heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Why block_scores has no kernel for some heads; None if it has.

    Args:
        dtype: Of the bounds.
        q_heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Width of a head.
    """
    if jnp.dtype(dtype).name not in DTYPES:
        return f"there is no kernel for bounds of {jnp.dtype(dtype).name}"
    if kv_heads not in KV_HEADS or q_heads % kv_heads or q_heads > MAX_Q_HEADS:
        few = f"{', '.join(map(str, KV_HEADS))} kv heads and up to {MAX_Q_HEADS} query heads have one"
        return f"there is no kernel for bounds of {kv_heads} kv heads and {q_heads} query heads ({few})"
    if head_dim not in HEAD_DIMS:
        few = f"{', '.join(map(str, HEAD_DIMS))} have one"
        return f"there is no kernel for bounds of heads of {head_dim} ({few})"
    sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    needed = Shape(**sizes, max_blocks=1, block_size=1).smem_bytes
    if needed > MAX_SMEM:
        heads = f"{kv_heads} kv heads and {q_heads} query heads of {head_dim}"
        few = f"they need {needed >> 10} KB of shared memory, and a GPU has {MAX_SMEM >> 10} KB"
        return f"there is no kernel for bounds of {heads} ({few})"
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
    """No query head of a kv head has a larger product with a key between a block's bounds; unscaled, f32.

    Args:
        query: One query of each request.
        low: Least value of each element of a block's keys.
        high: The largest.
        block_table: Entries past a request's blocks are never used.
        seq_lens: Keys of each request; the results behind their blocks are garbage.
        block_size: Static: keys of a block.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Raises:
        ValueError: Shapes or dtypes disagree, or query heads are no multiple of kv heads.
        NotImplementedError: There is no kernel for these heads, or it is differentiated.
    """
    require_axes(3, query=query, low=low, high=high)
    require_axes(2, block_table=block_table)
    require_axes(1, seq_lens=seq_lens)
    reqs, q_heads, head_dim = query.shape
    num_blocks, kv_heads, _ = low.shape
    require_shape("high", high.shape, low.shape, "as low")
    require_shape("low's head_dim", low.shape[2:], (head_dim,), "as query")
    require_shape("block_table", block_table.shape, (reqs, block_table.shape[1]), "reqs, max_blocks")
    require_shape("seq_lens", seq_lens.shape, (reqs,), "reqs")
    require(high.dtype == low.dtype, "high's dtype", f"be {low.dtype.name}, as low", high.dtype.name)
    require_positive(kv_heads=kv_heads, block_size=block_size)
    require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
    reason = why_not_block_scores(dtype=low.dtype, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    if reason is not None:
        raise unsupported("block_scores", reason, "Use jattn.sparsity.block_scores")
    max_blocks = block_table.shape[1]
    if not (reqs and max_blocks and num_blocks):
        return jnp.zeros((reqs, kv_heads, max_blocks), jnp.float32)
    sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    shape = Shape(**sizes, max_blocks=max_blocks, block_size=block_size)
    bounds = query.astype(low.dtype), low, high
    bounds = forbid_kernel_derivative(bounds, "block_scores", "Use jattn.sparsity.block_scores")
    scores = score_tiles(*bounds, block_table, seq_lens, shape=shape, interpret=interpret)
    return scores[:, :, :max_blocks]
