"""A request's queries in the registers of every warp, as the B operand of its mma instructions."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jax.typing import DTypeLike

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import round_to, with_fallback
from pallas_kernels.ptx.layouts import MMA_RHS_LAYOUT, TILE, require_layout, require_tiles
from pallas_kernels.ptx.mma import pack_16bit
from pallas_kernels.shared.head_dims import HeadChunks
from pallas_kernels.shared.memory import swizzle_transforms
from pallas_kernels.shared.types import Layout, Ref, Tile

WARP_KEYS = 16  # keys of a tile that one warp processes
WARPS = 4
QUERY_BITS = 10  # bf16 queries are scaled so that the largest element is about 2 ** QUERY_BITS in f16
f32 = jnp.float32

type Operand = jax.Array
"""A request's queries as a B operand of the tensor core; in the fallback f32 [chunks, tile_q, width]."""


class WarpTile(NamedTuple):
    """Static sizes and dtypes of a tile of 64 keys, 16 for each warp, and a request's queries.

    Attributes:
        tile_q: Number of query rows.
        head_chunks: How head_dim is divided into chunks.
        dtype: Dtype of the queries.
        k_dtype: Stored dtype of the keys.
        v_dtype: Stored dtype of the values.
    """

    tile_q: int
    head_chunks: HeadChunks
    dtype: np.dtype
    k_dtype: np.dtype
    v_dtype: np.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a tile of scores."""
        return WARPS * WARP_KEYS, self.tile_q

    @property
    def key_operand(self) -> np.dtype:
        """Dtype in which the tensor core multiplies keys."""
        return operand_dtype(self.k_dtype, self.dtype)

    @property
    def value_operand(self) -> np.dtype:
        """Dtype in which the tensor core multiplies values."""
        return operand_dtype(self.v_dtype, self.dtype)

    @property
    def num_accs(self) -> int:
        """Number of accumulators: one for each 16 columns of a head."""
        return self.head_chunks.padded_dim // 16

    @property
    def scores_type(self) -> plgpu.ShapeDtypeStruct:
        """Type of a tile of scores and of an accumulator."""
        return plgpu.ShapeDtypeStruct(self.shape, f32, TILE)


def operand_dtype(stored: np.dtype, dtype: np.dtype) -> np.dtype:
    """Return the dtype that the tensor core multiplies; every 8-bit dtype is converted exactly to f16."""
    return jnp.dtype(dtype) if stored.itemsize == 2 else jnp.dtype(jnp.float16)


def ref_type(itemsize: int, width: int = 64) -> plgpu.RefType:
    """Return the reference type of a tile of `swizzled_smem`."""
    return plgpu.RefType(swizzle_transforms(itemsize, width))


def mma_rhs_layout(dtype: DTypeLike) -> Layout:
    """Return the layout of a B operand that every warp holds completely."""
    return plgpu.Layout.MMA_RHS(dtype, m_warps=4)


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
    layout = mma_rhs_layout(tile.key_operand)
    operand_type = plgpu.ShapeDtypeStruct(
        (tile.head_chunks.padded_dim, tile.tile_q), tile.key_operand, layout
    )
    run = plgpu.inline_mgpu(arg_types=(ref_type(2),), return_type=(operand_type, tile.scores_type))
    return run(functools.partial(_load_by_lanes, tile=tile, layout=layout.to_mgpu()))(q_s)


def _load_by_lanes(
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
        offset = ((chunk * num_row_tiles + row_tile) * (width // 64) + step // 4) * 1024

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
