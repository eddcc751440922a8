"""Slots of tokens in the cache: `block * block_size + offset`; a negative slot is not written."""

from typing import Any

import numpy as np
from jaxtyping import Int32

from jattn.batch.int_arrays import (
    AnyArray,
    IntLike,
    IntTable,
    IntVector,
    as_block_table,
    max_block_id,
    with_namespace,
)
from pallas_kernels.checks import require, require_int, require_positive, require_shape

PAD_SLOT_ID = -1


def gather_blocks(xp: Any, table: Any, rows: Any, positions: Any, tokens_per_block: int) -> tuple[Any, Any]:
    """Return the block id of each position and whether it is valid (row, column and id are in range)."""
    num_rows, num_columns = table.shape
    if table.size == 0:
        broadcast = xp.broadcast_to(positions, xp.broadcast_shapes(rows.shape, positions.shape))
        return xp.zeros_like(broadcast), xp.zeros_like(broadcast, dtype=bool)
    columns = positions // tokens_per_block
    is_inside = (rows >= 0) & (rows < num_rows) & (positions >= 0) & (columns < num_columns)
    blocks = table[xp.where(is_inside, rows, 0), xp.where(is_inside, columns, 0)]
    return blocks, is_inside & (blocks >= 0)


def block_slots(xp: Any, blocks: Any, has_block: Any, offsets: Any, block_size: int) -> Any:
    """Return the slot at an offset of each block; -1 for an invalid block.

    Raises:
        ValueError: If a slot on the host does not fit int32: it would wrap to a negative one.
    """
    if xp is np:
        (limit, rule), largest = max_block_id(block_size), int(np.max(blocks, initial=0, where=has_block))
        require(largest <= limit, "block_table", rule, largest)
    return xp.where(has_block, blocks * block_size + offsets, PAD_SLOT_ID)


def compute_slot_mapping(
    block_table: IntTable, rows: IntVector, positions: IntVector, block_size: int, *, start_idx: IntLike = 0
) -> Int32[AnyArray, " tokens"]:
    """Return the slot of each token.

    Args:
        block_table: Block ids, [reqs, max_blocks]; `block_table[r, i]` holds positions `i * block_size`
            onward of request r. On the host or traced.
        rows: Request index of each token, [tokens].
        positions: Position of each token in its request, [tokens].
        block_size: Number of tokens per block.
        start_idx: First position that gets a slot (`compute_slot_mapping_start_idx`).

    Returns:
        Slots, int32 [tokens]; -1 for a row or position outside the table and for a negative block id.

    Raises:
        ValueError: If arguments do not match, or a slot on the host does not fit int32.

    Source: vLLM `compute_slot_mapping` (V0), `BlockTable.compute_slot_mapping` (V1).
    """
    require_int(block_size=block_size)
    require_positive(block_size=block_size)
    xp, table, row, position, first = with_namespace(
        block_table=as_block_table("block_table", block_table),
        rows=rows,
        positions=positions,
        start_idx=start_idx,
    )
    require_shape("positions", position.shape, row.shape, "one per entry of rows")
    block_size = int(block_size)  # a numpy int would promote to int64
    blocks, is_valid = gather_blocks(xp, table, row, position, block_size)
    return block_slots(xp, blocks, is_valid & (position >= first), position % block_size, block_size)
