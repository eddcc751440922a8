"""The kernel of cache_read: a thread block copies the keys of one request and head to a tile of rows.

    one warpgroup                                        shared memory
    ------------------------------------------------     -------------------------------
    request of the tile; exit if there is none
    ids of the blocks that hold its keys
    TMA: keys of each block, their token scales ----->   stored [num_chunks], token_scales
    wait loaded
    for each chunk of a head:
      registers: dequantize, multiply by scales <-----   stored
      16-bit rows ------------------------------------>  out [num_chunks]
    TMA: rows ------------------------> global memory <- out

The steps of a thread block do not overlap. Several thread blocks per SM run at the same time instead.

Without TMA, the keys pass through registers: a warp loads whole rows from global memory, dequantizes them and
stores them.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.dequant import dequantize_to_f32, load_dequantized
from pallas_kernels.shared.layouts import ROW, WGMMA, row_layout
from pallas_kernels.shared.memory import BULK_COPY, padded_slice, store_unoptimized, swizzled_smem
from pallas_kernels.shared.paged_kv import BlockTableRef, CacheTiling
from pallas_kernels.shared.types import Barriers, Interpret, Layout, Ref, Rows, Scalar, Tile, f32

TILE = 64  # keys per thread block


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheReadDims:
    """Static sizes of one call.

    Attributes:
        rows: Number of rows of the result, a multiple of TILE.
        kv_heads: Number of KV heads.
        tiling: Division of the cache's blocks into TMA copies.
        dtype: Dtype of the result.
        uses_tma: Whether TMA copies the keys; otherwise they pass through registers.
        has_fp8_conversion: Whether the GPU has an instruction that converts 8-bit floating-point numbers.
    """

    rows: int
    kv_heads: int
    tiling: CacheTiling
    dtype: np.dtype
    uses_tma: bool = True
    has_fp8_conversion: bool = True


class CacheReadInputs(NamedTuple):
    """Arrays that the kernel reads.

    Attributes:
        cache: Keys or values of the cache, reshaped by CacheTiling.tile_cache.
        token_scales: Scale of each token and head, f32, reshaped by CacheTiling.tile_scale; or None.
        channel_scales: Scale of each element of a head, f32 [kv_heads, num_chunks, width], or None.
        tiles: Request of each tile of rows (-1 for none), and position of the tile's first key, a multiple of
            TILE: int32 [rows / TILE, 2].
        block_table: Block ids of each request, int32 [reqs, max_blocks].
        first_keys: Position of the first requested key of each request, int32 [reqs].
        seq_lens: One past the position of the last requested key of each request, int32 [reqs].
    """

    cache: Ref
    token_scales: Ref
    channel_scales: Ref
    tiles: Ref
    block_table: Ref
    first_keys: Ref
    seq_lens: Ref


class CacheReadSmem(NamedTuple):
    """Shared memory of a thread block, and the barrier for the copies into it; without TMA all are None.

    Attributes:
        stored: Keys in the dtype of the cache, [num_chunks, TILE, width].
        token_scales: Scales of the tile's keys or values, f32 [TILE]; None without scales per token.
        out: Keys in 16 bits, [num_chunks, TILE, width].
        loaded: Barrier at which each copy arrives.
    """

    stored: Ref
    token_scales: Ref
    out: Ref
    loaded: Barriers


def read_tiles(inputs: CacheReadInputs, *, dims: CacheReadDims, interpret: Interpret = None) -> jax.Array:
    """Run the kernel and return [rows, kv_heads, num_chunks, chunk_dim] in 16 bits.

    Args:
        inputs: Arrays to read.
        dims: Static sizes of the call.
        interpret: Parameters of interpret mode, or None for a GPU.
    """
    head, has_token_scales = dims.tiling.head, inputs.token_scales is not None
    tile_shape = (head.num_chunks, TILE, head.width)
    num_copies = dims.tiling.copies_per_run * (head.num_chunks + has_token_scales)
    smem = CacheReadSmem(None, None, None, None)
    if dims.uses_tma:
        smem = CacheReadSmem(
            stored=swizzled_smem(tile_shape, inputs.cache.dtype),
            token_scales=plgpu.SMEM((TILE,), f32) if has_token_scales else None,
            out=swizzled_smem(tile_shape, dims.dtype),
            loaded=plgpu.Barrier(num_arrivals=num_copies),
        )
    return plgpu.kernel(
        functools.partial(read_body, dims=dims),
        out_type=jax.ShapeDtypeStruct(
            (dims.rows, dims.kv_heads, head.num_chunks, head.chunk_dim), dims.dtype
        ),
        scratch_types=[smem],
        # One grid axis: only the last may exceed 65,535, and the heads of a tile should run one after the
        # other.
        grid=(dims.rows // TILE * dims.kv_heads,),
        grid_names=("work_tile",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="cache_read",
        interpret=interpret,
    )(inputs)


def read_body(inputs: CacheReadInputs, out: Ref, smem: CacheReadSmem, *, dims: CacheReadDims) -> None:
    """Fill one tile of rows of one head; `out` is the result of `read_tiles`."""
    tiling, head_chunks = dims.tiling, dims.tiling.head
    is_quantized = inputs.cache.dtype.itemsize == 1
    work_tile, heads = lax.axis_index("work_tile"), jnp.int32(dims.kv_heads)
    tile, head = lax.div(work_tile, heads), lax.rem(work_tile, heads)
    columns = padded_slice(head_chunks.width, head_chunks.chunk_dim, tile * 0)
    req, first_key = inputs.tiles[tile, 0], inputs.tiles[tile, 1]

    def copies() -> Iterator[tuple[int, Scalar, Scalar]]:
        """Yield the first row in the tile, the block and the index in the block of each copy."""
        table = BlockTableRef(inputs.block_table, tiling.block_size)
        blocks = table.visible_blocks(req, inputs.first_keys[req], inputs.seq_lens[req])
        column, copy = tiling.locate(first_key)
        for j, block in enumerate(blocks.ids(column, tiling.copies_per_run)):
            yield j * tiling.tokens_per_copy, block, copy

    def load() -> None:
        for first_row, block, copy in copies():
            rows, index = (
                pl.ds(first_row, tiling.tokens_per_copy),
                tiling.gmem_index(block, copy, head),
            )
            for chunk in range(head_chunks.num_chunks):
                stored = inputs.cache.at[(*index, *head_chunks.gmem_index(chunk, tile * 0))]
                plgpu.copy_gmem_to_smem(stored, smem.stored.at[chunk, rows], smem.loaded)
            if inputs.token_scales is not None:
                scales = inputs.token_scales.at[block, head, copy]
                plgpu.copy_gmem_to_smem(scales, smem.token_scales.at[rows], smem.loaded, oob_mode=BULK_COPY)

    def apply_scale(x: Tile, chunk: int, token_scales: Rows | None, layout: Layout) -> Tile:
        if token_scales is not None:
            return x.astype(f32) * lax.broadcast_in_dim(token_scales, x.shape, [0])
        if inputs.channel_scales is not None:
            channels = inputs.channel_scales.at[head, chunk]
            scale = plgpu.load(channels, layout=layout.reduce(0), optimized=False)
            return x.astype(f32) * lax.broadcast_in_dim(scale, x.shape, [1])
        return x

    def read_by_tma() -> None:
        # Load all chunks, and wait until every copy has arrived.
        load()
        plgpu.barrier_wait(smem.loaded)
        # Dequantize in registers. TMA reads the rows from shared memory, so they must be committed first.
        for chunk in range(head_chunks.num_chunks):
            x = smem.stored.at[chunk]
            x = load_dequantized(x, dims.dtype) if is_quantized else plgpu.load(x, layout=WGMMA)
            has_scales = inputs.token_scales is not None
            token_scales = plgpu.load(smem.token_scales, layout=ROW) if has_scales else None
            smem.out[chunk] = apply_scale(x, chunk, token_scales, WGMMA).astype(dims.dtype)
        plgpu.commit_smem()
        # Store: TMA drops columns after the end of a chunk. The thread block must not exit before TMA has
        # read all rows.
        for chunk in range(head_chunks.num_chunks):
            rows = pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)
            plgpu.copy_smem_to_gmem(smem.out.at[chunk], out.at[rows, head, chunk, columns])
        plgpu.wait_smem_to_gmem(0)

    def read_through_registers() -> None:
        layout = row_layout(tiling.tokens_per_copy, head_chunks.width)
        # All loads are issued before anything is stored, so that their latencies overlap.
        loaded = []
        for first_row, block, copy in copies():
            stored = inputs.cache.at[tiling.gmem_index(block, copy, head)]
            x = plgpu.load(stored, layout=layout, optimized=False)
            token_scales = None
            if inputs.token_scales is not None:
                scales = inputs.token_scales.at[block, head, copy]
                token_scales = plgpu.load(scales, layout=layout.reduce(1), optimized=False)
            loaded.append((first_row, x, token_scales))
        for first_row, x, token_scales in loaded:
            if is_quantized:
                x = dequantize_to_f32(x, has_fp8_conversion=dims.has_fp8_conversion)
            rows = pl.ds(tile * TILE + first_row, tiling.tokens_per_copy)
            scaled = apply_scale(x, 0, token_scales, layout).astype(dims.dtype)
            store_unoptimized(out.at[rows, head, 0], scaled)

    pl.when(req >= 0)(read_by_tma if dims.uses_tma else read_through_registers)
