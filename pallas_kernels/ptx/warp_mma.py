"""Products of one tile by four warps that do not wait for each other, 16 of its 64 keys each.

Keys and values come out of shared memory as the tensor core's left operands, 8 bits widened on the way in
registers. Values are turned around by ldmatrix, which moves 16 bits: pairs of 8-bit columns, taken apart
afterwards, as FlashAttention-3 does on its way through shared memory.
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
from pallas_kernels.ptx.fallback import rounded_to, with_fallback
from pallas_kernels.ptx.layouts import RIGHT_LAYOUT, SCALAR, TILE, require_layout
from pallas_kernels.ptx.mma import (
    ADJACENT_BYTES,
    ALTERNATING_BYTES,
    LdmatrixTile,
    dequantize_to_f16x2,
    mma_m16n8k16,
    pack_16bit,
    transpose_8x8,
)
from pallas_kernels.ptx.warp_query import KEYS, WARPS, Operand, WarpTile, mma_rhs_layout, ref_type
from pallas_kernels.shared.memory import swizzle_bytes
from pallas_kernels.shared.types import Ref, Scalar, Tile

f32 = jnp.float32


# ------------------------------------------------------------------------------------- scores
def _scores(k_s: Ref, query: Operand, *, tile: WarpTile) -> Tile:
    return jnp.einsum("ckd,cqd->kq", k_s[...].astype(f32), query)


@with_fallback(_scores, reads_smem=True)
def qk_mma(k_s: Ref, query: Operand, *, tile: WarpTile) -> Tile:
    """K Q^T: [64, tile_q].

    Args:
        k_s: [chunks, 64, width] in SMEM.
        query: load_query_fragments' operand.
        tile: Static sizes.
    """
    types = ref_type(tile.k_dtype.itemsize, tile.cut.width), mma_rhs_layout(tile.key_operand)
    run = plgpu.inline_mgpu(arg_types=types, return_type=tile.scores_type)
    return run(functools.partial(_key_products, tile=tile))(k_s, query)


def _key_products(
    _ctx: mgpu.LaunchContext, k_s: ir.Value, query: mgpu.FragmentedArray, *, tile: WarpTile
) -> mgpu.FragmentedArray:
    require_layout(query.layout, RIGHT_LAYOUT)
    row_tiles = tile.tile_q // 8
    registers = [lanes.bits(x, lanes.i32()) for x in query.registers.flatten()]
    right = lambda step, row_tile: registers[(step * row_tiles + row_tile) * 2 :][:2]
    matrices = _matrices_of(k_s, tile.k_dtype, tile)
    # Two sums a row tile: a mma_m16n8k16 waits for the one before it.
    sums: list[list[Sequence[ir.Value]]] = [
        [[lanes.number(0.0)] * 4 for _ in range(row_tiles)] for _ in (0, 1)
    ]
    step = 0
    for chunk in range(tile.cut.num_chunks):
        for pair in range(matrices.steps):
            for left in _left_keys(matrices.load(chunk, pair), tile.k_dtype):
                for nth in range(row_tiles):
                    sums[step % 2][nth] = mma_m16n8k16(
                        sums[step % 2][nth], left, right(step, nth), tile.key_operand
                    )
                step += 1
    both = [[arith.addf(a, b) for a, b in zip(*fours, strict=True)] for fours in zip(*sums, strict=True)]
    return fragments.array_of(both)


def _matrices_of(ref: ir.Value, dtype: np.dtype, tile: WarpTile) -> LdmatrixTile:
    """A stage's keys or values."""
    itemsize, width = dtype.itemsize, tile.cut.width
    return LdmatrixTile(
        ref, rows=WARPS * KEYS, row_bytes=width * itemsize, swizzle=swizzle_bytes(itemsize, width)
    )


def _left_keys(loaded: Sequence[ir.Value], dtype: np.dtype) -> list[Sequence[ir.Value]]:
    """Left operands of what ldmatrix gave: one of 16-bit keys, two of 8-bit ones."""
    if dtype.itemsize == 2:
        return [loaded]
    wide = [dequantize_to_f16x2(x, dtype, ADJACENT_BYTES) for x in loaded]
    pairs = (wide[:2], wide[2:])
    return [(a[0], b[0], a[1], b[1]) for a, b in pairs]


# ------------------------------------------------------------------------------------- largest
def _largest(x: Tile, *, tile: WarpTile) -> Tile:
    of_warp = x.reshape(WARPS, KEYS, -1).max(axis=1, keepdims=True)
    return jnp.broadcast_to(of_warp, (WARPS, KEYS, x.shape[1])).reshape(x.shape)


@with_fallback(_largest)
def warp_row_max(x: Tile, *, tile: WarpTile) -> Tile:
    """The largest of each warp's rows, in all of its rows: [64, tile_q]."""
    return plgpu.inline_mgpu(arg_types=(TILE,), return_type=tile.scores_type)(_warp_largest)(x)


def _warp_largest(_ctx: mgpu.LaunchContext, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    columns = []
    for a, b, c, d in fragments.numbers(x):
        pair = [arith.maxnumf(a, c), arith.maxnumf(b, d)]
        for distance in (4, 8, 16):
            pair = [arith.maxnumf(v, lanes.shuffled(v, "bfly", lanes.const(distance))) for v in pair]
        columns.append(pair * 2)
    return fragments.array_of(columns)


# ------------------------------------------------------------------------------------- values
def _sums(
    v_s: Ref,
    p: Tile,
    accs: Sequence[Tile],
    low: Scalar,
    high: Scalar,
    firsts: Sequence[Scalar],
    *,
    piece: int,
    tile: WarpTile,
) -> tuple[Tile, ...]:
    rows = jnp.arange(WARPS * KEYS, dtype=jnp.int32)
    key = rows + firsts[0]
    for i, first in enumerate(firsts[1:], 1):
        key = jnp.where(rows >= i * piece, rows + (first - i * piece), key)
    is_seen = (key >= low) & (key < high)
    v = jnp.where(is_seen[:, None], v_s[...].astype(f32), 0.0).reshape(-1, WARPS, KEYS, tile.cut.width)
    p = rounded_to(p, tile.value_operand).reshape(WARPS, KEYS, -1)
    new = jnp.einsum("cwkd,wkq->cdwq", v, p).reshape(tile.num_accs, KEYS, WARPS, -1)
    return tuple(acc + x.swapaxes(0, 1).reshape(tile.shape) for acc, x in zip(accs, new, strict=True))


@with_fallback(_sums, reads_smem=True)
def pv_mma(
    v_s: Ref,
    p: Tile,
    accs: Sequence[Tile],
    low: Scalar,
    high: Scalar,
    firsts: Sequence[Scalar],
    *,
    piece: int,
    tile: WarpTile,
) -> tuple[Tile, ...]:
    """Accs + V^T P of each warp's keys; values of keys that no query sees count as 0.

    Args:
        v_s: [chunks, 64, width] in SMEM.
        p: Probabilities, [64, tile_q].
        accs: `num_accs` of [64, tile_q]: row 16 w + i is warp w's sum for one of 16 columns of a head, in an
            order that store_warp_outputs knows.
        low: First key that some query sees.
        high: One past the last.
        firsts: The keys are `piece` neighbours from each of them, which ascend.
        piece: Static.
        tile: Static sizes.
    """
    types = (
        ref_type(tile.v_dtype.itemsize, tile.cut.width),
        TILE,
        [TILE] * tile.num_accs,
        [SCALAR] * (2 + len(firsts)),
    )
    run = plgpu.inline_mgpu(arg_types=types, return_type=(tile.scores_type,) * tile.num_accs)
    return tuple(
        run(functools.partial(_value_products, tile=tile, piece=piece))(
            v_s, p, list(accs), [low, high, *firsts]
        )
    )


def _value_products(
    _ctx: mgpu.LaunchContext,
    v_s: ir.Value,
    p: mgpu.FragmentedArray,
    accs: Sequence[mgpu.FragmentedArray],
    scalars: Sequence[mgpu.FragmentedArray],
    *,
    tile: WarpTile,
    piece: int,
) -> tuple[mgpu.FragmentedArray, ...]:
    low, high, *firsts = map(fragments.scalar, scalars)
    masks = _seen_masks(low, high, firsts, piece)
    matrices = _matrices_of(v_s, tile.v_dtype, tile)
    right = []
    for a, b, c, d in fragments.numbers(p):
        halves = (pack_16bit(a, b, tile.value_operand), pack_16bit(c, d, tile.value_operand))
        right.append([transpose_8x8(half) for half in halves])
    sums: list[Sequence[Sequence[ir.Value]]] = [fragments.numbers(acc) for acc in accs]
    nth = 0
    for chunk in range(tile.cut.num_chunks):
        for pair in range(matrices.steps):
            loaded = matrices.load(chunk, pair, transpose=True)
            loaded = [arith.andi(x, masks[i % 2]) for i, x in enumerate(loaded)]
            for left in _left_values(loaded, tile.v_dtype):
                fours = zip(sums[nth], right, strict=True)
                sums[nth] = [mma_m16n8k16(acc, left, b, tile.value_operand) for acc, b in fours]
                nth += 1
    return tuple(fragments.array_of(columns) for columns in sums)


def _left_values(loaded: Sequence[ir.Value], dtype: np.dtype) -> list[Sequence[ir.Value]]:
    """Left operands of what ldmatrix gave, turned around: 16 columns of a head by 16 keys.

    Of 8 bits, rows g and g + 8 are columns 2 g and 2 g + 1: ldmatrix turns pairs of them.
    """
    if dtype.itemsize == 2:
        keys_low, keys_high, next_low, next_high = loaded
        return [(keys_low, next_low, keys_high, next_high)]
    wide = [dequantize_to_f16x2(x, dtype, ALTERNATING_BYTES) for x in loaded]
    return [(*wide[i], *wide[i + 1]) for i in (0, 2)]


def _seen_masks(low: ir.Value, high: ir.Value, firsts: Sequence[ir.Value], piece: int) -> list[ir.Value]:
    """Ones where some query sees a key: for a register of keys 2 t, 2 t + 1 and one of those 8 further on."""
    _, warp = lanes.lane_and_warp()
    _, t = lanes.lane_row_and_pair()
    row = lanes.times(warp, KEYS)
    key = lanes.add(firsts[0], row)
    for i, first in enumerate(firsts[1:], 1):
        inside = arith.cmpi(arith.CmpIPredicate.sge, row, lanes.const(i * piece))
        key = arith.select(inside, lanes.add(first, row, -i * piece), key)
    key = lanes.add(key, lanes.times(t, 2))

    def half(offset: int, ones: int) -> ir.Value:
        at = lanes.add(key, offset)
        after = arith.cmpi(arith.CmpIPredicate.sge, at, low)
        before = arith.cmpi(arith.CmpIPredicate.slt, at, high)
        return arith.select(arith.andi(after, before), lanes.const(ones), lanes.const(0))

    return [arith.ori(half(offset, 0xFFFF), half(offset + 1, 0xFFFF0000)) for offset in (0, 8)]
