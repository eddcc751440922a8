"""Slots: `block * block_size + offset`, where a token's key and value are stored; < 0: nowhere."""

from typing import Any

import numpy as np
from jaxtyping import Int32

from jattn.metadata.host import int_table
from jattn.metadata.namespace import AnyArray, IntLike, IntTable, IntVector, with_namespace
from pallas_kernels.checks import require, require_positive

PAD_SLOT_ID = -1


def gather_blocks(xp: Any, table: Any, rows: Any, positions: Any, tokens_per_block: int) -> tuple[Any, Any]:
    """The block of each position, and whether there is one: no padding row, column or block id."""
    num_rows, num_columns = table.shape
    if table.size == 0:
        nowhere = xp.broadcast_to(positions, xp.broadcast_shapes(rows.shape, positions.shape))
        return xp.zeros_like(nowhere), xp.zeros_like(nowhere, dtype=bool)
    columns = positions // tokens_per_block
    is_inside = (rows >= 0) & (rows < num_rows) & (positions >= 0) & (columns < num_columns)
    blocks = table[xp.where(is_inside, rows, 0), xp.where(is_inside, columns, 0)]
    return blocks, is_inside & (blocks >= 0)


def compute_slot_mapping(
    block_table: IntTable, rows: IntVector, positions: IntVector, block_size: int, *, start_idx: IntLike = 0
) -> Int32[AnyArray, " tokens"]:
    """The slot of each token.

    Args:
        block_table: `block_table[r, i]` holds positions `i * block_size` onward of request r. Host or traced.
        rows: Request of each token.
        positions: Position of each token in its request.
        block_size: Tokens of a block.
        start_idx: Positions before it get no slot (`compute_slot_mapping_start_idx`).

    Returns:
        -1 for a negative row or position, one past the table, or a negative block id.

    Source: vLLM `compute_slot_mapping` (V0), `BlockTable.compute_slot_mapping` (V1).
    """
    require_positive(block_size=block_size)
    xp, table, row, position, first = with_namespace(
        block_table=int_table("block_table", block_table), rows=rows, positions=positions, start_idx=start_idx
    )
    blocks, is_valid = gather_blocks(xp, table, row, position, block_size)
    return xp.where(is_valid & (position >= first), blocks * block_size + position % block_size, PAD_SLOT_ID)


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """First position of a request that V0 wrote: it skipped what a prompt's window will not see again.

    Args:
        is_prompt: False: everything is written.
        query_len: New tokens.
        context_len: Not read; V0 has it.
        sliding_window: Tokens that a query sees, itself included; None = all.

    Source: vLLM V0 `compute_slot_mapping_start_idx`.
    """
    return max(0, query_len - sliding_window) if is_prompt and sliding_window is not None else 0


def fill_slot_mapping_tail(slot_mapping: IntVector, num_actual_tokens: IntLike) -> Int32[AnyArray, " tokens"]:
    """`slot_mapping` with -1 from `num_actual_tokens` on, as a new array.

    Source: vLLM `CommonAttentionMetadata.__post_init__`, which writes in place.
    """
    xp, slots, num_tokens = with_namespace(slot_mapping=slot_mapping, num_actual_tokens=num_actual_tokens)
    return xp.where(xp.arange(slots.shape[0], dtype=np.int32) < num_tokens, slots, PAD_SLOT_ID)


def physical_to_logical_mapping(
    block_table: IntTable, seq_lens: IntVector, block_size: int, total_blocks: int
) -> Int32[AnyArray, "reqs total_blocks"]:
    """Which of a request's blocks each block of the pool is: the block table turned round.

    Args:
        block_table: Blocks of each request; entries past its length are ignored. Host or traced.
        seq_lens: Tokens of each request.
        block_size: Tokens of a block.
        total_blocks: Blocks of the pool.

    Returns:
        -1 for blocks that the request does not use, and for block 0, the null block. A block that stands at
        several places has the last of them.

    Source: vLLM V1 FlexAttention `physical_to_logical_mapping`.
    """
    require_positive(block_size=block_size, total_blocks=total_blocks)
    xp, table, lens = with_namespace(block_table=int_table("block_table", block_table), seq_lens=seq_lens)
    num_reqs, num_columns = table.shape
    require(lens.shape == (num_reqs,), "seq_lens", f"have one entry per request ({num_reqs})", lens.shape)
    logical = xp.broadcast_to(xp.arange(num_columns, dtype=np.int32)[None, :], table.shape)
    is_used = (logical * block_size < lens[:, None]) & (table > 0) & (table < total_blocks)
    rows = xp.broadcast_to(xp.arange(num_reqs, dtype=np.int32)[:, None], table.shape)
    unused = xp.full((num_reqs, total_blocks), -1, dtype=np.int32)
    # Unused entries go to the null block, which stays -1.
    blocks, places = xp.where(is_used, table, 0), xp.where(is_used, logical, -1)
    if xp is np:
        np.maximum.at(unused, (rows, blocks), places)
        return unused
    return unused.at[rows, blocks].max(places)
