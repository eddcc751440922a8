"""list_tiles: list the visible tiles of each row of tiles; each tile is described by a code."""

import jax.numpy as jnp
from jaxtyping import Array, UInt

from pallas_kernels.checks import require, require_axes
from pallas_kernels.ptx.list_tiles import list_tiles as kernel
from pallas_kernels.shared.tile_codes import MAX_TILES, ListedTiles


def list_tiles(codes: UInt[Array, "lists tiles"]) -> ListedTiles:
    """Return the visible tiles of each list: first the partial tiles, then the full ones.

    Args:
        codes: Code of each tile, from `encode_tiles`.

    Raises:
        ValueError: If codes does not have two axes, or a list has more than MAX_TILES tiles.
    """
    require_axes(2, codes=codes)
    require(codes.shape[1] <= MAX_TILES, "codes", f"have at most {MAX_TILES} tiles per list", codes.shape)
    if codes.size == 0:
        counts = jnp.zeros(codes.shape[:1], jnp.int32)
        return ListedTiles(entries=jnp.zeros(codes.shape, jnp.int32), num_partial=counts, num_full=counts)
    return kernel.by_platform(codes)
