"""Coverage of the tiles of a batch: the input from which lists of tiles and of blocks are made."""

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
    alignment_offset: Int32[Array, " q_tiles"] | None = None,
    is_prefill: bool = True,
    is_inside_blocks: bool = False,
    pack_gqa: int = 1,
) -> Coverage:
    """Return the coverage of all tiles, bool [q_tiles, q_heads / pack_gqa, max_kv_tiles].

    Tiles without pairs are EMPTY.

    Args:
        mask: Complete mask of the layer, including causality.
        rows: Batch row of each query tile.
        first_query: Position of the first query of each query tile.
        num_queries: Number of queries of each query tile.
        seq_lens: Number of keys of the request of each query tile.
        num_heads: Static: number of query heads and kv heads.
        size: Static: number of queries and keys per tile.
        max_kv_tiles: Static: number of key tiles of the longest request.
        alignment_offset: Number of positions by which the first key tile starts before the first key; None =
            0.
        is_prefill: Static: whether the queries are in the prefill region.
        is_inside_blocks: Static: whether no tile crosses a block boundary of the mask.
        pack_gqa: Static: number of consecutive query heads per tile, which share the mask.
    """
    shape = rows.shape[0], num_heads[0] // pack_gqa, max_kv_tiles

    def per_tile(x: Array) -> Array:
        return x[:, None, None]

    # A numpy constant: XLA folds what depends on constants only, instead of running a kernel in every call.
    first_key: Any = (np.arange(max_kv_tiles, dtype=np.int32) * size[1])[None, None, :]
    if alignment_offset is not None:
        first_key = first_key - per_tile(alignment_offset)
    last_key = jnp.minimum(first_key + (size[1] - 1), per_tile(seq_lens) - 1)
    first_key = jnp.maximum(first_key, 0)
    has_pairs = (last_key >= first_key) & per_tile(num_queries > 0)
    tiles = Tiles(
        head=np.arange(0, num_heads[0], pack_gqa, dtype=np.int32)[None, :, None],
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
    any_visible = jnp.broadcast_to(any_visible & has_pairs, shape)
    return Coverage(any_visible, jnp.broadcast_to(all_visible, shape) & any_visible)
