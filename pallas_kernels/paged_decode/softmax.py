"""The online softmax over a request's tiles of keys, in powers of 2."""

import jax.numpy as jnp

from pallas_kernels.paged_decode.products import Products
from pallas_kernels.shared.types import Columns, Tile

# f16 probabilities go up to 2 ** 14, not 1: small ones, and small scales, would lose bits as subnormals.
HEADROOM = 14
SMALLEST_SCALE = 2.0**-60


def online_softmax(
    s: Tile, weight: Tile | None, top: Columns | Tile, total: Tile, products: Products
) -> tuple[Tile, Columns | Tile, Columns | Tile, Tile]:
    """Takes the scores of one more tile of keys.

    Args:
        s: Scores times log2(e): [tile_kv, tile_q].
        weight: What each key's value is to be multiplied by, or None.
        top: Largest scores so far; see Products.spread.
        total: Sums of the exponentials so far.
        products: Who multiplies.

    Returns:
        The probabilities, weighted; what earlier sums are to be multiplied by; the new `top` and `total`.
    """
    headroom, heavy = products.headroom, s
    if weight is not None and headroom:
        heavy = s + jnp.log2(jnp.maximum(weight, SMALLEST_SCALE))
    tile_top = products.largest(heavy)
    new_top = jnp.maximum(top, tile_top - headroom if headroom else tile_top)
    base = new_top if products.sees_a_key else jnp.where(new_top == -jnp.inf, 0.0, new_top)
    shrink = jnp.exp2(top - base)
    p = jnp.exp2(s - products.spread(base))
    total = total * products.spread(shrink) + p  # summed over the keys at the end, once
    return p if weight is None else p * weight, shrink, new_top, total
