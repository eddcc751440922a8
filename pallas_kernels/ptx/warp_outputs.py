"""Stores the attention results of the four warps of a warpgroup into separate parts of shared memory."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import TILE, is_contiguous
from pallas_kernels.ptx.warp_query import WARP_KEYS, WARPS, WarpTile
from pallas_kernels.shared.types import Ref, Tile


def _store_warp_outputs(
    outputs_s: Ref, accs: Sequence[Tile], row_max: Tile, row_sum: Tile, *, tile: WarpTile
) -> None:
    def by_warp(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-2], WARPS, WARP_KEYS, -1)

    dim = tile.head_chunks.padded_dim
    outputs_s[:, :dim] = by_warp(jnp.stack(accs)).swapaxes(0, 1).reshape(WARPS, dim, -1)
    outputs_s[:, dim] = by_warp(row_max)[:, 0]
    outputs_s[:, dim + 1] = by_warp(row_sum).sum(axis=1)


@with_fallback(_store_warp_outputs, reads_smem=True)
def store_warp_outputs(
    outputs_s: Ref, accs: Sequence[Tile], row_max: Tile, row_sum: Tile, *, tile: WarpTile
) -> None:
    """Store each warp's results in shared memory, where all threads may read them after this call.

    Args:
        outputs_s: Shared memory, f32 [warps, head_dim + 2, tile_q]: for each warp one row per column of the
            head, then the row maxima and the row sums.
        accs: Accumulators from `pv_mma`.
        row_max: Maximum score of each query over the warp's keys, repeated in all its rows: [64, tile_q].
        row_sum: Partial sums of the probabilities [64, tile_q]. This adds them up over the rows of a warp.
        tile: Static sizes.
    """
    types = plgpu.RefType(), [TILE] * tile.num_accs, TILE, TILE
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(functools.partial(_store_by_lanes, tile=tile))(outputs_s, list(accs), row_max, row_sum)


def _store_by_lanes(
    _ctx: mgpu.LaunchContext,
    outputs_s: ir.Value,
    accs: Sequence[mgpu.FragmentedArray],
    row_max: mgpu.FragmentedArray,
    row_sum: mgpu.FragmentedArray,
    *,
    tile: WarpTile,
) -> tuple[()]:
    assert is_contiguous(ir.MemRefType(outputs_s.type))
    g, t = lanes.lane_row_and_pair()
    _, warp = lanes.lane_and_warp()
    dim, row_bytes = tile.head_chunks.padded_dim, 4 * tile.tile_q
    # 8-bit values: rows g and g + 8 of an accumulator are columns 2 g and 2 g + 1 of a head; see `pv_mma`.
    g_stride, half_stride = (2, 1) if tile.v_dtype.itemsize == 1 else (1, 8)
    warp_start = lanes.add(
        lanes.address(outputs_s), lanes.times(warp, (dim + 2) * row_bytes), lanes.times(t, 8)
    )
    first = lanes.add(warp_start, lanes.times(g, g_stride * row_bytes))

    def store(
        address: ir.Value, offset: int, pair: Sequence[ir.Value], predicate: ir.Value | None = None
    ) -> None:
        lanes.run(f"st.shared.v2.f32 [$0 + {offset}], {{$1, $2}};", address, *pair, predicate=predicate)

    mgpu.warpgroup_barrier()  # all warps have read the previous results
    for i, acc in enumerate(accs):
        for row_tile, fragment in enumerate(fragments.column_fragments(acc)):
            for half in (0, 1):
                offset = (i * WARP_KEYS + half * half_stride) * row_bytes + row_tile * 32
                store(first, offset, fragment[2 * half : 2 * half + 2])
    # The row maxima are the same in all lanes of a column; the row sums are added up over them first.
    is_first = arith.cmpi(arith.CmpIPredicate.eq, g, lanes.const(0))
    row_stats = zip(fragments.column_fragments(row_max), fragments.column_fragments(row_sum), strict=True)
    for row_tile, (maxima, sums) in enumerate(row_stats):
        pair = [arith.addf(a, b) for a, b in zip(sums[:2], sums[2:], strict=True)]
        for distance in (4, 8, 16):
            pair = [arith.addf(x, lanes.shuffle(x, "bfly", lanes.const(distance))) for x in pair]
        offset = dim * row_bytes + row_tile * 32
        store(warp_start, offset, maxima[:2], predicate=is_first)
        store(warp_start, offset + row_bytes, pair, predicate=is_first)
    mgpu.warpgroup_barrier()  # all results are visible to all warps
    return ()
