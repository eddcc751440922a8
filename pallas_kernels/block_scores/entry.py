"""block_scores: the most that a product with a key of a cache block can be, for each kv head."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_scores.kernel import ROWS, Shape, score_tiles
from pallas_kernels.checks import require_shape, unsupported
from pallas_kernels.support import DTYPES


def why_not_scores(*, dtype: Any, q_heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Why block_scores has no kernel for some heads; None if it has.

    Args:
        dtype: Of the bounds.
        q_heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Width of a head.
    """
    if jnp.dtype(dtype).name not in DTYPES:
        return f"there is no kernel for bounds of {jnp.dtype(dtype).name}"
    if kv_heads % 8 or ROWS % kv_heads or q_heads > 256:
        return f"there is no kernel for bounds of {kv_heads} kv heads and {q_heads} query heads"
    if head_dim not in (64, 128, 256):
        return f"there is no kernel for bounds of heads of {head_dim}"
    return None


def block_scores(
    query: Float[Array, "reqs q_heads head_dim"],
    low: Float[Array, "blocks kv_heads head_dim"],
    high: Float[Array, "blocks kv_heads head_dim"],
    block_table: Int32[Array, "reqs max_blocks"],
    seq_lens: Int32[Array, " reqs"],
    *,
    block_size: int,
    interpret: Any = None,
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
        ValueError: Shapes disagree.
        NotImplementedError: There is no kernel for these heads; the message says why.
    """
    _, q_heads, head_dim = query.shape
    kv_heads = low.shape[1]
    require_shape("high", high.shape, low.shape, "as low")
    require_shape("low's head_dim", low.shape[2:], (head_dim,), "as query")
    reason = why_not_scores(dtype=low.dtype, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    if reason is not None:
        raise unsupported("block_scores", reason, "Use jattn.sparsity.block_scores")
    max_blocks = block_table.shape[1]
    sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    shape = Shape(**sizes, max_blocks=max_blocks, block_size=block_size)
    bounds = query.astype(low.dtype), low, high
    scores = score_tiles(*bounds, block_table, seq_lens, shape=shape, interpret=interpret)
    return scores[:, :, :max_blocks]
