"""Products of prefill by warps that each own 16 of a warpgroup's 64 query rows, as in FlashAttention-2.

Scores and outputs are accumulators in registers. Probabilities go from the layout of an accumulator to that
of an A operand without leaving the lane's registers. Every warp reads all keys and values of a tile from
shared memory.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.typing import DTypeLike

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import round_to, with_fallback
from pallas_kernels.ptx.layouts import TILE
from pallas_kernels.ptx.mma import LdmatrixTile, mma_m16n8k16, pack_16bit
from pallas_kernels.shared.memory import HeadChunks, swizzle_bytes, swizzle_transforms
from pallas_kernels.shared.types import Ref, Tile

ROWS = 64  # query rows of a warpgroup
K = 16  # elements that one mma.sync sums over
f32 = jnp.float32
TILE_REF = plgpu.RefType(swizzle_transforms(2))


def _ldmatrix_tile(ref: ir.Value, rows: int, width: int, *, by_warp: bool) -> LdmatrixTile:
    return LdmatrixTile(ref, rows=rows, row_bytes=2 * width, swizzle=swizzle_bytes(2, width), by_warp=by_warp)


def _steps(head: HeadChunks) -> list[tuple[int, int]]:
    """Return (chunk, step) of each 16 elements of a head; those past the end of a chunk are zeros."""
    return [(chunk, step) for chunk in range(head.num_chunks) for step in range(-(-head.chunk_dim // K))]


# ------------------------------------------------------------------------------------- scores
def _multiply_keys(q_s: Ref, k_s: Ref, *, head: HeadChunks, dtype: DTypeLike) -> Tile:
    return jnp.einsum("cqd,ckd->qk", q_s[...].astype(f32), k_s[...].astype(f32))


@with_fallback(_multiply_keys, reads_smem=True)
def multiply_keys(q_s: Ref, k_s: Ref, *, head: HeadChunks, dtype: DTypeLike) -> Tile:
    """Return Q K^T, f32 [64, tile_kv].

    Args:
        q_s: Queries in SMEM, [chunks, 64, width].
        k_s: Keys in SMEM, [chunks, tile_kv, width].
        head: Static: division of a head into chunks.
        dtype: Static: 16-bit dtype of queries and keys.
    """
    tile_kv = k_s.shape[1]
    result = plgpu.ShapeDtypeStruct((ROWS, tile_kv), f32, TILE)
    run = plgpu.inline_mgpu(arg_types=(TILE_REF, TILE_REF), return_type=result)
    return run(functools.partial(_multiply_keys_by_lanes, tile_kv=tile_kv, head=head, dtype=dtype))(q_s, k_s)


def _multiply_keys_by_lanes(
    _ctx: mgpu.LaunchContext,
    q_s: ir.Value,
    k_s: ir.Value,
    *,
    tile_kv: int,
    head: HeadChunks,
    dtype: DTypeLike,
) -> mgpu.FragmentedArray:
    queries = _ldmatrix_tile(q_s, ROWS, head.width, by_warp=True)
    keys = _ldmatrix_tile(k_s, tile_kv, head.width, by_warp=False)
    scores: list[Sequence[ir.Value]] = [[lanes.const_f32(0.0)] * 4 for _ in range(tile_kv // 8)]
    for chunk, step in _steps(head):
        a_operand = queries.load(chunk, step)
        for first_row in range(0, tile_kv, 16):
            # Keys are the columns of the product: two B operands of 8 keys by 16 elements.
            low, next_low, high, next_high = keys.load(chunk, step, first_row=first_row)
            for i, b_operand in enumerate(((low, high), (next_low, next_high)), first_row // 8):
                scores[i] = mma_m16n8k16(scores[i], a_operand, b_operand, dtype)
    return fragments.tile_from_fragments(scores)


# ------------------------------------------------------------------------------------- values
def _multiply_values(
    accs: Sequence[Tile], p: Tile, v_s: Ref, *, head: HeadChunks, dtype: DTypeLike
) -> tuple[Tile, ...]:
    products = jnp.einsum("qk,ckd->cqd", round_to(p, dtype), v_s[...].astype(f32))
    return tuple(acc + product for acc, product in zip(accs, products, strict=True))


@with_fallback(_multiply_values, reads_smem=True)
def multiply_values(
    accs: Sequence[Tile], p: Tile, v_s: Ref, *, head: HeadChunks, dtype: DTypeLike
) -> tuple[Tile, ...]:
    """Return accs + P V.

    Args:
        accs: One accumulator f32 [64, width] per chunk of a head.
        p: Probabilities, f32 [64, tile_kv], which are rounded to `dtype`.
        v_s: Values in SMEM, [chunks, tile_kv, width]; all must be finite.
        head: Static: division of a head into chunks.
        dtype: Static: 16-bit dtype of the values.
    """
    tile_kv = v_s.shape[1]
    result = plgpu.ShapeDtypeStruct((ROWS, head.width), f32, TILE)
    run = plgpu.inline_mgpu(arg_types=([TILE] * len(accs), TILE, TILE_REF), return_type=(result,) * len(accs))
    body = functools.partial(_multiply_values_by_lanes, tile_kv=tile_kv, head=head, dtype=dtype)
    return tuple(run(body)(list(accs), p, v_s))


def _multiply_values_by_lanes(
    _ctx: mgpu.LaunchContext,
    accs: Sequence[mgpu.FragmentedArray],
    p: mgpu.FragmentedArray,
    v_s: ir.Value,
    *,
    tile_kv: int,
    head: HeadChunks,
    dtype: DTypeLike,
) -> tuple[mgpu.FragmentedArray, ...]:
    values = _ldmatrix_tile(v_s, tile_kv, head.width, by_warp=False)
    sums: list[list[Sequence[ir.Value]]] = [list(fragments.column_fragments(acc)) for acc in accs]
    # An accumulator's fragments of 16 columns are an A operand when they are rounded.
    halves = [
        [pack_16bit(a, b, dtype), pack_16bit(c, d, dtype)] for a, b, c, d in fragments.column_fragments(p)
    ]
    for first_row in range(0, tile_kv, K):
        a_operand = halves[first_row // 8] + halves[first_row // 8 + 1]
        for chunk, step in _steps(head):
            # Two B operands of 16 values by 8 columns of a head.
            low, high, next_low, next_high = values.load(chunk, step, first_row=first_row, transpose=True)
            for i, b_operand in enumerate(((low, high), (next_low, next_high)), 2 * step):
                sums[chunk][i] = mma_m16n8k16(sums[chunk][i], a_operand, b_operand, dtype)
    return tuple(fragments.tile_from_fragments(columns) for columns in sums)
