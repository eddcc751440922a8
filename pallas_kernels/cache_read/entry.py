"""cache_read: copy the keys or values of each request from a paged cache to a packed 16-bit array."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.architectures import ARCHITECTURES, kernel_architecture
from pallas_kernels.cache_read.kernel import TILE, CacheReadDims, CacheReadInputs, read_tiles
from pallas_kernels.checks import (
    forbid_kernel_derivative,
    require,
    require_axes,
    require_one_of,
    require_positive,
    require_shape,
    unsupported,
)
from pallas_kernels.shared.memory import HeadChunks, head_chunks
from pallas_kernels.shared.paged_kv import CacheTiling, cache_dims
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_read

FIX = "Gather the blocks with jax.numpy, as jattn does with implementation='xla'"


def padded_len(max_blocks: int, block_size: int) -> int:
    """Return the rows that cache_read gives each request if kv_start_loc is None."""
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
    """Copy key i of request r to row `kv_start_loc[r] + i`, for i from `first_keys[r]` to `seq_lens[r]`.

    The content of other rows is undefined. The time is proportional to the number of keys that are read, and
    the memory to `buffer_len`.

    Args:
        cache: Keys or values: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads,
            block_size, head_dim]; in 8 bits, or in `dtype`.
        block_table: `block_table[r, i]` is the block of keys `i * block_size` onward of request r. Entries of
            blocks without a requested key are never used.
        first_keys: Position of the first requested key of each request. The rows of earlier keys of its tile
            of TILE keys are also written, with undefined content.
        seq_lens: One past the position of the last requested key of each request, at most
            `max_blocks * block_size`. The remaining rows of the last tile are also written.
        dtype: Static: dtype of the result, bfloat16 or float16.
        scale: Factor of the stored numbers: a scalar, [kv_heads], [kv_heads, head_dim], or per token and head
            [blocks, kv_heads, block_size]. None = 1.
        layout: Static: "NHD" or "HND".
        kv_start_loc: Row of key 0 of each request, a multiple of TILE; negative if the first keys are not
            requested. The rows of different requests must not overlap, and must lie within the result. None =
            `padded_len` rows per request.
        buffer_len: Static: number of rows of the result, a multiple of TILE; required with kv_start_loc.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Raises:
        ValueError: If shapes disagree, or kv_start_loc is given without buffer_len.
        NotImplementedError: If the kernel does not support the request, or is differentiated.
    """
    is_hnd = layout == "HND"
    _check(cache, block_table, first_keys, seq_lens, scale, dtype=dtype, layout=layout)
    blocks, block_size, kv_heads, head_dim = cache_dims(cache, is_hnd=is_hnd)
    reqs, max_blocks = block_table.shape
    padded = padded_len(max_blocks, block_size)
    starts, num_rows = _start_rows(kv_start_loc, buffer_len, reqs=reqs, padded=padded)
    if 0 in (blocks, reqs, max_blocks, num_rows):
        return jnp.zeros((num_rows, kv_heads, head_dim), dtype)
    cache, scale = forbid_kernel_derivative((cache, scale), "cache_read", FIX)
    firsts, lens = first_keys.astype(jnp.int32), seq_lens.astype(jnp.int32)
    architecture = ARCHITECTURES[kernel_architecture(cache)]
    head = HeadChunks(1, head_dim, head_dim, head_dim, is_padded=False)
    if architecture.has_tma:
        head = head_chunks(head_dim, itemsize=cache.dtype.itemsize)
    tiling = CacheTiling(block_size=block_size, run_length=TILE, is_hnd=is_hnd, head=head)
    token_scales, channel_scales = _scales(scale, tiling, kv_heads)
    inputs = CacheReadInputs(
        cache=tiling.tile_cache(cache),
        token_scales=token_scales,
        channel_scales=channel_scales,
        tiles=_tiles(starts.astype(jnp.int32), firsts, lens, num_rows),
        block_table=block_table.astype(jnp.int32), first_keys=firsts, seq_lens=lens,
    )  # fmt: skip
    dims = CacheReadDims(
        rows=num_rows,
        kv_heads=kv_heads,
        tiling=tiling,
        dtype=jnp.dtype(dtype),
        uses_tma=architecture.has_tma,
        has_fp8_conversion=architecture.has_fp8_conversion,
    )
    return read_tiles(inputs, dims=dims, interpret=interpret).reshape(num_rows, kv_heads, head_dim)


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
    """Raise the errors that `cache_read` documents."""
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
        raise unsupported("cache_read", reason, FIX)


def _start_rows(
    kv_start_loc: Array | None, buffer_len: int | None, *, reqs: int, padded: int
) -> tuple[Array, int]:
    """Return the row of each request's first key, and the number of rows of the result."""
    if kv_start_loc is None:
        require(buffer_len is None, "buffer_len", "be None without kv_start_loc", buffer_len)
        return jnp.arange(reqs, dtype=jnp.int32) * padded, reqs * padded
    require_axes(1, kv_start_loc=kv_start_loc)
    require_shape("kv_start_loc", kv_start_loc.shape, (reqs,), "reqs")
    is_multiple = buffer_len is not None and buffer_len >= 0 and buffer_len % TILE == 0
    require(is_multiple, "buffer_len", f"be a multiple of {TILE} with kv_start_loc", buffer_len)
    assert buffer_len is not None
    return kv_start_loc, buffer_len


def _scales(scale: Array | None, tiling: CacheTiling, kv_heads: int) -> tuple[Array | None, Array | None]:
    """Return the scales per token and head, and the scales per channel; at most one is not None."""
    if scale is None:
        return None, None
    if jnp.ndim(scale) == 3:
        return tiling.tile_scale(scale.astype(jnp.float32)), None
    head = tiling.head
    scale = jnp.asarray(scale, jnp.float32)
    per_head = scale if scale.ndim == 2 else scale.reshape(-1, 1)
    shape = kv_heads, head.num_chunks * head.chunk_dim
    return None, tiling.tile_scale(jnp.broadcast_to(per_head, shape))


def _tiles(starts: Array, firsts: Array, lens: Array, num_rows: int) -> Array:
    """Return the request of each tile of rows (-1 for none) and its first key, [num_rows / TILE, 2]."""
    row = jnp.arange(0, num_rows, TILE, dtype=jnp.int32)[:, None]
    first_key = row - starts[None, :]
    is_owner = (first_key >= 0) & (first_key < lens[None, :]) & (first_key + TILE > firsts[None, :])
    req = jnp.where(is_owner, jnp.arange(1, len(lens) + 1, dtype=jnp.int32)[None, :], 0).max(axis=1) - 1
    owner_first_key = jnp.where(is_owner, first_key, 0).max(axis=1)
    return jnp.stack([req, owner_first_key], axis=1)
