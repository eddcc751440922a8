"""The epilogue of a work tile of the dk/dv kernel: stores a warpgroup's dk or dv."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import PANEL
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
    """Start the TMA copies that store a warpgroup's valid rows of dk or dv.

    If all 64 rows are valid, one copy per panel stores them. Otherwise each copy stores a power of two rows.

    Args:
        grad_g: dk or dv in global memory.
        work_tile: Work tile whose gradients are stored.
        wg: Index of the warpgroup.
        swizzled_s: Shared memory [panels, 64, 64].
        plain_s: The same memory without swizzling.
        tiles: Gradient in 16 bits, one tile per panel of the head.
        spec: Static description of the kernel.
    """
    first = work_tile["first_key_row"] + wg * PANEL
    begin, end = (jnp.clip(work_tile[name] - wg * PANEL, 0, PANEL) for name in ("store_begin", "store_end"))
    num = jnp.maximum(end - begin, 0)

    def to(rows: Slice, panel: int) -> Ref:
        return grad_g.at[(rows, work_tile.kv_head, *spec.gmem_panel_index(panel, first * 0))]

    @pl.when(num == PANEL)
    def _() -> None:
        # All rows are valid: one swizzled copy per panel.
        for panel, tile in enumerate(tiles):
            swizzled_s[panel] = tile
        plgpu.commit_smem()
        for panel in range(spec.num_head_panels):
            plgpu.copy_smem_to_gmem(swizzled_s.at[panel], to(pl.ds(align_row(first), PANEL), panel))

    @pl.when((num > 0) & (num < PANEL))
    def _() -> None:
        # Swizzled memory can only be copied in units of 8 rows, so partial tiles go through the plain view.
        for panel, tile in enumerate(tiles):
            store_unoptimized(plain_s.at[panel], tile)
        plgpu.commit_smem()
        offset, size = begin, PANEL // 2
        while size:

            @pl.when((num & size) != 0)
            def _(offset: Scalar = offset, size: int = size) -> None:
                for panel in range(spec.num_head_panels):
                    rows_s = plain_s.at[panel, pl.ds(offset, size)]
                    plgpu.copy_smem_to_gmem(rows_s, to(pl.ds(first + offset, size), panel))

            offset, size = offset + (num & size), size // 2
