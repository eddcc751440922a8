"""Slots: `block * block_size + offset`, where a token's key and value are stored; < 0: nowhere."""

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
    """The block of each position, and whether there is one: no padding row, column or block id."""
    num_rows, num_columns = table.shape
    if table.size == 0:
        nowhere = xp.broadcast_to(positions, xp.broadcast_shapes(rows.shape, positions.shape))
        return xp.zeros_like(nowhere), xp.zeros_like(nowhere, dtype=bool)
    columns = positions // tokens_per_block
    is_inside = (rows >= 0) & (rows < num_rows) & (positions >= 0) & (columns < num_columns)
    blocks = table[xp.where(is_inside, rows, 0), xp.where(is_inside, columns, 0)]
    return blocks, is_inside & (blocks >= 0)


def block_slots(xp: Any, blocks: Any, has_block: Any, offsets: Any, block_size: int) -> Any:
    """The slot at an offset of each block; -1 where there is none.

    Raises:
        ValueError: A slot is seen to be beyond int32: it would wrap to a negative one, which nobody writes.
    """
    if xp is np:
        (limit, rule), largest = max_block_id(block_size), int(np.max(blocks, initial=0, where=has_block))
        require(largest <= limit, "block_table", rule, largest)
    return xp.where(has_block, blocks * block_size + offsets, PAD_SLOT_ID)


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

    Raises:
        ValueError: Arguments disagree, or, on the host, a slot is beyond int32.

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
    require_shape("positions", position.shape, row.shape, "one for each of rows")
    block_size = int(block_size)  # numpy's own would make int64s
    blocks, is_valid = gather_blocks(xp, table, row, position, block_size)
    return block_slots(xp, blocks, is_valid & (position >= first), position % block_size, block_size)
