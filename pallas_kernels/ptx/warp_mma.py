"""Matrix products of one tile by four warps that do not wait for each other, each with 16 of its 64 keys.

Keys and values are loaded from shared memory as A operands of the tensor core; 8-bit ones are dequantized in
registers. Values are transposed by ldmatrix, which moves 16-bit units: 8-bit values arrive as pairs of
adjacent columns and are separated afterwards, as FlashAttention-3 does on its way through shared memory.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import round_to, with_fallback
from pallas_kernels.ptx.layouts import MMA_RHS_LAYOUT, SCALAR, TILE, require_layout
from pallas_kernels.ptx.mma import (
    ADJACENT_BYTES,
    ALTERNATING_BYTES,
    LdmatrixTile,
    dequantize_to_f16x2,
    mma_m16n8k16,
    pack_16bit,
    transpose_8x8,
)
from pallas_kernels.ptx.warp_query import WARP_KEYS, WARPS, Operand, WarpTile, mma_rhs_layout, ref_type
from pallas_kernels.shared.memory import swizzle_bytes
from pallas_kernels.shared.types import Ref, Scalar, Tile

f32 = jnp.float32


# ------------------------------------------------------------------------------------- scores
def _qk_mma(k_s: Ref, query: Operand, *, tile: WarpTile) -> Tile:
    return jnp.einsum("ckd,cqd->kq", k_s[...].astype(f32), query)


@with_fallback(_qk_mma, reads_smem=True)
def qk_mma(k_s: Ref, query: Operand, *, tile: WarpTile) -> Tile:
    """Return K Q^T: [64, tile_q].

    Args:
        k_s: [chunks, 64, width] in SMEM.
        query: Operand from `load_query_fragments`.
        tile: Static sizes.
    """
    types = ref_type(tile.k_dtype.itemsize, tile.head_chunks.width), mma_rhs_layout(tile.key_operand)
    run = plgpu.inline_mgpu(arg_types=types, return_type=tile.scores_type)
    return run(functools.partial(_qk_mma_by_lanes, tile=tile))(k_s, query)


def _qk_mma_by_lanes(
    _ctx: mgpu.LaunchContext, k_s: ir.Value, query: mgpu.FragmentedArray, *, tile: WarpTile
) -> mgpu.FragmentedArray:
    require_layout(query.layout, MMA_RHS_LAYOUT)
    num_row_tiles = tile.tile_q // 8
    registers = [lanes.bitcast(x, lanes.i32()) for x in query.registers.flatten()]

    def b_operand(step: int, row_tile: int) -> list[ir.Value]:
        return registers[(step * num_row_tiles + row_tile) * 2 :][:2]

    keys = _ldmatrix_tile(k_s, tile.k_dtype, tile)
    # Two accumulators per row tile, used in turns, because an mma waits for the previous one on its
    # accumulator.
    accs: list[list[Sequence[ir.Value]]] = [
        [[lanes.const_f32(0.0)] * 4 for _ in range(num_row_tiles)] for _ in (0, 1)
    ]
    step = 0
    for chunk in range(tile.head_chunks.num_chunks):
        for pair in range(keys.steps):
            for a_operand in _key_operands(keys.load(chunk, pair), tile.k_dtype):
                for i in range(num_row_tiles):
                    accs[step % 2][i] = mma_m16n8k16(
                        accs[step % 2][i], a_operand, b_operand(step, i), tile.key_operand
                    )
                step += 1
    sums = [[arith.addf(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(*accs, strict=True)]
    return fragments.tile_from_fragments(sums)


def _ldmatrix_tile(ref: ir.Value, dtype: np.dtype, tile: WarpTile) -> LdmatrixTile:
    """Return the keys or values of a pipeline stage as a tile for ldmatrix."""
    itemsize, width = dtype.itemsize, tile.head_chunks.width
    return LdmatrixTile(
        ref, rows=WARPS * WARP_KEYS, row_bytes=width * itemsize, swizzle=swizzle_bytes(itemsize, width)
    )


def _key_operands(loaded: Sequence[ir.Value], dtype: np.dtype) -> list[Sequence[ir.Value]]:
    """Return the A operands of one ldmatrix: one of 16-bit keys, two of 8-bit keys."""
    if dtype.itemsize == 2:
        return [loaded]
    dequantized = [dequantize_to_f16x2(x, dtype, ADJACENT_BYTES) for x in loaded]
    pairs = (dequantized[:2], dequantized[2:])
    return [(a[0], b[0], a[1], b[1]) for a, b in pairs]


# ------------------------------------------------------------------------------------- row maximum
def _warp_row_max(x: Tile, *, tile: WarpTile) -> Tile:
    warp_max = x.reshape(WARPS, WARP_KEYS, -1).max(axis=1, keepdims=True)
    return jnp.broadcast_to(warp_max, (WARPS, WARP_KEYS, x.shape[1])).reshape(x.shape)


@with_fallback(_warp_row_max)
def warp_row_max(x: Tile, *, tile: WarpTile) -> Tile:
    """Return each query's maximum over a warp's keys, repeated in all the warp's rows: [64, tile_q]."""
    return plgpu.inline_mgpu(arg_types=(TILE,), return_type=tile.scores_type)(_warp_row_max_by_lanes)(x)


def _warp_row_max_by_lanes(_ctx: mgpu.LaunchContext, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    columns = []
    for a, b, c, d in fragments.column_fragments(x):
        # Rows g and g + 8 of the lane, then the rows of the other lanes with the same t.
        pair = [arith.maxnumf(a, c), arith.maxnumf(b, d)]
        for distance in (4, 8, 16):
            pair = [arith.maxnumf(v, lanes.shuffle(v, "bfly", lanes.const(distance))) for v in pair]
        columns.append(pair * 2)
    return fragments.tile_from_fragments(columns)


# ------------------------------------------------------------------------------------- values
def _pv_mma(
    v_s: Ref,
    p: Tile,
    accs: Sequence[Tile],
    first_key: Scalar,
    end_key: Scalar,
    run_starts: Sequence[Scalar],
    *,
    run_length: int,
    tile: WarpTile,
) -> tuple[Tile, ...]:
    rows = jnp.arange(WARPS * WARP_KEYS, dtype=jnp.int32)
    key = rows + run_starts[0]
    for i, first in enumerate(run_starts[1:], 1):
        key = jnp.where(rows >= i * run_length, rows + (first - i * run_length), key)
    is_visible = (key >= first_key) & (key < end_key)
    v = jnp.where(is_visible[:, None], v_s[...].astype(f32), 0.0)
    v = v.reshape(-1, WARPS, WARP_KEYS, tile.head_chunks.width)
    p = round_to(p, tile.value_operand).reshape(WARPS, WARP_KEYS, -1)
    new = jnp.einsum("cwkd,wkq->cdwq", v, p).reshape(tile.num_accs, 16, WARPS, -1)
    return tuple(acc + x.swapaxes(0, 1).reshape(tile.shape) for acc, x in zip(accs, new, strict=True))


@with_fallback(_pv_mma, reads_smem=True)
def pv_mma(
    v_s: Ref,
    p: Tile,
    accs: Sequence[Tile],
    first_key: Scalar,
    end_key: Scalar,
    run_starts: Sequence[Scalar],
    *,
    run_length: int,
    tile: WarpTile,
) -> tuple[Tile, ...]:
    """Return accs + V^T P over each warp's keys; values outside of [first_key, end_key) count as 0.

    Args:
        v_s: Tile of values in SMEM, [chunks, 64, width].
        p: Probabilities, [64, tile_q].
        accs: `num_accs` tiles [64, tile_q]: row 16 w + i is warp w's sum for one of 16 columns of a head, in
            an order that `store_warp_outputs` reverses.
        first_key: Position of the first key that any query attends to.
        end_key: One past the position of the last key that any query attends to.
        run_starts: Position of the first key of each run of `run_length` consecutive keys, in ascending
            order.
        run_length: Static: number of consecutive keys in a run.
        tile: Static sizes.
    """
    types = (
        ref_type(tile.v_dtype.itemsize, tile.head_chunks.width),
        TILE,
        [TILE] * tile.num_accs,
        [SCALAR] * (2 + len(run_starts)),
    )
    run = plgpu.inline_mgpu(arg_types=types, return_type=(tile.scores_type,) * tile.num_accs)
    return tuple(
        run(functools.partial(_pv_mma_by_lanes, tile=tile, run_length=run_length))(
            v_s, p, list(accs), [first_key, end_key, *run_starts]
        )
    )


def _pv_mma_by_lanes(
    _ctx: mgpu.LaunchContext,
    v_s: ir.Value,
    p: mgpu.FragmentedArray,
    accs: Sequence[mgpu.FragmentedArray],
    scalars: Sequence[mgpu.FragmentedArray],
    *,
    tile: WarpTile,
    run_length: int,
) -> tuple[mgpu.FragmentedArray, ...]:
    first_key, end_key, *run_starts = map(fragments.scalar, scalars)
    masks = _visible_key_masks(first_key, end_key, run_starts, run_length)
    values = _ldmatrix_tile(v_s, tile.v_dtype, tile)
    # The probabilities are an accumulator's fragments; transposed in 8 x 8 matrices they are B operands.
    b_operands = []
    for a, b, c, d in fragments.column_fragments(p):
        halves = (pack_16bit(a, b, tile.value_operand), pack_16bit(c, d, tile.value_operand))
        b_operands.append([transpose_8x8(half) for half in halves])
    sums: list[Sequence[Sequence[ir.Value]]] = [fragments.column_fragments(acc) for acc in accs]
    acc_index = 0
    for chunk in range(tile.head_chunks.num_chunks):
        for pair in range(values.steps):
            loaded = values.load(chunk, pair, transpose=True)
            # Keys that no query attends to may hold NaN, so clear them before the product.
            loaded = [arith.andi(x, masks[i % 2]) for i, x in enumerate(loaded)]
            for a_operand in _value_operands(loaded, tile.v_dtype):
                operands = zip(sums[acc_index], b_operands, strict=True)
                sums[acc_index] = [mma_m16n8k16(acc, a_operand, b, tile.value_operand) for acc, b in operands]
                acc_index += 1
    return tuple(fragments.tile_from_fragments(columns) for columns in sums)


def _value_operands(loaded: Sequence[ir.Value], dtype: np.dtype) -> list[Sequence[ir.Value]]:
    """Return the A operands of one transposing ldmatrix: 16 columns of a head by 16 keys each.

    For 8-bit values, rows g and g + 8 are columns 2 g and 2 g + 1, because ldmatrix transposes pairs of
    columns.
    """
    if dtype.itemsize == 2:
        keys_low, keys_high, next_low, next_high = loaded
        return [(keys_low, next_low, keys_high, next_high)]
    dequantized = [dequantize_to_f16x2(x, dtype, ALTERNATING_BYTES) for x in loaded]
    return [(*dequantized[i], *dequantized[i + 1]) for i in (0, 2)]


def _visible_key_masks(
    first_key: ir.Value, end_key: ir.Value, run_starts: Sequence[ir.Value], run_length: int
) -> list[ir.Value]:
    """Return two bit masks, for a lane's keys (2 t, 2 t + 1) and (2 t + 8, 2 t + 9) of its warp.

    A mask has 16 ones for each key whose position lies in [first_key, end_key), and zeros for the other key.
    """
    _, warp = lanes.lane_and_warp()
    _, t = lanes.lane_row_and_pair()
    # The warp's 16 keys lie in one run; find its first key.
    row = lanes.times(warp, WARP_KEYS)
    key = lanes.add(run_starts[0], row)
    for i, first in enumerate(run_starts[1:], 1):
        inside = arith.cmpi(arith.CmpIPredicate.sge, row, lanes.const(i * run_length))
        key = arith.select(inside, lanes.add(first, row, -i * run_length), key)
    key = lanes.add(key, lanes.times(t, 2))

    def half_mask(offset: int, ones: int) -> ir.Value:
        lane_key = lanes.add(key, offset)
        after = arith.cmpi(arith.CmpIPredicate.sge, lane_key, first_key)
        before = arith.cmpi(arith.CmpIPredicate.slt, lane_key, end_key)
        return arith.select(arith.andi(after, before), lanes.const(ones), lanes.const(0))

    return [arith.ori(half_mask(offset, 0xFFFF), half_mask(offset + 1, 0xFFFF0000)) for offset in (0, 8)]
