"""A thread block fills a tile of rows with one request's keys, of one head, or leaves at once.

    one warpgroup                                     shared memory
    ---------------------------------------------     ---------------------------
    which request the tile is for: none, then done
    ids of the blocks that have its keys
    TMA: a block's keys, its scales a token -------->  stored [chunks], per_token
    wait loaded
    for each chunk of a head:
      registers: widened, times their scales <-------  stored
      in 16 bits ----------------------------------->  out [chunks]
    TMA: rows ---------------------> global memory <-  out

Nothing is in flight beside anything else of a thread block; other thread blocks of the SM fill the gaps.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.dequant import load_dequantized
from pallas_kernels.shared.memory import BULK_COPY, padded_slice, swizzled_smem
from pallas_kernels.shared.paged_kv import BlockTableRef, CacheTiling
from pallas_kernels.shared.types import Barriers, Interpret, Ref, Tile

TILE = 64  # keys of a thread block
W = plgpu.Layout.WGMMA
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static about a call.

    Attributes:
        rows: Rows of the output, a multiple of TILE.
        kv_heads: Key/value heads.
        in_cache: How a tile is fetched.
        dtype: Of the output.
    """

    rows: int
    kv_heads: int
    in_cache: CacheTiling
    dtype: np.dtype


class Inputs(NamedTuple):
    """What the kernel reads.

    Attributes:
        cache: `tile_cache`'s.
        per_token: f32 scales, `tile_scales`', or None.
        per_channel: f32 scales [kv_heads, chunks, width], or None.
        tiles: int32 [rows / TILE, 2]: the request that each tile of rows is for, or -1, and the first of its
            keys there, a multiple of TILE.
        block_table: int32 [reqs, max_blocks].
        first_keys: int32 [reqs].
        seq_lens: int32 [reqs].
    """

    cache: Ref
    per_token: Ref
    per_channel: Ref
    tiles: Ref
    block_table: Ref
    first_keys: Ref
    seq_lens: Ref


class Smem(NamedTuple):
    """Shared memory, and the barrier of what is loaded into it.

    Attributes:
        stored: [chunks, TILE, width], as the cache has it.
        per_token: [TILE] f32, or None.
        out: [chunks, TILE, width] in 16 bits.
        loaded: Arrived at by every copy.
    """

    stored: Ref
    per_token: Ref
    out: Ref
    loaded: Barriers


def read_tiles(inputs: Inputs, *, shape: Shape, interpret: Interpret = None) -> jax.Array:
    """Keys in 16 bits: [rows, kv_heads, chunks, chunk].

    Args:
        inputs: What is read.
        shape: The call's static sizes.
        interpret: Interpret-mode parameters, or None for a GPU.
    """
    cut, has_token_scales = shape.in_cache.head, inputs.per_token is not None
    tile_shape = (cut.num_chunks, TILE, cut.width)
    return plgpu.kernel(
        functools.partial(read_body, shape=shape),
        out_type=jax.ShapeDtypeStruct(
            (shape.rows, shape.kv_heads, cut.num_chunks, cut.chunk_dim), shape.dtype
        ),
        scratch_types=[
            Smem(
                stored=swizzled_smem(tile_shape, inputs.cache.dtype),
                per_token=plgpu.SMEM((TILE,), f32) if has_token_scales else None,
                out=swizzled_smem(tile_shape, shape.dtype),
                loaded=plgpu.Barrier(
                    num_arrivals=shape.in_cache.num_copies * (cut.num_chunks + has_token_scales)
                ),
            )
        ],
        # One axis: only the last may be longer than 65,535, and heads of a tile are to follow each other.
        grid=(shape.rows // TILE * shape.kv_heads,),
        grid_names=("item",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="cache_read",
        interpret=interpret,
    )(inputs)


def read_body(inputs: Inputs, out: Ref, smem: Smem, *, shape: Shape) -> None:
    """What a thread block does; `out` is read_tiles'."""
    in_cache, cut = shape.in_cache, shape.in_cache.head
    is_narrow = inputs.cache.dtype.itemsize == 1
    item, heads = lax.axis_index("item"), jnp.int32(shape.kv_heads)
    tile, head = lax.div(item, heads), lax.rem(item, heads)
    columns = padded_slice(cut.width, cut.chunk_dim, tile * 0)
    row, first_key = inputs.tiles[tile, 0], inputs.tiles[tile, 1]

    def load() -> None:
        blocks_of = BlockTableRef(inputs.block_table, in_cache.block_size)
        wanted = blocks_of.visible(row, inputs.first_keys[row], inputs.seq_lens[row])
        nth = in_cache.copy_index(first_key)
        for j, block in enumerate(wanted.ids(in_cache.table_column(first_key), in_cache.num_copies)):
            to, at = pl.ds(j * in_cache.rows, in_cache.rows), in_cache.gmem_index(block, nth, head)
            for chunk in range(cut.num_chunks):
                stored = inputs.cache.at[(*at, *cut.gmem_index(chunk, tile * 0))]
                plgpu.copy_gmem_to_smem(stored, smem.stored.at[chunk, to], smem.loaded)
            if inputs.per_token is not None:
                scales = inputs.per_token.at[block, head, nth]
                plgpu.copy_gmem_to_smem(scales, smem.per_token.at[to], smem.loaded, oob_mode=BULK_COPY)

    def scaled(x: Tile, chunk: int) -> Tile:
        if inputs.per_token is not None:
            scale = plgpu.load(smem.per_token, layout=W.reduce(1))
            return x.astype(f32) * lax.broadcast_in_dim(scale, x.shape, [0])
        if inputs.per_channel is not None:
            scale = plgpu.load(inputs.per_channel.at[head, chunk], layout=W.reduce(0), optimized=False)
            return x.astype(f32) * lax.broadcast_in_dim(scale, x.shape, [1])
        return x

    @pl.when(row >= 0)
    def read() -> None:
        load()
        plgpu.barrier_wait(smem.loaded)
        for chunk in range(cut.num_chunks):
            x = smem.stored.at[chunk]
            x = load_dequantized(x, shape.dtype) if is_narrow else plgpu.load(x, layout=W)
            smem.out[chunk] = scaled(x, chunk).astype(shape.dtype)
        plgpu.commit_smem()
        for chunk in range(cut.num_chunks):  # TMA drops what is past the end of a chunk
            to = out.at[pl.ds(pl.multiple_of(tile * TILE, TILE), TILE), head, chunk, columns]
            plgpu.copy_smem_to_gmem(smem.out.at[chunk], to)
        plgpu.wait_smem_to_gmem(0)
