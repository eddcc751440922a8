"""Local-strided patterns as arrays of blocks: who sees whom."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from jattn.batch.host_arrays import plain_ints
from jattn.batch.namespace import AnyArray, IntVector, with_namespace
from jattn.masks.local_strided import LocalStrided
from pallas_kernels.checks import require, require_positive


class CrowCol(NamedTuple):
    """Rows compressed: row r of a matrix has its nonzeros in columns `col[crow[r]:crow[r + 1]]`."""

    crow: Int32[np.ndarray, "*heads rows+1"]
    col: Int32[np.ndarray, "*heads nonzeros"]


def prefill_block_pattern(
    sparsity: LocalStrided, num_q_heads: int, num_kv_heads: int, num_blocks: int
) -> Bool[np.ndarray, "q_heads q_blocks k_blocks"]:
    """Which blocks of keys the queries of each block see; inside the diagonal block causality still holds.

    Args:
        sparsity: The pattern. Blocks are counted from position 0 of the request.
        num_q_heads: Query heads of this device.
        num_kv_heads: Key/value heads of this device.
        num_blocks: Sparse blocks of the request.

    Returns:
        A row is empty where no block qualifies, which only `local_blocks == 0` permits.

    Source: vLLM `get_sparse_attn_mask`.
    """
    (num_blocks,) = plain_ints(num_blocks=num_blocks)
    require_positive(num_blocks=num_blocks)
    shifts = _head_shifts(sparsity, num_q_heads, num_kv_heads, is_prefill=True)[:, None, None]
    q_block, k_block = np.arange(num_blocks)[None, :, None], np.arange(num_blocks)[None, None, :]
    is_local = q_block - k_block < sparsity.local_blocks
    is_stripe = (k_block + shifts + 1) % sparsity.vert_stride == 0
    return (k_block <= q_block) & (is_local | is_stripe)


def decode_block_pattern(
    sparsity: LocalStrided, num_q_heads: int, num_kv_heads: int, seq_lens: IntVector, num_blocks: int
) -> Bool[AnyArray, "reqs q_heads k_blocks"]:
    """Which blocks of keys the last token of each request sees.

    Args:
        sparsity: The pattern.
        num_q_heads: Query heads of this device.
        num_kv_heads: Key/value heads of this device.
        seq_lens: Tokens of each request; 0 sees nothing. Host or traced.
        num_blocks: Static. Sparse blocks of the longest request.

    Source: vLLM `paged_attention_v1`, `paged_attention_v2` with block sparsity.
    """
    (num_blocks,) = plain_ints(num_blocks=num_blocks)
    require_positive(num_blocks=num_blocks)
    xp, lens = with_namespace(seq_lens)
    shifts = _head_shifts(sparsity, num_q_heads, num_kv_heads, is_prefill=False)[:, None]
    is_stripe = xp.asarray((np.arange(num_blocks)[None, :] + shifts + 1) % sparsity.vert_stride == 0)
    # Floor division: a request of length 0 stands in block -1.
    distance = ((lens - 1) // sparsity.block_size)[:, None] - xp.arange(num_blocks, dtype=np.int32)[None, :]
    is_local = (distance < sparsity.local_blocks)[:, None, :]
    return (distance >= 0)[:, None, :] & (is_local | is_stripe[None])


def dense_to_crow_col(x: np.ndarray | list) -> CrowCol:
    """A matrix, or one per head, in compressed rows.

    Args:
        x: [rows, columns] or [heads, rows, columns]; anything but 0 counts. Host.

    Returns:
        int32. With heads, `col` is padded on the right with -1 to the longest head.

    Raises:
        ValueError: x has neither 2 nor 3 axes.

    Source: vLLM `dense_to_crow_col`.
    """
    dense = np.asarray(x) != 0
    require(dense.ndim in (2, 3), "x", "have 2 or 3 axes", dense.shape)
    heads = dense if dense.ndim == 3 else dense[None]
    counts = heads.sum(axis=-1)
    crow = np.zeros((len(heads), heads.shape[1] + 1), np.int32)
    crow[:, 1:] = np.cumsum(counts, axis=-1)
    col = np.full((len(heads), max(crow[:, -1], default=0)), -1, np.int32)
    for head, matrix in enumerate(heads):
        col[head, : crow[head, -1]] = np.nonzero(matrix)[1]
    return CrowCol(crow[0], col[0]) if dense.ndim == 2 else CrowCol(crow, col)


def _head_shifts(
    sparsity: LocalStrided, num_q_heads: int, num_kv_heads: int, *, is_prefill: bool
) -> np.ndarray:
    num_q_heads, num_kv_heads = plain_ints(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    require_positive(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    rule = f"be a multiple of num_kv_heads ({num_kv_heads})"
    require(num_q_heads % num_kv_heads == 0, "num_q_heads", rule, num_q_heads)
    shift = lambda head: sparsity.head_shifts(head, num_q_heads, num_kv_heads, is_prefill=is_prefill)
    return np.asarray([shift(head) for head in range(num_q_heads)])
