"""cache_read: keys or values of each request, one after the other, in 16 bits."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.cache_read.kernel import TILE, Inputs, Shape, read_tiles
from pallas_kernels.checks import (
    require,
    require_axes,
    require_one_of,
    require_positive,
    require_shape,
    unsupported,
)
from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.shared.head_dims import head_chunks
from pallas_kernels.shared.paged_kv import CacheTiling, cache_dims
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_read


def padded_len(max_blocks: int, block_size: int) -> int:
    """Rows that cache_read gives each request."""
    return -(-max_blocks * block_size // TILE) * TILE


def cache_read(
    cache: Shaped[Array, "..."],
    block_table: Int[Array, "reqs max_blocks"],
    first_keys: Int[Array, " reqs"],
    seq_lens: Int[Array, " reqs"],
    *,
    dtype: DTypeLike,
    scale: Float[Array, "..."] | None = None,
    layout: str = "NHD",
    kv_start_loc: Int[Array, " reqs"] | None = None,
    buffer_len: int | None = None,
    interpret: Interpret = None,
) -> Shaped[Array, "rows kv_heads head_dim"]:
    """Key i of each request r in row `kv_start_loc[r] + i`, for i from `first_keys[r]` to `seq_lens[r]`.

    The rows between are garbage. The time follows what is read, the memory `buffer_len`.

    Args:
        cache: Keys or values: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads,
            block_size, head_dim]; of 8 bits, or of `dtype`.
        block_table: `block_table[r, i]` holds keys `i * block_size` onward of request r. Entries of blocks
            without a key that is wanted are never used.
        first_keys: First key wanted of each request; the TILE keys around it are written, too, and may be
            garbage.
        seq_lens: One past the last, at most the keys that the table has room for; TILE likewise.
        dtype: Static: what to read into: bfloat16 or float16.
        scale: Multiplies what is stored: a scalar, [kv_heads], [kv_heads, head_dim], or per token and head
            [blocks, kv_heads, block_size]. None = 1.
        layout: Static: "NHD" or "HND".
        kv_start_loc: Row of each request's key 0, a multiple of TILE; below 0 where no early key is wanted.
            What requests write must lie apart and within the rows. None = `padded_len` rows each.
        buffer_len: Static: rows of the output, a multiple of TILE; given with kv_start_loc.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Raises:
        ValueError: Shapes disagree, or kv_start_loc comes without buffer_len.
        NotImplementedError: There is no kernel for this request, or it is differentiated.
    """
    is_hnd = layout == "HND"
    _check(cache, block_table, first_keys, seq_lens, scale, dtype=dtype, layout=layout)
    blocks, block_size, kv_heads, head_dim = cache_dims(cache, is_hnd=is_hnd)
    reqs, max_blocks = block_table.shape
    starts, rows = _rows_of(kv_start_loc, buffer_len, reqs=reqs, padded=padded_len(max_blocks, block_size))
    if 0 in (blocks, reqs, max_blocks, rows):
        return jnp.zeros((rows, kv_heads, head_dim), dtype)
    cache, scale = forbid_kernel_derivative((cache, scale), "cache_read", "Read the cache by jax.numpy")
    firsts, lens = first_keys.astype(jnp.int32), seq_lens.astype(jnp.int32)
    cut = head_chunks(head_dim, itemsize=cache.dtype.itemsize)
    in_cache = CacheTiling(block_size=block_size, tile_kv=TILE, is_hnd=is_hnd, head=cut)
    per_token, per_channel = _scales(scale, in_cache, kv_heads)
    inputs = Inputs(
        cache=in_cache.tile_cache(cache),
        per_token=per_token,
        per_channel=per_channel,
        tiles=_tiles(starts.astype(jnp.int32), firsts, lens, rows),
        block_table=block_table.astype(jnp.int32), first_keys=firsts, seq_lens=lens,
    )  # fmt: skip
    shape = Shape(rows=rows, kv_heads=kv_heads, in_cache=in_cache, dtype=jnp.dtype(dtype))
    return read_tiles(inputs, shape=shape, interpret=interpret).reshape(rows, kv_heads, head_dim)


def _check(
    cache: Array,
    block_table: Array,
    first_keys: Array,
    seq_lens: Array,
    scale: Array | None,
    *,
    dtype: DTypeLike,
    layout: str,
) -> None:
    """See cache_read's Raises."""
    require_one_of("layout", layout, ("NHD", "HND"))
    require_axes(4, cache=cache)
    require_axes(2, block_table=block_table)
    require_axes(1, first_keys=first_keys, seq_lens=seq_lens)
    blocks, block_size, kv_heads, head_dim = cache_dims(cache, is_hnd=layout == "HND")
    require_positive(kv_heads=kv_heads)
    for name, lens in (("first_keys", first_keys), ("seq_lens", seq_lens)):
        require_shape(name, lens.shape, block_table.shape[:1], "reqs")
    if scale is not None:
        shapes = ((), (kv_heads,), (kv_heads, head_dim), (blocks, kv_heads, block_size))
        require_one_of("scale's shape", tuple(jnp.shape(scale)), shapes)
    reason = why_not_read(
        dtype=dtype, cache_dtype=cache.dtype, head_dim=head_dim, block_size=block_size, layout=layout
    )
    if reason is not None:
        raise unsupported("cache_read", reason, "Use another implementation")


def _rows_of(
    kv_start_loc: Array | None, buffer_len: int | None, *, reqs: int, padded: int
) -> tuple[Array, int]:
    """Row of each request's key 0, and how many rows there are; `padded` each where nobody says."""
    if kv_start_loc is None:
        require(buffer_len is None, "buffer_len", "be None without kv_start_loc", buffer_len)
        return jnp.arange(reqs, dtype=jnp.int32) * padded, reqs * padded
    require_axes(1, kv_start_loc=kv_start_loc)
    require_shape("kv_start_loc", kv_start_loc.shape, (reqs,), "reqs")
    is_whole = buffer_len is not None and buffer_len >= 0 and buffer_len % TILE == 0
    require(is_whole, "buffer_len", f"be a multiple of {TILE} with kv_start_loc", buffer_len)
    assert buffer_len is not None
    return kv_start_loc, buffer_len


def _scales(scale: Array | None, in_cache: CacheTiling, kv_heads: int) -> tuple[Array | None, Array | None]:
    """Scales per token, or per channel; None where there are none."""
    if scale is None:
        return None, None
    if jnp.ndim(scale) == 3:
        return in_cache.tile_scales(scale.astype(jnp.float32)), None
    cut = in_cache.head
    scale = jnp.asarray(scale, jnp.float32)
    wide = scale if scale.ndim == 2 else scale.reshape(-1, 1)
    return None, in_cache.tile_channel_scales(
        jnp.broadcast_to(wide, (kv_heads, cut.num_chunks * cut.chunk_dim))
    )


def _tiles(starts: Array, firsts: Array, lens: Array, rows: int) -> Array:
    """[rows / TILE, 2]: the request that each tile of rows is for, or -1, and the first of its keys there."""
    row = jnp.arange(0, rows, TILE, dtype=jnp.int32)[:, None]
    first_key = row - starts[None, :]
    is_mine = (first_key >= 0) & (first_key < lens[None, :]) & (first_key + TILE > firsts[None, :])
    req = jnp.where(is_mine, jnp.arange(1, len(lens) + 1, dtype=jnp.int32)[None, :], 0).max(axis=1) - 1
    of_mine = jnp.where(is_mine, first_key, 0).max(axis=1)
    return jnp.stack([req, of_mine], axis=1)
