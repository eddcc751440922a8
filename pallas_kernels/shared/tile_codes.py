"""Codes that say which tiles of scores are visible, and the entries of the lists built from them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt

VISIBLE_BIT, FULL_BIT, QUERY_BLOCK_BIT = 0, 1, 2  # bits of a code; one bit per query block from the last on
QUERY_BLOCK_SHIFT = 20  # an entry holds a tile index below this bit and one bit per query block from it on
MAX_QUERY_BLOCKS = 10  # query blocks that the bits of an entry distinguish
MAX_TILES = 2**16 - 1  # tiles per list


class ListedTiles(NamedTuple):
    """The tiles that each list visits.

    Attributes:
        entries: Partly visible tiles in descending order, then fully visible tiles in ascending order. An
            entry is the tile index and, from bit QUERY_BLOCK_SHIFT on, the query-block bits of the tile's
            code. Entries after the listed tiles are arbitrary.
        num_partial: Number of partly visible tiles of each list.
        num_full: Number of fully visible tiles of each list.
    """

    entries: Int32[Array, "lists tiles"]
    num_partial: Int32[Array, " lists"]
    num_full: Int32[Array, " lists"]


def encode_tiles(
    is_visible: Bool[Array, "*lists tiles"],
    is_full: Bool[Array, "*lists tiles"],
    query_blocks: Sequence[Array] = (),
) -> UInt[Array, "*lists tiles"]:
    """Return the code of each tile, in 8 or 16 bits.

    Args:
        is_visible: Whether any query-key pair of the tile is visible.
        is_full: Whether all query-key pairs of the tile are visible; ignored for tiles without a visible
            pair.
        query_blocks: For each query block of the list, whether it attends to the tile; at most
            MAX_QUERY_BLOCKS. Empty if the blocks are not distinguished. In decode, each query head of the
            group is one query block.
    """
    assert len(query_blocks) <= MAX_QUERY_BLOCKS
    dtype = jnp.uint8 if len(query_blocks) <= 8 - QUERY_BLOCK_BIT else jnp.uint16
    code = (is_visible.astype(dtype) << VISIBLE_BIT) | ((is_visible & is_full).astype(dtype) << FULL_BIT)
    for bit, attends in enumerate(query_blocks, QUERY_BLOCK_BIT):
        code = code | (attends.astype(dtype) << bit)
    return code
