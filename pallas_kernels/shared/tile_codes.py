"""Codes that pack the visibility of tiles of scores into bits, and the lists of tiles built from them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt

VISIBLE_BIT, FULL_BIT, QUERY_BLOCK_BIT = 0, 1, 2  # bits of a code; query block n has bit QUERY_BLOCK_BIT + n
QUERY_BLOCK_SHIFT = 20  # an entry holds a tile index below this bit and one bit per query block from it on
MAX_QUERY_BLOCKS = 10  # query blocks that the bits of an entry distinguish
MAX_TILES = 2**16 - 1  # tiles per list


class ListedTiles(NamedTuple):
    """Lists of tiles, each with the tiles that one query tile visits.

    Attributes:
        entries: Partial tiles in descending order, then full tiles in ascending order. An
            entry is the tile index and, from bit QUERY_BLOCK_SHIFT on, the query-block bits of the tile's
            code. Entries after the listed tiles are arbitrary.
        num_partial: Number of partial tiles of each list.
        num_full: Number of full tiles of each list.
    """

    entries: Int32[Array, "lists tiles"]
    num_partial: Int32[Array, " lists"]
    num_full: Int32[Array, " lists"]


def encode_tiles(
    is_visible: Bool[Array, "*lists tiles"],
    is_full: Bool[Array, "*lists tiles"],
    query_blocks: Sequence[Array] = (),
) -> UInt[Array, "*lists tiles"]:
    """Pack the visibility of each tile into bits: VISIBLE_BIT, FULL_BIT, then one bit per query block.

    The bits of the query blocks start at QUERY_BLOCK_BIT. The result is uint8, or uint16 for more than six
    query blocks.

    Args:
        is_visible: Whether any query-key pair of the tile is visible.
        is_full: Whether all query-key pairs of the tile are visible; ignored for tiles without a visible
            pair.
        query_blocks: One array like is_visible per query block that visits the same list of tiles: whether
            that block attends to the tile. At most MAX_QUERY_BLOCKS; empty if the blocks are not
            distinguished. In decode, each query head of the group is one query block.
    """
    assert len(query_blocks) <= MAX_QUERY_BLOCKS
    dtype = jnp.uint8 if len(query_blocks) <= 8 - QUERY_BLOCK_BIT else jnp.uint16
    code = (is_visible.astype(dtype) << VISIBLE_BIT) | ((is_visible & is_full).astype(dtype) << FULL_BIT)
    for bit, attends in enumerate(query_blocks, QUERY_BLOCK_BIT):
        code = code | (attends.astype(dtype) << bit)
    return code
