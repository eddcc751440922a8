"""paged_decode: attention of each request's last few tokens to its cached past."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.checks import require, require_one_of, require_shape, unsupported
from pallas_kernels.paged_decode.kernel import LOG2E, Shape, decode_partials
from pallas_kernels.paged_decode.merge import merge_partials
from pallas_kernels.paged_decode.schedule import Schedule, make_schedule
from pallas_kernels.paged_decode.tiles import Tiles, default_tiles
from pallas_kernels.shared.head_dims import head_cut
from pallas_kernels.shared.score import Score
from pallas_kernels.support import why_not_decode


def paged_decode(
    query: Float[Array, "tokens q_heads head_dim"],
    k_cache: Shaped[Array, "..."],
    v_cache: Shaped[Array, "..."],
    block_table: Int32[Array, "reqs max_blocks"],
    seq_lens: Int32[Array, " reqs"],
    *,
    score: Score,
    layout: str = "NHD",
    decode_query_len: int = 1,
    sinks: Float[Array, " q_heads"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    schedule: Schedule | None = None,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Attends the last `decode_query_len` tokens of each request to its keys, those tokens' own included.

    Args:
        query: `decode_query_len` tokens of each request, one request after the other.
        k_cache: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim].
            Keys and values that no query sees may be anything.
        v_cache: As k_cache.
        block_table: `block_table[r, i]` holds keys `i * block_size` onward of request r. Entries of blocks
            that no query sees are never used.
        seq_lens: Keys of each request. 0 marks a padding row.
        score: Static: scale, mask, soft cap.
        layout: Static: "NHD" or "HND".
        decode_query_len: Static: tokens of each request, 1 to 8.
        sinks: One more score of each head, without a value.
        alibi_slopes: Slope of each head.
        schedule: make_schedule's for the same seq_lens, score and tiles; made here when None.
        tiles: Static. Chosen from the shapes when None.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        Output in query.dtype and the natural log of the softmax's denominator, f32. Rows without a key are 0
        and -inf.

    Raises:
        ValueError: Shapes disagree.
        NotImplementedError: There is no kernel for this request; the message says why.
    """
    require_one_of("layout", layout, ("NHD", "HND"))
    is_hnd = layout == "HND"
    tokens, q_heads, head_dim = query.shape
    reqs = seq_lens.shape[0]
    _, block_size, kv_heads, _ = (k_cache.shape[i] for i in ((0, 2, 1, 3) if is_hnd else (0, 1, 2, 3)))
    require_shape(
        "query", query.shape, (reqs * decode_query_len, q_heads, k_cache.shape[3]), "tokens, q_heads"
    )
    require_shape("v_cache", v_cache.shape, k_cache.shape, "as k_cache")
    require_shape("block_table", block_table.shape, (reqs, block_table.shape[1]), "reqs, max_blocks")
    require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
    reason = why_not_decode(
        dtype=query.dtype,
        cache_dtype=k_cache.dtype,
        head_dim=head_dim,
        block_size=block_size,
        group=q_heads // kv_heads,
        decode_query_len=decode_query_len,
    )
    if reason is not None:
        raise unsupported("paged_decode", reason, "Use another implementation")

    group = q_heads // kv_heads
    rows = group * decode_query_len
    tiles = default_tiles(head_dim, rows=rows) if tiles is None else tiles
    cut, n, row_tiles = head_cut(head_dim), tiles.row_tile(rows), tiles.row_tiles(rows)
    slots = tiles.slots(kv_heads, rows)
    if schedule is None:
        schedule = make_schedule(
            seq_lens, score=score, tiles=tiles, decode_query_len=decode_query_len, slots=slots
        )
    # TMA fills up a single tile of rows with zeros; several tiles, or one of odd size, are padded here.
    needs_padding = row_tiles > 1 or (rows > 8 and rows % 8 != 0)
    shape = Shape(
        kv_heads=kv_heads,
        row_tiles=row_tiles,
        rows=n if needs_padding else rows,
        group=group,
        query_len=decode_query_len,
        block_size=block_size,
        is_hnd=is_hnd,
        cut=cut,
        tile_q=n,
    )
    padding = row_tiles * n - rows if needs_padding else 0

    def packed(x: Array) -> Array:
        """[reqs, decode_query_len, kv_heads, group, ...] to [reqs, head_tiles, rows, ...]."""
        if decode_query_len > 1:
            x = jnp.swapaxes(x, 1, 2)
        x = x.reshape(x.shape[0], kv_heads, rows, *x.shape[4:])
        if padding:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *[(0, 0)] * (x.ndim - 3)))
        return x.reshape(x.shape[0], shape.head_tiles, shape.rows, *x.shape[3:])

    def unpacked(x: Array) -> Array:
        x = x.reshape(reqs, kv_heads, -1, *x.shape[3:])[:, :, :rows]
        x = x.reshape(reqs, kv_heads, decode_query_len, group, *x.shape[3:])
        if decode_query_len > 1:
            x = jnp.swapaxes(x, 1, 2)
        return x.reshape(tokens, q_heads, *x.shape[4:])

    def per_query(x: Array | None) -> Array | None:
        """[q_heads] to [head_tiles, tile_q], times log2(e)."""
        if x is None:
            return None
        x = (x.astype(jnp.float32) * LOG2E).reshape(1, 1, kv_heads, group)
        x = packed(jnp.broadcast_to(x, (1, decode_query_len, kv_heads, group)))[0]
        return jnp.pad(x, ((0, 0), (0, n - shape.rows)))

    def cut_cache(cache: Array) -> Array:
        token_axis = 2 if is_hnd else 1
        part = min(block_size, tiles.tile_kv)
        return cut_head(cache.reshape(*cache.shape[:token_axis], -1, part, *cache.shape[token_axis + 1 :]))

    cut_head = lambda x: x.reshape(*x.shape[:-1], cut.chunks, cut.chunk) if cut.is_padded else x
    sinks_of_query = per_query(sinks)
    results = decode_partials(
        cut_head(packed(query.reshape(reqs, decode_query_len, kv_heads, group, head_dim))),
        cut_cache(k_cache),
        cut_cache(v_cache),
        block_table,
        seq_lens,
        per_query(alibi_slopes),
        sinks_of_query,
        schedule,
        shape=shape,
        score=score,
        tiles=tiles,
        interpret=interpret,
    )
    out, lse = merge_partials(
        results, sinks_of_query, schedule, shape=shape, tiles=tiles, interpret=interpret
    )
    return unpacked(out.reshape(*out.shape[:3], head_dim)), unpacked(lse).T


def schedule_for(
    seq_lens: jax.Array, *, score: Score, tiles: Tiles, kv_heads: int, group: int, decode_query_len: int
) -> Schedule:
    """The schedule that paged_decode makes for itself: make it once for all layers of a step."""
    slots = tiles.slots(kv_heads, group * decode_query_len)
    return make_schedule(seq_lens, score=score, tiles=tiles, decode_query_len=decode_query_len, slots=slots)
