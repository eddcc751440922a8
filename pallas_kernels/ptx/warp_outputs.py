"""What four warps have found, each in its place of shared memory."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import TILE, is_contiguous
from pallas_kernels.ptx.warp_query import KEYS, WARPS, WarpTile
from pallas_kernels.shared.types import Ref, Tile


def _store(merge_s: Ref, accs: Sequence[Tile], top: Tile, total: Tile, *, tile: WarpTile) -> None:
    of_warps = lambda x: x.reshape(*x.shape[:-2], WARPS, KEYS, -1)
    dim = tile.cut.padded_dim
    merge_s[:, :dim] = of_warps(jnp.stack(accs)).swapaxes(0, 1).reshape(WARPS, dim, -1)
    merge_s[:, dim] = of_warps(top)[:, 0]
    merge_s[:, dim + 1] = of_warps(total).sum(axis=1)


@with_fallback(_store, reads_smem=True)
def store_warp_outputs(merge_s: Ref, accs: Sequence[Tile], top: Tile, total: Tile, *, tile: WarpTile) -> None:
    """Each warp's results into its place, columns of a head in their order; then all may read.

    Args:
        merge_s: [warps, head_dim + 2, tile_q] f32 in SMEM: accumulators, largest scores, sums.
        accs: pv_mma'.
        top: The largest score of each of a warp's queries, in all of its rows: [64, tile_q].
        total: Sums of exponentials, to be added over a warp's rows: [64, tile_q].
        tile: Static sizes.
    """
    types = plgpu.RefType(), [TILE] * tile.num_accs, TILE, TILE
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(functools.partial(_store_by_lanes, tile=tile))(merge_s, list(accs), top, total)


def _store_by_lanes(
    _ctx: mgpu.LaunchContext,
    merge_s: ir.Value,
    accs: Sequence[mgpu.FragmentedArray],
    top: mgpu.FragmentedArray,
    total: mgpu.FragmentedArray,
    *,
    tile: WarpTile,
) -> tuple[()]:
    assert is_contiguous(ir.MemRefType(merge_s.type))
    g, t = lanes.lane_row_and_pair()
    _, warp = lanes.lane_and_warp()
    row_bytes = 4 * tile.tile_q
    spread, far = (2, 1) if tile.v_dtype.itemsize == 1 else (1, 8)
    place = lanes.add(
        lanes.address(merge_s), lanes.times(warp, (tile.cut.padded_dim + 2) * row_bytes), lanes.times(t, 8)
    )
    first = lanes.add(place, lanes.times(g, spread * row_bytes))

    def store(at: ir.Value, offset: int, pair: Sequence[ir.Value], only: ir.Value | None = None) -> None:
        lanes.run(f"st.shared.v2.f32 [$0 + {offset}], {{$1, $2}};", at, *pair, predicate=only)

    mgpu.warpgroup_barrier()  # the results before these have been read
    for nth, acc in enumerate(accs):
        for row_tile, four in enumerate(fragments.numbers(acc)):
            for half in (0, 1):
                offset = (nth * KEYS + half * far) * row_bytes + row_tile * 32
                store(first, offset, four[2 * half : 2 * half + 2])
    is_first = arith.cmpi(arith.CmpIPredicate.eq, g, lanes.const(0))
    of_row_tiles = zip(fragments.numbers(top), fragments.numbers(total), strict=True)
    for row_tile, (tops, sums) in enumerate(of_row_tiles):
        pair = [arith.addf(a, b) for a, b in zip(sums[:2], sums[2:], strict=True)]
        for distance in (4, 8, 16):
            pair = [arith.addf(x, lanes.shuffled(x, "bfly", lanes.const(distance))) for x in pair]
        offset = tile.cut.padded_dim * row_bytes + row_tile * 32
        store(place, offset, tops[:2], only=is_first)
        store(place, offset + row_bytes, pair, only=is_first)
    mgpu.warpgroup_barrier()
    return ()
