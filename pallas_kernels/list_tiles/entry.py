"""list_tiles: from a number for each tile to the lists of those that are seen."""

import jax.numpy as jnp
from jaxtyping import Array, UInt

from pallas_kernels.checks import require, require_axes
from pallas_kernels.ptx.list_tiles import list_tiles as kernel
from pallas_kernels.shared.tile_codes import MAX_TILES, ListedTiles


def list_tiles(codes: UInt[Array, "lists tiles"]) -> ListedTiles:
    """List the visible tiles of each list, the partly visible ones first.

    Args:
        codes: encode_tiles's.

    Raises:
        ValueError: There are other axes, or a list has more tiles than are counted.
    """
    require_axes(2, codes=codes)
    require(codes.shape[1] <= MAX_TILES, "codes", f"have at most {MAX_TILES} tiles a list", codes.shape)
    if codes.size == 0:
        none = jnp.zeros(codes.shape[:1], jnp.int32)
        return ListedTiles(entries=jnp.zeros(codes.shape, jnp.int32), num_partial=none, num_full=none)
    return kernel.by_platform(codes)
