"""Decode by four warps that do not wait for each other, each with 16 of a tile's 64 keys.

The queries of a request are in the registers of every warp, as the B operand of its mma instructions. After a
request's last tile each warp stores its results into its own part of shared memory.

Keys and values are loaded from shared memory as A operands of the tensor core; 8-bit ones are dequantized in
registers. Values are transposed by ldmatrix, which moves 16-bit units: 8-bit values arrive as pairs of
adjacent columns and are separated afterwards, as FlashAttention-3 does on its way through shared memory.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import round_to, with_fallback
from pallas_kernels.ptx.layouts import MMA_RHS_LAYOUT, SCALAR, is_contiguous, require_layout, require_tiles
from pallas_kernels.ptx.mma import (
    ADJACENT_BYTES,
    ALTERNATING_BYTES,
    LdmatrixTile,
    dequantize_to_f16x2,
    mma_m16n8k16,
    pack_16bit,
    transpose_8x8,
)
from pallas_kernels.shared.layouts import WGMMA
from pallas_kernels.shared.memory import PANEL, HeadChunks, swizzle_bytes, swizzle_transforms
from pallas_kernels.shared.types import Layout, Ref, Scalar, Tile, f32

WARP_KEYS = 16  # keys of a tile that one warp processes
WARPS = 4
QUERY_BITS = 10  # bf16 queries are scaled so that the largest element is about 2 ** QUERY_BITS in f16

type Operand = jax.Array
"""A request's queries as a B operand of the tensor core; in the fallback f32 [chunks, tile_q, width]."""


@dataclasses.dataclass(frozen=True)
class WarpTile:
    """Static sizes and types of a tile of 64 keys, 16 for each warp, and a request's queries.

    Attributes:
        tile_q: Number of query rows.
        head_chunks: How head_dim is divided into chunks.
        dtype: Dtype of the queries.
        k_dtype: Stored dtype of the keys.
        v_dtype: Stored dtype of the values.
        has_fp8_conversion: Whether the GPU has an instruction that converts float8_e4m3fn.
        shape: Shape of a tile of scores.
        scores_type: Type of a tile of scores and of an accumulator.
        num_accs: Number of accumulators: one for each 16 columns of a head.
        key_operand: Dtype in which the tensor core multiplies keys; 8-bit dtypes are exact in f16.
        value_operand: Dtype in which the tensor core multiplies values.
        query_layout: Layout of the queries as a B operand that every warp holds completely.
    """

    tile_q: int
    head_chunks: HeadChunks
    dtype: np.dtype
    k_dtype: np.dtype
    v_dtype: np.dtype
    has_fp8_conversion: bool = True
    shape: tuple[int, int] = dataclasses.field(init=False)
    scores_type: plgpu.ShapeDtypeStruct = dataclasses.field(init=False)
    num_accs: int = dataclasses.field(init=False)
    key_operand: np.dtype = dataclasses.field(init=False)
    value_operand: np.dtype = dataclasses.field(init=False)
    query_layout: Layout = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        f16, shape = jnp.dtype(jnp.float16), (WARPS * WARP_KEYS, self.tile_q)
        key_operand = self.dtype if self.k_dtype.itemsize == 2 else f16
        vars(self).update(
            shape=shape,
            scores_type=plgpu.ShapeDtypeStruct(shape, f32, WGMMA),
            num_accs=self.head_chunks.padded_dim // 16,
            key_operand=key_operand,
            value_operand=self.dtype if self.v_dtype.itemsize == 2 else f16,
            query_layout=plgpu.Layout.MMA_RHS(key_operand, m_warps=4),
        )


def ref_type(itemsize: int, width: int = PANEL) -> plgpu.RefType:
    """Return the reference type of a tile of `swizzled_smem`."""
    return plgpu.RefType(swizzle_transforms(itemsize, width))


# ------------------------------------------------------------------------------------- queries
def _load_query_fragments(q_s: Ref, *, tile: WarpTile) -> tuple[Operand, Tile]:
    q = q_s[...].astype(f32)
    if tile.key_operand == tile.dtype:
        return q, jnp.ones(tile.shape, f32)
    amax = jnp.abs(q).max(axis=(0, 2))
    exponent = jnp.clip(jnp.floor(jnp.log2(jnp.maximum(amax, 2.0**-116))) - QUERY_BITS, -126, 126)
    q = round_to(q * jnp.exp2(-exponent)[None, :, None], tile.key_operand)
    return q, jnp.broadcast_to(jnp.exp2(exponent)[None], tile.shape)


@with_fallback(_load_query_fragments, reads_smem=True)
def load_query_fragments(q_s: Ref, *, tile: WarpTile) -> tuple[Operand, Tile]:
    """Return the queries as a B operand, and the factor that scores must be multiplied by, [64, tile_q].

    The factor is 1 unless bf16 queries had to be scaled to fit f16.

    Args:
        q_s: [chunks, tile_q, width] in SMEM.
        tile: Static sizes.
    """
    layout = tile.query_layout
    operand_type = plgpu.ShapeDtypeStruct(
        (tile.head_chunks.padded_dim, tile.tile_q), tile.key_operand, layout
    )
    run = plgpu.inline_mgpu(arg_types=(ref_type(2),), return_type=(operand_type, tile.scores_type))
    return run(functools.partial(_load_query_by_lanes, tile=tile, layout=layout.to_mgpu()))(q_s)


def _load_query_by_lanes(
    _ctx: mgpu.LaunchContext, q_s: ir.Value, *, tile: WarpTile, layout: mgpu.FragmentedLayout
) -> tuple[mgpu.FragmentedArray, mgpu.FragmentedArray]:
    """Implement load_query_fragments for a lane.

    For 8-bit keys, an operand's columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16 are columns 4 t to 4 t + 3 of a
    head, because one register of keys holds four adjacent columns.
    """
    require_layout(layout, MMA_RHS_LAYOUT)
    g, t = lanes.lane_row_and_pair()
    is_8bit, width = tile.k_dtype.itemsize == 1, tile.head_chunks.width
    require_tiles(ir.MemRefType(q_s.type), rows=tile.tile_q, row_bytes=2 * width, swizzle=128)
    num_row_tiles, steps_per_chunk = tile.tile_q // 8, width // 16
    # The lane's 16-byte unit, which the swizzle XORs with the row, and its byte in that unit.
    unit, byte = g, lanes.times(t, 4)
    if is_8bit:
        unit = arith.xori(g, arith.shrui(t, lanes.const(1)))
        byte = lanes.times(arith.andi(t, lanes.const(1)), 8)
    first = lanes.add(lanes.address(q_s), lanes.times(g, 128), lanes.times(unit, 16), byte)

    def read(chunk: int, row_tile: int, step: int) -> list[ir.Value]:
        """Return two registers: the lane's part of the 16 columns of a step."""
        offset = ((chunk * num_row_tiles + row_tile) * (width // PANEL) + step // 4) * 1024

        def address(unit: int) -> ir.Value:
            return arith.xori(first, lanes.const(unit * 16))

        if is_8bit:
            code = f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {offset}];"
            return lanes.ptx_results(code, address(step % 4 * 2), num_results=2, touches_memory=True)
        code = f"ld.shared.b32 $0, [$1 + {offset}];"
        return [lanes.ptx(code, address(step % 4 * 2 + half), touches_memory=True) for half in (0, 1)]

    steps = [(chunk, step) for chunk in range(tile.head_chunks.num_chunks) for step in range(steps_per_chunk)]
    rows = [[read(chunk, row_tile, step) for chunk, step in steps] for row_tile in range(num_row_tiles)]
    factors = [[lanes.const_f32(1.0)] * 4 for _ in rows]
    # bf16 has a wider range than f16: scale each query by a power of two.
    if tile.key_operand != tile.dtype:
        scaled = [_scale_to_f16(row) for row in rows]
        rows, factors = [row for row, _ in scaled], [factor for _, factor in scaled]
    pair_type = ir.VectorType.get((2,), utils.dtype_to_ir_type(tile.key_operand))
    registers = [
        lanes.bitcast(row[s][half], pair_type) for s in range(len(steps)) for row in rows for half in (0, 1)
    ]
    operand = fragments.array_from_registers(registers, layout, (tile.head_chunks.padded_dim, tile.tile_q))
    return operand, fragments.tile_from_fragments(factors)


def _scale_to_f16(row: list[list[ir.Value]]) -> tuple[list[list[ir.Value]], fragments.Fragment]:
    """Scale bf16 queries by a power of 2 into f16's range; return them and the inverse factors."""

    def as_f32(x: ir.Value) -> ir.Value:
        return arith.bitcast(lanes.f32(), x)

    def power_of_2(exponent: ir.Value) -> ir.Value:
        return as_f32(arith.shli(exponent, lanes.const(23)))

    # A bf16 is the upper half of an f32.
    pairs = [
        [as_f32(arith.shli(x, lanes.const(16))), as_f32(arith.andi(x, lanes.const(0xFFFF0000)))]
        for registers in row for x in registers
    ]  # fmt: skip
    # Largest magnitude of the query: of the lane's columns, then of the four lanes that hold the query.
    magnitudes = [lanes.ptx("abs.f32 $0, $1;", x, result_type=lanes.f32()) for pair in pairs for x in pair]
    amax = functools.reduce(arith.maxnumf, magnitudes)
    for distance in (1, 2):
        amax = arith.maxnumf(amax, lanes.shuffle(amax, "bfly", lanes.const(distance)))
    # Its exponent, clipped so that factor and inverse are normal numbers.
    exponent = arith.shrui(arith.bitcast(lanes.i32(), amax), lanes.const(23))
    exponent = arith.minsi(arith.maxsi(exponent, lanes.const(QUERY_BITS + 1)), lanes.const(254))
    factor = power_of_2(arith.subi(lanes.const(254 + QUERY_BITS), exponent))
    inverse = power_of_2(arith.subi(exponent, lanes.const(QUERY_BITS)))
    scaled = [pack_16bit(arith.mulf(a, factor), arith.mulf(b, factor), jnp.float16) for a, b in pairs]
    _, t = lanes.lane_row_and_pair()
    # A column of the scores is a row of the queries; the lanes that hold this row have its factor.
    inverses = [lanes.shuffle(inverse, "idx", lanes.add(lanes.times(t, 8), 4 * i)) for i in (0, 1)]
    return [scaled[i : i + 2] for i in range(0, len(scaled), 2)], inverses * 2


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
    types = ref_type(tile.k_dtype.itemsize, tile.head_chunks.width), tile.query_layout
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
            for a_operand in _key_operands(keys.load(chunk, pair), tile):
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


def _key_operands(loaded: Sequence[ir.Value], tile: WarpTile) -> list[Sequence[ir.Value]]:
    """Return the A operands of one ldmatrix: one of 16-bit keys, two of 8-bit keys."""
    if tile.k_dtype.itemsize == 2:
        return [loaded]
    dequantize = functools.partial(dequantize_to_f16x2, has_fp8_conversion=tile.has_fp8_conversion)
    dequantized = [dequantize(x, tile.k_dtype, ADJACENT_BYTES) for x in loaded]
    pairs = (dequantized[:2], dequantized[2:])
    return [(a[0], b[0], a[1], b[1]) for a, b in pairs]


# ------------------------------------------------------------------------------------- row maximum
def _warp_row_max(x: Tile, *, tile: WarpTile) -> Tile:
    warp_max = x.reshape(WARPS, WARP_KEYS, -1).max(axis=1, keepdims=True)
    return jnp.broadcast_to(warp_max, (WARPS, WARP_KEYS, x.shape[1])).reshape(x.shape)


@with_fallback(_warp_row_max)
def warp_row_max(x: Tile, *, tile: WarpTile) -> Tile:
    """Return each query's maximum over a warp's keys, repeated in all the warp's rows: [64, tile_q]."""
    return plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=tile.scores_type)(_warp_row_max_by_lanes)(x)


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
        WGMMA,
        [WGMMA] * tile.num_accs,
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
            for a_operand in _value_operands(loaded, tile):
                operands = zip(sums[acc_index], b_operands, strict=True)
                sums[acc_index] = [mma_m16n8k16(acc, a_operand, b, tile.value_operand) for acc, b in operands]
                acc_index += 1
    return tuple(fragments.tile_from_fragments(columns) for columns in sums)


def _value_operands(loaded: Sequence[ir.Value], tile: WarpTile) -> list[Sequence[ir.Value]]:
    """Return the A operands of one transposing ldmatrix: 16 columns of a head by 16 keys each.

    For 8-bit values, rows g and g + 8 are columns 2 g and 2 g + 1, because ldmatrix transposes pairs of
    columns.
    """
    if tile.v_dtype.itemsize == 2:
        keys_low, keys_high, next_low, next_high = loaded
        return [(keys_low, next_low, keys_high, next_high)]
    dequantize = functools.partial(dequantize_to_f16x2, has_fp8_conversion=tile.has_fp8_conversion)
    dequantized = [dequantize(x, tile.v_dtype, ALTERNATING_BYTES) for x in loaded]
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


# ------------------------------------------------------------------------------------- results
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
    types = plgpu.RefType(), [WGMMA] * tile.num_accs, WGMMA, WGMMA
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(functools.partial(_store_outputs_by_lanes, tile=tile))(outputs_s, list(accs), row_max, row_sum)


def _store_outputs_by_lanes(
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
