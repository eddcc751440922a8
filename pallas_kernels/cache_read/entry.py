"""cache_read: keys or values of each request, one after the other, in 16 bits."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.cache_read.kernel import TILE, Shape, read_tiles
from pallas_kernels.checks import require_one_of, unsupported
from pallas_kernels.shared.head_dims import head_cut
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
    interpret: Any = None,
) -> Shaped[Array, "keys kv_heads head_dim"]:
    """Keys `first_keys[r]` to `seq_lens[r]` of each request r, from row `r * padded_len` on.

    The rows between are garbage. The time follows what is read, the memory what could be.

    Args:
        cache: Keys or values: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads,
            block_size, head_dim]; of 8 bits, or of `dtype`.
        block_table: `block_table[r, i]` holds keys `i * block_size` onward of request r.
        first_keys: First key wanted of each request; a few before it may be read too.
        seq_lens: One past the last.
        dtype: Static: what to read into: bfloat16 or float16.
        scale: Multiplies what is stored: a scalar, [kv_heads], [kv_heads, head_dim], or per token and head
            [blocks, kv_heads, block_size]. None = 1.
        layout: Static: "NHD" or "HND".
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Raises:
        ValueError: Shapes disagree.
        NotImplementedError: There is no kernel for this request; the message says why.
    """
    require_one_of("layout", layout, ("NHD", "HND"))
    is_hnd = layout == "HND"
    blocks, block_size, kv_heads, head_dim = (cache.shape[i] for i in ((0, 2, 1, 3) if is_hnd else range(4)))
    reqs, max_blocks = block_table.shape
    if scale is not None:
        shapes = ((), (kv_heads,), (kv_heads, head_dim), (blocks, kv_heads, block_size))
        require_one_of("scale's shape", tuple(jnp.shape(scale)), shapes)
    reason = why_not_read(
        dtype=dtype, cache_dtype=cache.dtype, head_dim=head_dim, block_size=block_size, layout=layout
    )
    if reason is not None:
        raise unsupported("cache_read", reason, "Use another implementation")
    cut = head_cut(head_dim, itemsize=cache.dtype.itemsize)
    part = min(block_size, TILE)
    axis = 2 if is_hnd else 1
    cut_heads = lambda x: x.reshape(*x.shape[:-1], cut.chunks, cut.chunk)
    parts = cut_heads(cache.reshape(*cache.shape[:axis], -1, part, *cache.shape[axis + 1 :]))
    per_token, per_channel = None, None
    if scale is not None and jnp.ndim(scale) == 3:
        per_token = scale.astype(jnp.float32).reshape(blocks, kv_heads, -1, part)
    elif scale is not None:
        scale = jnp.asarray(scale, jnp.float32)
        wide = scale if scale.ndim == 2 else scale.reshape(-1, 1)
        per_channel = cut_heads(jnp.broadcast_to(wide, (kv_heads, head_dim)))
        per_channel = jnp.pad(per_channel, ((0, 0), (0, 0), (0, cut.width - cut.chunk)))
    rows = padded_len(max_blocks, block_size)
    out = read_tiles(
        parts,
        per_token,
        per_channel,
        block_table.astype(jnp.int32),
        first_keys.astype(jnp.int32),
        seq_lens.astype(jnp.int32),
        shape=Shape(
            rows=rows,
            kv_heads=kv_heads,
            block_size=block_size,
            is_hnd=is_hnd,
            cut=cut,
            dtype=jnp.dtype(dtype),
        ),
        interpret=interpret,
    )
    return out.reshape(reqs * rows, kv_heads, head_dim)
