"""Scores of the pairs that bits name, and -inf for the others."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import ROW, ROW_LAYOUT, TILE, require_layout
from pallas_kernels.shared.types import Rows, Tile

WORD_BITS = 32  # bits


def _by_shifts(words: tuple[Rows, ...], *, shape: tuple[int, int]) -> Tile:
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    bits = jnp.zeros(shape, jnp.int32)
    for nth, word in enumerate(words):
        place = jnp.clip(column - nth * WORD_BITS, 0, WORD_BITS - 1)
        mine = lax.shift_right_logical(lax.broadcast_in_dim(word, shape, [0]), place) & 1
        bits = jnp.where(lax.div(column, jnp.int32(WORD_BITS)) == nth, mine, bits)
    return bits != 0


@with_fallback(lambda s, words: jnp.where(_by_shifts(words, shape=s.shape), s, -jnp.inf))
def apply_bit_mask(s: Tile, words: tuple[Rows, ...]) -> Tile:
    """Scores where the row's bit of the column is set, elsewhere -inf.

    A thread has two neighbours of each eight columns: which bits these are it knows but for one shift. Of
    LLVM's comparisons ptxas makes a shift for each score, of these it makes R2P.

    Args:
        s: A tile, f32.
        words: One int32 each row: bit i of word w is column 32 w + i.
    """

    @plgpu.inline_mgpu(
        arg_types=(TILE, *[ROW] * len(words)),
        return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, layout=TILE),
    )
    def select(
        _ctx: mgpu.LaunchContext, s: mgpu.FragmentedArray, *words: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        _, pair = lanes.lane_row_and_pair()
        shifted = [
            [
                arith.shrui(row, lanes.times(pair, 2))
                for row in [lanes.bits(row, lanes.i32()) for row in _rows(word)]
            ]
            for word in words
        ]

        def one(x: ir.Value, row: ir.Value, bit: int) -> ir.Value:
            test = f"and.b32 t, $2, {1 << bit:#x}; setp.ne.u32 p, t, 0;"
            code = f"{{ .reg .pred p; .reg .b32 t; {test} selp.f32 $0, $1, 0fFF800000, p; }}"
            return lanes.ptx(code, x, row, of=lanes.f32())

        columns = [
            [
                one(x, shifted[8 * nth // WORD_BITS][i // 2], 8 * nth % WORD_BITS + i % 2)
                for i, x in enumerate(four)
            ]
            for nth, four in enumerate(fragments.numbers(s))
        ]
        return fragments.array_of(columns)

    return select(s, *words)


@with_fallback(_by_shifts)
def unpack_bit_mask(words: tuple[Rows, ...], *, shape: tuple[int, int]) -> Tile:
    """Whether the row's bit of the column is set: Bool, of `shape`; `words` as apply_bit_mask'."""
    return apply_bit_mask.on_gpu(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE), words) == 0


def _rows(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Those of row g, and of row g + 8."""
    require_layout(array.layout, ROW_LAYOUT)
    return list(array.registers.flat)
