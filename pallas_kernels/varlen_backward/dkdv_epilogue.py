"""The epilogue of a work tile of the dk/dv kernel: stores a warpgroup's dk or dv."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.types import Ref, Scalar, Slice, Tile
from pallas_kernels.varlen_backward.spec import BackwardSpec
from pallas_kernels.varlen_backward.tile_scheduler import BackwardWorkTile
from pallas_kernels.varlen_prefill.tile_scheduler import align_row


def store_valid_rows(
    grad_g: Ref,
    work_tile: BackwardWorkTile,
    wg: Scalar,
    swizzled_s: Ref,
    plain_s: Ref,
    tiles: Sequence[Tile],
    *,
    spec: BackwardSpec,
) -> None:
    """Start to store a warpgroup's valid rows: in one copy if all are valid, else in powers of two.

    Args:
        grad_g: dk or dv in global memory.
        work_tile: The work tile.
        wg: Index of the warpgroup.
        swizzled_s: Shared memory [units, 64, 64].
        plain_s: The same memory without swizzling.
        tiles: Gradient in 16 bits, one tile per unit of the head.
        spec: The kernel.
    """
    first = work_tile["first_key_row"] + wg * UNIT
    begin, end = (jnp.clip(work_tile[name] - wg * UNIT, 0, UNIT) for name in ("store_begin", "store_end"))
    num = jnp.maximum(end - begin, 0)

    def to(rows: Slice, unit: int) -> Ref:
        return grad_g.at[(rows, work_tile.kv_head, *spec.gmem_unit_index(unit, first * 0))]

    @pl.when(num == UNIT)
    def _() -> None:
        # All rows are valid: one swizzled copy per unit.
        for unit, tile in enumerate(tiles):
            swizzled_s[unit] = tile
        plgpu.commit_smem()
        for unit in range(spec.num_units):
            plgpu.copy_smem_to_gmem(swizzled_s.at[unit], to(pl.ds(align_row(first), UNIT), unit))

    @pl.when((num > 0) & (num < UNIT))
    def _() -> None:
        # Swizzled memory can only be copied in units of 8 rows, so partial tiles go through the plain view.
        for unit, tile in enumerate(tiles):
            store_unoptimized(plain_s.at[unit], tile)
        plgpu.commit_smem()
        offset, size = begin, UNIT // 2
        while size:

            @pl.when((num & size) != 0)
            def _(offset: Scalar = offset, size: int = size) -> None:
                for unit in range(spec.num_units):
                    piece = plain_s.at[unit, pl.ds(offset, size)]
                    plgpu.copy_smem_to_gmem(piece, to(pl.ds(first + offset, size), unit))

            offset, size = offset + (num & size), size // 2
