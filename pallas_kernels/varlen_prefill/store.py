"""A warpgroup's output into global memory."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.store import store_unoptimized
from pallas_kernels.shared.types import Ref, Scalar, Slice, Tile
from pallas_kernels.varlen_prefill.items import aligned
from pallas_kernels.varlen_prefill.query_rows import QueryRows
from pallas_kernels.varlen_prefill.spec import M


def store_rows(out_g: Ref, rows: QueryRows, swizzled_s: Ref, plain_s: Ref, outs: Sequence[Tile]) -> None:
    """Writes a warpgroup's live rows: in one piece if all are, else in powers of two.

    Args:
        out_g: As Outputs.out.
        rows: Which.
        swizzled_s: [chunks, 64, width] in SMEM.
        plain_s: The same memory.
        outs: A chunk of a head each, in 16 bits.
    """
    item, cut = rows.item, rows.spec.shape.cut
    first = item["first_row"] + rows.rank * M
    begin, end = (jnp.clip(row - rows.rank * M, 0, M) for row in (item["begin"], item["end"]))
    num = jnp.maximum(end - begin, 0)

    def to(live: Slice, chunk: int) -> Ref:
        return out_g.at[(live, item.head, *cut.at(chunk, first * 0))]

    @pl.when(num == M)
    def _() -> None:
        for chunk, out in enumerate(outs):
            swizzled_s[chunk] = out
        plgpu.commit_smem()
        for chunk in range(cut.chunks):
            live = pl.ds(aligned(first), M)
            plgpu.copy_smem_to_gmem(swizzled_s.at[chunk], to(live, chunk))

    @pl.when((num > 0) & (num < M))
    def _() -> None:
        for chunk, out in enumerate(outs):
            store_unoptimized(plain_s.at[chunk], out)
        plgpu.commit_smem()
        offset, size = begin, M // 2
        while size:

            @pl.when((num & size) != 0)
            def _(offset: Scalar = offset, size: int = size) -> None:
                for chunk in range(cut.chunks):
                    piece = plain_s.at[chunk, pl.ds(offset, size)]
                    plgpu.copy_smem_to_gmem(piece, to(pl.ds(first + offset, size), chunk))

            offset, size = offset + (num & size), size // 2
