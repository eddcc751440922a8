"""Masks of score tiles that are stored as bits: 32 columns of a row per word."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import ROW_LAYOUT, require_layout
from pallas_kernels.shared.layouts import ROW, WGMMA
from pallas_kernels.shared.types import Rows, Tile

WORD_BITS = 32


def _unpack_bit_mask(words: tuple[Rows, ...], *, shape: tuple[int, int]) -> Tile:
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    bits = jnp.zeros(shape, jnp.int32)
    for i, word in enumerate(words):
        position = jnp.clip(column - i * WORD_BITS, 0, WORD_BITS - 1)
        word_bits = lax.shift_right_logical(lax.broadcast_in_dim(word, shape, [0]), position) & 1
        bits = jnp.where(lax.div(column, jnp.int32(WORD_BITS)) == i, word_bits, bits)
    return bits != 0


@with_fallback(lambda s, words: jnp.where(_unpack_bit_mask(words, shape=s.shape), s, -jnp.inf))
def apply_bit_mask(s: Tile, words: tuple[Rows, ...]) -> Tile:
    """Return the scores where the row's bit of the column is set, elsewhere -inf.

    A thread holds two adjacent columns of each eight, so it knows its bit positions up to one shift. ptxas
    turns these tests into R2P, but makes one shift per score from the comparisons that LLVM emits.

    Args:
        s: Tile of scores, f32.
        words: Words of the mask, each int32 [rows]: bit i of word w is column 32 w + i.
    """

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, *[ROW] * len(words)),
        return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, layout=WGMMA),
    )
    def select(
        _ctx: mgpu.LaunchContext, s: mgpu.FragmentedArray, *words: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        _, pair = lanes.lane_row_and_pair()
        # Shift each row's words by the lane's first column, so that all lanes test the same constant bits.
        shifted = [
            [
                arith.shrui(row, lanes.times(pair, 2))
                for row in [lanes.bitcast(row, lanes.i32()) for row in _row_registers(word)]
            ]
            for word in words
        ]

        def mask_score(x: ir.Value, row: ir.Value, bit: int) -> ir.Value:
            test = f"and.b32 t, $2, {1 << bit:#x}; setp.ne.u32 p, t, 0;"
            code = f"{{ .reg .pred p; .reg .b32 t; {test} selp.f32 $0, $1, 0fFF800000, p; }}"
            return lanes.ptx(code, x, row, result_type=lanes.f32())

        row_tiles = [
            [
                [
                    mask_score(x, shifted[8 * n // WORD_BITS][2 * m + i // 2], 8 * n % WORD_BITS + i % 2)
                    for i, x in enumerate(fragment)
                ]
                for n, fragment in enumerate(columns)
            ]
            for m, columns in enumerate(fragments.row_tiles(s))
        ]
        return fragments.tile_from_row_tiles(row_tiles)

    return select(s, *words)


@with_fallback(_unpack_bit_mask)
def unpack_bit_mask(words: tuple[Rows, ...], *, shape: tuple[int, int]) -> Tile:
    """Return a bool tile that says whether the row's bit of the column is set.

    Args:
        words: Words of the mask; see `apply_bit_mask`.
        shape: Shape of the tile.
    """
    return apply_bit_mask.on_gpu(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA), words) == 0


def _row_registers(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """Return the registers of rows g and g + 8 of each 64 rows."""
    require_layout(array.layout, ROW_LAYOUT)
    return list(array.registers.flat)
