"""The queries of a request in every warp's registers, as the right operand of its products."""

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
from pallas_kernels.ptx.fallback import rounded_to, with_fallback
from pallas_kernels.ptx.layouts import RIGHT_LAYOUT, TILE, require_layout, require_tiles
from pallas_kernels.ptx.mma import pack_16bit
from pallas_kernels.shared.head_dims import HeadChunks
from pallas_kernels.shared.memory import swizzle_transforms
from pallas_kernels.shared.types import Layout, Ref, Tile

KEYS = 16  # of a warp
WARPS = 4
QUERY_BITS = 10  # bf16 queries become f16 with their largest element about 2 ** QUERY_BITS
f32 = jnp.float32

type Operand = jax.Array
"""A request's queries as a right operand of the tensor core; in the fallback f32 [chunks, tile_q, width]."""


class WarpTile(NamedTuple):
    """Static: a tile of 64 keys, of which each warp takes 16, and a request's queries.

    Attributes:
        tile_q: Query rows.
        cut: The cut of head_dim.
        dtype: The queries'.
        k_dtype: The keys', as they are stored.
        v_dtype: The values'.
    """

    tile_q: int
    cut: HeadChunks
    dtype: np.dtype
    k_dtype: np.dtype
    v_dtype: np.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Of scores."""
        return WARPS * KEYS, self.tile_q

    @property
    def key_operand(self) -> np.dtype:
        """What the tensor core multiplies keys as."""
        return operand_dtype(self.k_dtype, self.dtype)

    @property
    def value_operand(self) -> np.dtype:
        """What it multiplies values as."""
        return operand_dtype(self.v_dtype, self.dtype)

    @property
    def num_accs(self) -> int:
        """Accumulators: one for every 16 columns of a head."""
        return self.cut.padded_dim // KEYS

    @property
    def scores_type(self) -> plgpu.ShapeDtypeStruct:
        """The type of a tile of scores, and of an accumulator."""
        return plgpu.ShapeDtypeStruct(self.shape, f32, TILE)


def operand_dtype(stored: np.dtype, dtype: np.dtype) -> np.dtype:
    """What the tensor core multiplies: 8 bits have instructions to f16 only, and fit into it exactly."""
    return jnp.dtype(dtype) if stored.itemsize == 2 else jnp.dtype(jnp.float16)


def ref_type(itemsize: int, width: int = 64) -> plgpu.RefType:
    """A tile of swizzled_smem."""
    return plgpu.RefType(swizzle_transforms(itemsize, width))


def mma_rhs_layout(dtype: DTypeLike) -> Layout:
    """A right operand's, whole in every warp."""
    return plgpu.Layout.MMA_RHS(dtype, m_warps=4)


def _scaled_by_powers(q_s: Ref, *, tile: WarpTile) -> tuple[Operand, Tile]:
    q = q_s[...].astype(f32)
    if tile.key_operand == tile.dtype:
        return q, jnp.ones(tile.shape, f32)
    largest = jnp.abs(q).max(axis=(0, 2))
    exponent = jnp.clip(jnp.floor(jnp.log2(jnp.maximum(largest, 2.0**-116))) - QUERY_BITS, -126, 126)
    q = rounded_to(q * jnp.exp2(-exponent)[None, :, None], tile.key_operand)
    return q, jnp.broadcast_to(jnp.exp2(exponent)[None], tile.shape)


@with_fallback(_scaled_by_powers, reads_smem=True)
def load_query_fragments(q_s: Ref, *, tile: WarpTile) -> tuple[Operand, Tile]:
    """The queries as a right operand, and what scores are multiplied by: [64, tile_q].

    Args:
        q_s: [chunks, tile_q, width] in SMEM.
        tile: Static sizes.
    """
    layout = mma_rhs_layout(tile.key_operand)
    fragments_type = plgpu.ShapeDtypeStruct((tile.cut.padded_dim, tile.tile_q), tile.key_operand, layout)
    run = plgpu.inline_mgpu(arg_types=(ref_type(2),), return_type=(fragments_type, tile.scores_type))
    return run(functools.partial(_load, tile=tile, layout=layout.to_mgpu()))(q_s)


def _load(
    _ctx: mgpu.LaunchContext, q_s: ir.Value, *, tile: WarpTile, layout: mgpu.FragmentedLayout
) -> tuple[mgpu.FragmentedArray, mgpu.FragmentedArray]:
    """See load_query_fragments.

    Where keys are 8-bit, an operand's columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16 are a head's 4 t to
    4 t + 3: one register of keys holds four neighbours.
    """
    require_layout(layout, RIGHT_LAYOUT)
    g, t = lanes.lane_row_and_pair()
    is_narrow, width = tile.k_dtype.itemsize == 1, tile.cut.width
    require_tiles(ir.MemRefType(q_s.type), rows=tile.tile_q, row_bytes=2 * width, swizzle=128)
    row_tiles, per_chunk = tile.tile_q // 8, width // KEYS
    unit, inside = g, lanes.times(t, 4)  # of 16 bytes, turned by the swizzle; bytes in it
    if is_narrow:
        unit = arith.xori(g, arith.shrui(t, lanes.const(1)))
        inside = lanes.times(arith.andi(t, lanes.const(1)), 8)
    first = lanes.add(lanes.address(q_s), lanes.times(g, 128), lanes.times(unit, 16), inside)

    def read(chunk: int, row_tile: int, step: int) -> list[ir.Value]:
        """Two registers: the 16 columns of a step that this lane holds."""
        offset = ((chunk * row_tiles + row_tile) * (width // 64) + step // 4) * 1024
        at = lambda unit: arith.xori(first, lanes.const(unit * 16))
        if is_narrow:
            code = f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {offset}];"
            return lanes.several(code, at(step % 4 * 2), results=2, touches_memory=True)
        code = f"ld.shared.b32 $0, [$1 + {offset}];"
        return [lanes.ptx(code, at(step % 4 * 2 + half), touches_memory=True) for half in (0, 1)]

    steps = [(chunk, step) for chunk in range(tile.cut.num_chunks) for step in range(per_chunk)]
    rows = [[read(chunk, row_tile, step) for chunk, step in steps] for row_tile in range(row_tiles)]
    factors = [[lanes.number(1.0)] * 4 for _ in rows]
    if tile.key_operand != tile.dtype:  # bf16 has a wider range than f16
        scaled = [_scaled_row(row) for row in rows]
        rows, factors = [row for row, _ in scaled], [factor for _, factor in scaled]
    pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(tile.key_operand))
    registers = [lanes.bits(row[s][half], pair) for s in range(len(steps)) for row in rows for half in (0, 1)]
    operand = fragments.shaped(registers, layout, (tile.cut.padded_dim, tile.tile_q))
    return operand, fragments.array_of(factors)


def _scaled_row(row: list[list[ir.Value]]) -> tuple[list[list[ir.Value]], fragments.Four]:
    """bf16 queries as f16, times a power of 2 that keeps them in its range; and what takes it back."""
    as_f32 = lambda x: arith.bitcast(lanes.f32(), x)
    wide = [
        [as_f32(arith.shli(x, lanes.const(16))), as_f32(arith.andi(x, lanes.const(0xFFFF0000)))]
        for registers in row for x in registers
    ]  # fmt: skip
    magnitude = lambda x: lanes.ptx("abs.f32 $0, $1;", x, of=lanes.f32())
    largest = functools.reduce(arith.maxnumf, [magnitude(x) for pair in wide for x in pair])
    for distance in (1, 2):
        largest = arith.maxnumf(largest, lanes.shuffled(largest, "bfly", lanes.const(distance)))
    exponent = arith.shrui(arith.bitcast(lanes.i32(), largest), lanes.const(23))
    exponent = arith.minsi(arith.maxsi(exponent, lanes.const(QUERY_BITS + 1)), lanes.const(254))
    power = lambda e: as_f32(arith.shli(e, lanes.const(23)))
    factor = power(arith.subi(lanes.const(254 + QUERY_BITS), exponent))
    inverse = power(arith.subi(exponent, lanes.const(QUERY_BITS)))
    narrow = [pack_16bit(arith.mulf(a, factor), arith.mulf(b, factor), jnp.float16) for a, b in wide]
    _, t = lanes.lane_row_and_pair()
    # A column of the scores is a row of the queries: that row's lanes have its factor.
    of_column = [lanes.shuffled(inverse, "idx", lanes.add(lanes.times(t, 8), 4 * i)) for i in (0, 1)]
    return [narrow[i : i + 2] for i in range(0, len(narrow), 2)], of_column * 2
