"""How much of each tile of pairs a mask lets see: what lists of tiles and of blocks are made from."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jattn.masks.base import Mask
from jattn.masks.pairs import Coverage, Tiles


def tile_coverage(
    mask: Mask,
    *,
    rows: Int32[Array, " q_tiles"],
    first_query: Int32[Array, " q_tiles"],
    num_queries: Int32[Array, " q_tiles"],
    seq_lens: Int32[Array, " q_tiles"],
    num_heads: tuple[int, int],
    size: tuple[int, int],
    max_kv_tiles: int,
    skew: Int32[Array, " q_tiles"] | None = None,
    is_prefill: bool = True,
    is_inside_blocks: bool = False,
) -> Coverage:
    """How much of each tile each head sees: Bool [q_tiles, q_heads, max_kv_tiles]. Empty tiles: nothing.

    Args:
        mask: The whole mask.
        rows: Row of the batch of each tile of queries.
        first_query: Position of its first query.
        num_queries: Its queries.
        seq_lens: Keys of its request.
        num_heads: Static: query heads and kv heads.
        size: Static: queries and keys of a tile.
        max_kv_tiles: Static: tiles of keys of the longest request.
        skew: By how many positions the first tile of keys begins before the first key; 0 when None.
        is_prefill: Static: whether the queries stand in the prefill region.
        is_inside_blocks: Static: whether no tile crosses an edge of the mask's blocks.
    """
    shape = rows.shape[0], num_heads[0], max_kv_tiles
    per_tile = lambda x: x[:, None, None]
    # numpy's: what follows from constants alone XLA computes when it compiles, not in a kernel of every call.
    first_key: Any = (np.arange(max_kv_tiles, dtype=np.int32) * size[1])[None, None, :]
    if skew is not None:
        first_key = first_key - per_tile(skew)
    last_key = jnp.minimum(first_key + (size[1] - 1), per_tile(seq_lens) - 1)
    first_key = jnp.maximum(first_key, 0)
    is_real = (last_key >= first_key) & per_tile(num_queries > 0)
    tiles = Tiles(
        head=np.arange(num_heads[0], dtype=np.int32)[None, :, None],
        row=per_tile(rows),
        first_query=per_tile(first_query),
        last_query=per_tile(first_query + jnp.maximum(num_queries, 1) - 1),
        first_key=first_key,
        last_key=jnp.maximum(last_key, first_key),
        num_heads=num_heads,
        size=(1, 1) if is_inside_blocks else size,
        is_prefill=is_prefill,
    )
    any_visible, all_visible = mask.coverage(tiles)
    any_visible = jnp.broadcast_to(any_visible & is_real, shape)
    return Coverage(any_visible, jnp.broadcast_to(all_visible, shape) & any_visible)
