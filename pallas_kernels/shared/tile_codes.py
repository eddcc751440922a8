"""What is known of a tile before it is listed, as one number, and what a list says of it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt

VISIBLE_BIT, FULL_BIT, QUERY_BLOCK_BIT = 0, 1, 2  # bits of a code
QUERY_BLOCK_SHIFT = 20  # an entry: the tile's number below, above it one bit for each block of queries
MAX_QUERY_BLOCKS = 10  # that the bits of an entry tell apart
MAX_TILES = 2**16 - 1  # of a list


class ListedTiles(NamedTuple):
    """Which tiles each list names.

    Attributes:
        entries: Tiles seen in part, the last one first, then those seen whole, in order. A tile is its number
            and, from bit QUERY_BLOCK_SHIFT on, the blocks of queries that its code has. What follows is
            garbage.
        num_partial: Tiles of each list that are seen in part.
        num_full: Tiles that are seen whole.
    """

    entries: Int32[Array, "lists tiles"]
    num_partial: Int32[Array, " lists"]
    num_full: Int32[Array, " lists"]


def encode_tiles(
    some: Bool[Array, "*lists tiles"],
    every: Bool[Array, "*lists tiles"],
    query_blocks: Sequence[Array] = (),
) -> UInt[Array, "*lists tiles"]:
    """A number for each tile, in 8 or 16 bits.

    Args:
        some: Whether some pair of the tile is seen.
        every: Whether all are; of no meaning where none is.
        query_blocks: Whether each of the list's blocks of queries sees it, if they are told apart; at most
            MAX_QUERY_BLOCKS. In decode a query head is a block.
    """
    assert len(query_blocks) <= MAX_QUERY_BLOCKS
    dtype = jnp.uint8 if len(query_blocks) <= 8 - QUERY_BLOCK_BIT else jnp.uint16
    code = (some.astype(dtype) << VISIBLE_BIT) | ((some & every).astype(dtype) << FULL_BIT)
    for nth, visible in enumerate(query_blocks, QUERY_BLOCK_BIT):
        code = code | (visible.astype(dtype) << nth)
    return code
