"""vLLM's block-sparse (local-strided) patterns and its virtual batches for chunked-local attention."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from jattn.batch.int_arrays import (
    AnyArray,
    IntTable,
    IntVector,
    as_block_table,
    python_ints,
    require_one_per_request,
    start_locs,
    with_namespace,
)
from jattn.masks.local_strided import LocalStrided
from pallas_kernels.checks import require, require_positive


class CrowCol(NamedTuple):
    """Matrix in compressed sparse row format: row r has nonzeros in columns `col[crow[r]:crow[r + 1]]`."""

    crow: Int32[np.ndarray, "*heads rows+1"]
    col: Int32[np.ndarray, "*heads nonzeros"]


def prefill_block_pattern(
    sparsity: LocalStrided, num_q_heads: int, num_kv_heads: int, num_blocks: int
) -> Bool[np.ndarray, "q_heads q_blocks k_blocks"]:
    """Return which key blocks each query block attends to. Within the diagonal block attention is causal.

    Args:
        sparsity: Local-strided pattern. Blocks are counted from position 0 of the request.
        num_q_heads: Number of query heads of this device.
        num_kv_heads: Number of key/value heads of this device.
        num_blocks: Number of sparse blocks of the request.

    Returns:
        The pattern. A query block can be without key blocks only if `local_blocks == 0`.

    Raises:
        ValueError: If a size is not a positive int, or `num_q_heads` is not a multiple of `num_kv_heads`.

    Source: vLLM `get_sparse_attn_mask`.
    """
    (num_blocks,) = python_ints(num_blocks=num_blocks)
    require_positive(num_blocks=num_blocks)
    shifts = _head_shifts(sparsity, num_q_heads, num_kv_heads, is_prefill=True)[:, None, None]
    q_block, k_block = np.arange(num_blocks)[None, :, None], np.arange(num_blocks)[None, None, :]
    is_local = q_block - k_block < sparsity.local_blocks
    is_stripe = (k_block + shifts + 1) % sparsity.vert_stride == 0
    return (k_block <= q_block) & (is_local | is_stripe)


def decode_block_pattern(
    sparsity: LocalStrided, num_q_heads: int, num_kv_heads: int, seq_lens: IntVector, num_blocks: int
) -> Bool[AnyArray, "reqs q_heads k_blocks"]:
    """Return which key blocks the last token of each request attends to.

    Args:
        sparsity: Local-strided pattern.
        num_q_heads: Number of query heads of this device.
        num_kv_heads: Number of key/value heads of this device.
        seq_lens: Number of tokens of each request; a request of length 0 attends to no block. Host or traced.
        num_blocks: Number of sparse blocks of the longest request. Static.

    Raises:
        ValueError: If a size is not a positive int, or `num_q_heads` is not a multiple of `num_kv_heads`.

    Source: vLLM `paged_attention_v1`, `paged_attention_v2` with block sparsity.
    """
    (num_blocks,) = python_ints(num_blocks=num_blocks)
    require_positive(num_blocks=num_blocks)
    xp, lens = with_namespace(seq_lens)
    shifts = _head_shifts(sparsity, num_q_heads, num_kv_heads, is_prefill=False)[:, None]
    is_stripe = xp.asarray((np.arange(num_blocks)[None, :] + shifts + 1) % sparsity.vert_stride == 0)
    # Floor division puts a request of length 0 into block -1, which attends to no block.
    distance = ((lens - 1) // sparsity.block_size)[:, None] - xp.arange(num_blocks, dtype=np.int32)[None, :]
    is_local = (distance < sparsity.local_blocks)[:, None, :]
    return (distance >= 0)[:, None, :] & (is_local | is_stripe[None])


def dense_to_crow_col(x: np.ndarray | list) -> CrowCol:
    """Convert a matrix, or one matrix per head, to compressed sparse rows.

    Args:
        x: Matrix [rows, columns] or [heads, rows, columns]; every nonzero value counts. Host.

    Returns:
        int32 arrays. With heads, `col` is padded on the right with -1 to the head with the most nonzeros.

    Raises:
        ValueError: If `x` has neither 2 nor 3 axes.

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
    num_q_heads, num_kv_heads = python_ints(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    require_positive(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    rule = f"be a multiple of num_kv_heads ({num_kv_heads})"
    require(num_q_heads % num_kv_heads == 0, "num_q_heads", rule, num_q_heads)
    shifts = [
        sparsity.head_shifts(head, num_q_heads, num_kv_heads, is_prefill=is_prefill)
        for head in range(num_q_heads)
    ]
    return np.asarray(shifts)


class LocalVirtualBatches(NamedTuple):
    """Virtual requests whose causal attention equals chunked-local attention of the original batch.

    Attributes:
        q_lens: Number of new tokens of each virtual request. The tokens keep the order of the batch.
        cu_seqlens_q: Index of the first token of each virtual request, and one past the last token.
        k_lens: Number of keys of each virtual request, from the start of its chunk to its last new token.
        block_table_local: Block ids of each virtual request's chunk. Entries past
            `ceil(k_lens / block_size)` are arbitrary.
    """

    q_lens: Int32[AnyArray, " virtual"]
    cu_seqlens_q: Int32[AnyArray, " virtual+1"]
    k_lens: Int32[AnyArray, " virtual"]
    block_table_local: Int[AnyArray, "virtual chunk_blocks"]


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc_np: IntVector,
    seq_lens_np: IntVector,
    block_table: IntTable,
    block_size: int,
) -> LocalVirtualBatches:
    """Split each request at the multiples of `attn_chunk_size` into virtual requests. Host only.

    A request without new tokens yields no virtual request (vLLM assumes that there are no such requests).

    Args:
        attn_chunk_size: Number of positions per chunk; a multiple of `block_size`.
        query_start_loc_np: Index of the first token of each request, and one past the last token.
        seq_lens_np: Total number of tokens of each request, including the new ones.
        block_table: Block ids of each request. Columns past the last one are read as the last one.
        block_size: Number of tokens per block.

    Raises:
        ValueError: If `attn_chunk_size` is not a multiple of `block_size`, or the arrays differ in the number
            of requests.

    Source: vLLM `make_local_attention_virtual_batches`.
    """
    _, starts, total_lens, table = with_namespace(
        query_start_loc_np=query_start_loc_np,
        seq_lens_np=seq_lens_np,
        block_table=as_block_table("block_table", block_table),
    )
    attn_chunk_size, block_size = _check_chunk_sizes(attn_chunk_size, block_size)
    _check_rows(starts, total_lens, table, "query_start_loc_np", "seq_lens_np")
    num_virtual = int(_chunks_touched(np.diff(starts), total_lens, attn_chunk_size).sum())
    return _virtual_batches(np, attn_chunk_size, starts, total_lens, table, block_size, num_virtual)


def make_padded_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc: IntVector,
    seq_lens: IntVector,
    block_table: IntTable,
    block_size: int,
    *,
    max_virtual_batches: int,
) -> LocalVirtualBatches:
    """Compute `make_local_attention_virtual_batches` with a static number of rows, so that it can be traced.

    Args:
        attn_chunk_size: Number of positions per chunk; a multiple of `block_size`. Static.
        query_start_loc: Index of the first token of each request, and one past the last token. Host or
            traced.
        seq_lens: Total number of tokens of each request; padding rows have no new tokens.
        block_table: Block ids of each request.
        block_size: Number of tokens per block. Static.
        max_virtual_batches: Number of rows of the result. `max_local_attention_virtual_batches` is always
            enough; further virtual requests are dropped. Static.

    Returns:
        The virtual requests. Rows past the last one have q_len 0 and k_len 0, and cu_seqlens_q repeats its
        last value.

    Raises:
        ValueError: If `attn_chunk_size` is not a multiple of `block_size`, or the arrays differ in the number
            of requests.

    Source: vLLM `make_local_attention_virtual_batches`, under graphs.
    """
    xp, starts, total_lens, table = with_namespace(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=as_block_table("block_table", block_table),
    )
    attn_chunk_size, block_size = _check_chunk_sizes(attn_chunk_size, block_size)
    (max_virtual_batches,) = python_ints(max_virtual_batches=max_virtual_batches)
    _check_rows(starts, total_lens, table, "query_start_loc", "seq_lens")
    return _virtual_batches(xp, attn_chunk_size, starts, total_lens, table, block_size, max_virtual_batches)


def max_local_attention_virtual_batches(attn_chunk_size: int, max_num_seqs: int, num_tokens: int) -> int:
    """Return the maximum number of virtual requests of `num_tokens` new tokens in `max_num_seqs` requests.

    Two tokens of a request can lie in two chunks; after those, every `attn_chunk_size` tokens add one more.

    Args:
        attn_chunk_size: Number of positions per chunk.
        max_num_seqs: Maximum number of requests.
        num_tokens: Maximum number of new tokens.

    Raises:
        ValueError: If an argument is not an int, or `attn_chunk_size` is not positive.

    Source: vLLM `max_local_attention_virtual_batches`; this is the smallest possible bound.
    """
    attn_chunk_size, max_num_seqs, num_tokens = python_ints(
        attn_chunk_size=attn_chunk_size, max_num_seqs=max_num_seqs, num_tokens=num_tokens
    )
    require_positive(attn_chunk_size=attn_chunk_size)
    in_pairs = min(num_tokens, 2 * max_num_seqs)
    return in_pairs + (num_tokens - in_pairs) // attn_chunk_size


def _check_chunk_sizes(attn_chunk_size: int, block_size: int) -> tuple[int, ...]:
    attn_chunk_size, block_size = python_ints(attn_chunk_size=attn_chunk_size, block_size=block_size)
    require_positive(attn_chunk_size=attn_chunk_size, block_size=block_size)
    rule = f"be a multiple of block_size ({block_size})"
    require(attn_chunk_size % block_size == 0, "attn_chunk_size", rule, attn_chunk_size)
    return attn_chunk_size, block_size


def _check_rows(query_start_loc: Any, seq_lens: Any, table: Any, starts_name: str, lens_name: str) -> None:
    """Require arrays of the same number of requests; the block table may have unused rows at the end."""
    require_one_per_request(**{lens_name: seq_lens})
    num_reqs = seq_lens.shape[0]
    shape = query_start_loc.shape
    require(shape == (num_reqs + 1,), starts_name, f"have {num_reqs + 1} entries", shape)
    require(table.shape[0] >= num_reqs, "block_table", f"have {num_reqs} rows", f"shape {table.shape}")
    if isinstance(query_start_loc, np.ndarray) and isinstance(seq_lens, np.ndarray):
        query_lens = np.diff(query_start_loc)
        rule = f"include the new tokens (be at least {query_lens.tolist()})"
        require(not (query_lens > seq_lens).any(), lens_name, rule, seq_lens.tolist())


def _chunks_touched(query_lens: Any, seq_lens: Any, attn_chunk_size: int) -> Any:
    end_chunks = (seq_lens + attn_chunk_size - 1) // attn_chunk_size
    first_chunks = (seq_lens - query_lens) // attn_chunk_size
    return (end_chunks - first_chunks) * (query_lens > 0).astype(np.int32)


def _virtual_batches(
    xp: Any,
    attn_chunk_size: int,
    query_start_loc: Any,
    seq_lens: Any,
    table: Any,
    block_size: int,
    num_virtual: int,
) -> LocalVirtualBatches:
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    num_chunks = _chunks_touched(query_lens, seq_lens, attn_chunk_size)
    num_columns = attn_chunk_size // block_size
    if seq_lens.shape[0] == 0 or num_virtual == 0:
        zeros = xp.zeros(num_virtual, np.int32)
        return LocalVirtualBatches(
            zeros, start_locs(xp, zeros), zeros, xp.zeros((num_virtual, num_columns), np.int32)
        )
    require(table.shape[1] > 0, "block_table", "have at least one column", f"shape {table.shape}")
    ends = xp.cumsum(num_chunks)
    virtual = xp.arange(num_virtual, dtype=np.int32)
    rows = xp.minimum(xp.searchsorted(ends, virtual, side="right"), seq_lens.shape[0] - 1)
    is_valid = virtual < ends[-1]

    context = (seq_lens - query_lens)[rows]
    chunk_start = (context // attn_chunk_size + virtual - (ends - num_chunks)[rows]) * attn_chunk_size
    last = xp.minimum(chunk_start + attn_chunk_size, seq_lens[rows])
    q_lens = xp.where(is_valid, last - xp.maximum(chunk_start, context), 0).astype(np.int32)
    k_lens = xp.where(is_valid, last - chunk_start, 0).astype(np.int32)
    columns = (chunk_start // block_size)[:, None] + xp.arange(num_columns, dtype=np.int32)[None, :]
    block_table_local = table[rows[:, None], xp.clip(columns, 0, table.shape[1] - 1)]
    return LocalVirtualBatches(q_lens, start_locs(xp, q_lens), k_lens, block_table_local)
