"""A thread block fills a tile of rows with one request's keys, of one head, or leaves at once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.dequant import swizzled_smem, widened
from pallas_kernels.shared.paged_kv import BlockTable, CacheCut
from pallas_kernels.shared.tma import padded_slice

TILE = 64  # keys of a thread block
W = plgpu.Layout.WGMMA
BULK = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # contiguous, so without a tensor map
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
    in_cache: CacheCut
    dtype: np.dtype


def read_tiles(
    cache: jax.Array,
    per_token: jax.Array | None,
    per_channel: jax.Array | None,
    tiles: jax.Array,
    block_table: jax.Array,
    first_keys: jax.Array,
    seq_lens: jax.Array,
    *,
    shape: Shape,
    interpret: Any = None,
) -> jax.Array:
    """Keys in 16 bits: [rows, kv_heads, chunks, chunk].

    Args:
        cache: `cut_cache`'s.
        per_token: f32 scales, `cut_scales`', or None.
        per_channel: f32 scales [kv_heads, chunks, width], or None.
        tiles: int32 [rows / TILE, 2]: the request that each tile of rows is for, or -1, and the first of its
            keys there, a multiple of TILE.
        block_table: int32 [reqs, max_blocks].
        first_keys: int32 [reqs].
        seq_lens: int32 [reqs].
        shape: The call's static sizes.
        interpret: Interpret-mode parameters, or None for a GPU.
    """
    in_cache, cut = shape.in_cache, shape.in_cache.head
    is_narrow = cache.dtype.itemsize == 1
    copies = in_cache.copies * (cut.chunks + (per_token is not None))

    def body(  # type: ignore[no-untyped-def]
        cache_g,
        token_g,  # or None
        channel_g,  # or None
        tiles_g,
        table_g,
        first_g,
        lens_g,
        out_g,
        stored_s,  # [chunks, TILE, width] in SMEM
        token_s,  # [TILE] in SMEM, or None
        out_s,  # [chunks, TILE, width] in SMEM
        loaded,
    ):
        item, heads = lax.axis_index("item"), jnp.int32(shape.kv_heads)
        tile, head = lax.div(item, heads), lax.rem(item, heads)
        columns = padded_slice(cut.width, cut.chunk, tile * 0)
        row, first_key = tiles_g[tile, 0], tiles_g[tile, 1]

        def load() -> None:
            wanted = BlockTable(table_g, in_cache.block_size).seen(row, first_g[row], lens_g[row])
            nth = in_cache.copy_of(first_key)
            for j, block in enumerate(wanted.ids(in_cache.column_of(first_key), in_cache.copies)):
                to, at = pl.ds(j * in_cache.rows, in_cache.rows), in_cache.at(block, nth, head)
                for chunk in range(cut.chunks):
                    stored = cache_g.at[(*at, *cut.at(chunk, tile * 0))]
                    plgpu.copy_gmem_to_smem(stored, stored_s.at[chunk, to], loaded)
                if token_g is not None:
                    scales = token_g.at[block, head, nth]
                    plgpu.copy_gmem_to_smem(scales, token_s.at[to], loaded, oob_mode=BULK)

        def scaled(x: Any, chunk: int) -> Any:
            if token_g is not None:
                scale = plgpu.load(token_s, layout=W.reduce(1))
                return x.astype(f32) * lax.broadcast_in_dim(scale, x.shape, [0])
            if channel_g is not None:
                scale = plgpu.load(channel_g.at[head, chunk], layout=W.reduce(0), optimized=False)
                return x.astype(f32) * lax.broadcast_in_dim(scale, x.shape, [1])
            return x

        @pl.when(row >= 0)
        def read() -> None:
            load()
            plgpu.barrier_wait(loaded)
            for chunk in range(cut.chunks):
                x = stored_s.at[chunk]
                x = widened(x, shape.dtype) if is_narrow else plgpu.load(x, layout=W)
                out_s[chunk] = scaled(x, chunk).astype(shape.dtype)
            plgpu.commit_smem()
            for chunk in range(cut.chunks):  # TMA drops what is past the end of a chunk
                to = out_g.at[pl.ds(pl.multiple_of(tile * TILE, TILE), TILE), head, chunk, columns]
                plgpu.copy_smem_to_gmem(out_s.at[chunk], to)
            plgpu.wait_smem_to_gmem(0)

    tile_shape = (cut.chunks, TILE, cut.width)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shape.rows, shape.kv_heads, cut.chunks, cut.chunk), shape.dtype),
        scratch_types=[
            swizzled_smem(tile_shape, cache.dtype),
            None if per_token is None else plgpu.SMEM((TILE,), f32),
            swizzled_smem(tile_shape, shape.dtype),
            plgpu.Barrier(num_arrivals=copies),
        ],
        # One axis: only the last may be longer than 65,535, and heads of a tile are to follow each other.
        grid=(shape.rows // TILE * shape.kv_heads,),
        grid_names=("item",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="cache_read",
        interpret=interpret,
    )(cache, per_token, per_channel, tiles, block_table, first_keys, seq_lens)
