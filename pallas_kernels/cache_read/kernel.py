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
from pallas_kernels.shared.head_dims import HeadCut
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
        block_size: Tokens of a cache block.
        is_hnd: Blocks are [kv_heads, block_size, head_dim].
        cut: The cut of head_dim.
        dtype: Of the output.
    """

    rows: int
    kv_heads: int
    block_size: int
    is_hnd: bool
    cut: HeadCut
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
        cache: [blocks, parts, part, kv_heads, chunks, chunk], or HND [blocks, kv_heads, parts, part, chunks,
            chunk].
        per_token: f32 scales [blocks, kv_heads, parts, part], or None.
        per_channel: f32 scales [kv_heads, chunks, width], or None.
        tiles: int32 [rows / TILE, 2]: the request that each tile of rows is for, or -1, and the first of its
            keys there, a multiple of TILE.
        block_table: int32 [reqs, max_blocks].
        first_keys: int32 [reqs].
        seq_lens: int32 [reqs].
        shape: The call's static sizes.
        interpret: Interpret-mode parameters, or None for a GPU.
    """
    max_blocks, cut = block_table.shape[1], shape.cut
    part, size = min(shape.block_size, TILE), shape.block_size
    blocks_per_tile = TILE // part
    is_narrow = cache.dtype.itemsize == 1
    copies = blocks_per_tile * (cut.chunks + (per_token is not None))

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
            low, high = first_g[row], lens_g[row]
            column = lax.div(first_key, jnp.int32(size))
            nth = lax.div(lax.rem(first_key, jnp.int32(size)), jnp.int32(part))
            # Blocks without a key that is wanted may not be there: the nearest with one stands in.
            first = lax.div(jnp.maximum(low, 0), jnp.int32(size))
            last = jnp.minimum(lax.div(high - 1, jnp.int32(size)), max_blocks - 1)
            ids = [table_g[row, jnp.clip(column + j, first, last)] for j in range(blocks_per_tile)]
            for j, block in enumerate(ids):
                tokens, to = pl.ds(0, part), pl.ds(j * part, part)
                at = (block, head, nth, tokens) if shape.is_hnd else (block, nth, tokens, head)
                for chunk in range(cut.chunks):
                    stored = cache_g.at[(*at, chunk, columns)]
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
