"""A warpgroup's gradients of keys or values into global memory."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.types import Ref, Scalar, Slice, Tile
from pallas_kernels.varlen_backward.spec import BackwardSpec
from pallas_kernels.varlen_backward.tile_scheduler import BackwardWorkTile, align_row


def store_valid_rows(
    grad_g: Ref,
    item: BackwardWorkTile,
    wg: Scalar,
    swizzled_s: Ref,
    plain_s: Ref,
    tiles: Sequence[Tile],
    *,
    spec: BackwardSpec,
) -> None:
    """Begins to write a warpgroup's rows: in one piece if all are the item's, else in powers of two.

    Args:
        grad_g: As Outputs.grad_key.
        item: Whose.
        wg: The warpgroup.
        swizzled_s: [units, 64, 64] in SMEM.
        plain_s: The same memory.
        tiles: A unit of the head each, in 16 bits.
        spec: The kernel.
    """
    first = item["first_key_row"] + wg * UNIT
    begin, end = (jnp.clip(item[name] - wg * UNIT, 0, UNIT) for name in ("store_begin", "store_end"))
    num = jnp.maximum(end - begin, 0)

    def to(live: Slice, unit: int) -> Ref:
        return grad_g.at[(live, item.kv_head, *spec.at_unit(unit, first * 0))]

    @pl.when(num == UNIT)
    def _() -> None:
        for unit, tile in enumerate(tiles):
            swizzled_s[unit] = tile
        plgpu.commit_smem()
        for unit in range(spec.units):
            plgpu.copy_smem_to_gmem(swizzled_s.at[unit], to(pl.ds(align_row(first), UNIT), unit))

    @pl.when((num > 0) & (num < UNIT))
    def _() -> None:
        for unit, tile in enumerate(tiles):
            store_unoptimized(plain_s.at[unit], tile)
        plgpu.commit_smem()
        offset, size = begin, UNIT // 2
        while size:

            @pl.when((num & size) != 0)
            def _(offset: Scalar = offset, size: int = size) -> None:
                for unit in range(spec.units):
                    piece = plain_s.at[unit, pl.ds(offset, size)]
                    plgpu.copy_smem_to_gmem(piece, to(pl.ds(first + offset, size), unit))

            offset, size = offset + (num & size), size // 2
