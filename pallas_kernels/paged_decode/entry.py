"""paged_decode: attention of each request's last few tokens to its cached past."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.checks import require, require_one_of, require_positive, require_shape, unsupported
from pallas_kernels.list_tiles import MAX_PARTS
from pallas_kernels.paged_decode.kernel import decode_partials
from pallas_kernels.paged_decode.loader import cache_cut
from pallas_kernels.paged_decode.merge import merge_partials
from pallas_kernels.paged_decode.schedule import BlockList, Schedule, make_schedule
from pallas_kernels.paged_decode.step import LOG2E
from pallas_kernels.paged_decode.tiles import Tiles, default_tiles
from pallas_kernels.paged_decode.walk import Shape
from pallas_kernels.shared.head_dims import head_cut
from pallas_kernels.shared.paged_kv import sizes_of
from pallas_kernels.shared.score import Score
from pallas_kernels.support import why_not_decode

LIST_BLOCK_SIZES = (16, 32, 64, 128, 256)


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
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    block_list: BlockList | None = None,
    list_block_size: int | None = None,
    lists_tell_heads: bool = False,
    schedule: Schedule | None = None,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Attends the last `decode_query_len` tokens of each request to its keys, those tokens' own included.

    Args:
        query: `decode_query_len` tokens of each request, one request after the other.
        k_cache: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim].
            Keys and values that no query sees may be anything, and so may their scales. 8 bits, or as query.
        v_cache: As k_cache; may be of another dtype.
        block_table: `block_table[r, i]` holds keys `i * block_size` onward of request r. Entries of blocks
            that no query sees are never used.
        seq_lens: Keys of each request, at most those that the table has room for. 0 marks a padding row.
        score: Static: scale, mask, soft cap.
        layout: Static: "NHD" or "HND".
        decode_query_len: Static: tokens of each request, 1 to 8.
        k_scale: key = stored * k_scale: [], [kv_heads], or of 8-bit keys per token and head [blocks,
            kv_heads, block_size], so that a block's scales are one copy; None = 1.
        v_scale: The same for values, or per channel [kv_heads, head_dim].
        sinks: One more score of each head, without a value.
        alibi_slopes: Slope of each head.
        block_list: The sparse blocks to visit, all queries of a request the same; the score's mask holds
            inside them. None = all keys.
        list_block_size: Static: keys of a sparse block.
        lists_tell_heads: Static: bit PART_SHIFT + g of an id says whether query head g of the group sees the
            block; else all do.
        schedule: schedule_for's for the same seq_lens, score, tiles and list; made here when None.
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
    require(k_cache.ndim == 4, "k_cache", "have 4 axes", k_cache.shape)
    tokens, q_heads, head_dim = query.shape
    reqs = seq_lens.shape[0]
    _, block_size, kv_heads, _ = sizes_of(k_cache, is_hnd=is_hnd)
    require_shape(
        "query", query.shape, (reqs * decode_query_len, q_heads, k_cache.shape[3]), "tokens, q_heads"
    )
    require_shape("v_cache", v_cache.shape, k_cache.shape, "as k_cache")
    require_positive(decode_query_len=decode_query_len, kv_heads=kv_heads, q_heads=q_heads)
    scale_shapes = ((), (kv_heads,), (k_cache.shape[0], kv_heads, block_size))
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        require_shape(name, (q_heads,) if per_head is None else per_head.shape, (q_heads,), "q_heads")
    if k_scale is not None:
        require_one_of("k_scale's shape", k_scale.shape, scale_shapes)
    if v_scale is not None:
        require_one_of("v_scale's shape", v_scale.shape, (*scale_shapes, (kv_heads, head_dim)))
    require_shape("block_table", block_table.shape, (reqs, block_table.shape[1]), "reqs, max_blocks")
    if block_list is None:
        require(list_block_size is None, "list_block_size", "be None without block_list", list_block_size)
        require(not lists_tell_heads, "lists_tell_heads", "be False without block_list", lists_tell_heads)
    else:
        max_listed = block_list.ids.shape[2]
        require_shape("block_list.ids", block_list.ids.shape, (reqs, kv_heads, max_listed), "reqs, kv_heads")
        require_shape("block_list.counts", block_list.counts.shape, (reqs, kv_heads), "reqs, kv_heads")
        require_one_of("list_block_size", list_block_size, LIST_BLOCK_SIZES)
    if lists_tell_heads:
        group = q_heads // kv_heads
        rule = f"have at most {MAX_PARTS} of a kv head where lists tell them apart"
        require(group <= MAX_PARTS, "q_heads", rule, group)
    require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
    reason = why_not_decode(
        dtype=query.dtype,
        k_dtype=k_cache.dtype,
        v_dtype=v_cache.dtype,
        head_dim=head_dim,
        block_size=block_size,
        group=q_heads // kv_heads,
        decode_query_len=decode_query_len,
        has_token_scales=(
            k_scale is not None and k_scale.ndim == 3,
            v_scale is not None and v_scale.ndim == 3,
        ),
    )
    if reason is not None:
        raise unsupported("paged_decode", reason, "Use another implementation")
    if 0 in (*k_cache.shape, *block_table.shape):
        return jnp.zeros_like(query), jnp.full((q_heads, tokens), -jnp.inf, jnp.float32)

    group = q_heads // kv_heads
    rows = group * decode_query_len
    kv_dtypes = k_cache.dtype, v_cache.dtype
    if tiles is None:
        tiles = default_tiles(head_dim, rows=rows, kv_dtypes=kv_dtypes, has_lists=block_list is not None)
    cut = head_cut(head_dim, itemsize=min(dtype.itemsize for dtype in kv_dtypes))
    n, row_tiles = tiles.row_tile(rows), tiles.row_tiles(rows)
    if schedule is None:
        schedule = schedule_for(
            seq_lens,
            score=score,
            tiles=tiles,
            kv_heads=kv_heads,
            group=group,
            decode_query_len=decode_query_len,
            block_list=block_list,
            list_block_size=list_block_size,
            max_kv=block_table.shape[1] * block_size,
        )
    scheduled = reqs if block_list is None else reqs * kv_heads
    require_shape("schedule.unit_ends", schedule.unit_ends.shape, (scheduled,), "requests, or their kv heads")
    require(schedule.unit == tiles.unit, "schedule", f"have units of {tiles.unit} keys", schedule.unit)
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
        listed=list_block_size,
        lists_tell_heads=lists_tell_heads,
    )
    padding = row_tiles * n - rows if needs_padding else 0

    def packed(x: Array) -> Array:
        """[reqs, decode_query_len, kv_heads, group, ...] to [reqs, kv_heads * row_tiles, rows, ...]."""
        if decode_query_len > 1:
            x = jnp.swapaxes(x, 1, 2)
        x = x.reshape(x.shape[0], kv_heads, rows, *x.shape[4:])
        if padding:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *[(0, 0)] * (x.ndim - 3)))
        return x.reshape(x.shape[0], kv_heads * row_tiles, shape.rows, *x.shape[3:])

    def unpacked(x: Array) -> Array:
        x = x.reshape(reqs, kv_heads, -1, *x.shape[3:])[:, :, :rows]
        x = x.reshape(reqs, kv_heads, decode_query_len, group, *x.shape[3:])
        if decode_query_len > 1:
            x = jnp.swapaxes(x, 1, 2)
        return x.reshape(tokens, q_heads, *x.shape[4:])

    def per_query(x: Array | None) -> Array | None:
        """[q_heads] to [kv_heads * row_tiles, tile_q], times log2(e)."""
        if x is None:
            return None
        x = (x.astype(jnp.float32) * LOG2E).reshape(1, 1, kv_heads, group)
        x = packed(jnp.broadcast_to(x, (1, decode_query_len, kv_heads, group)))[0]
        return jnp.pad(x, ((0, 0), (0, n - shape.rows)))

    in_cache = cache_cut(tiles, shape)

    def cut_scale(scale: Array | None) -> Array | None:
        if scale is None or scale.ndim == 1:
            return scale
        if scale.ndim == 3:
            return in_cache.cut_scales(scale)
        if scale.ndim == 0:
            return scale.reshape(1)
        scale = scale.reshape(kv_heads, cut.chunks, cut.chunk)
        return jnp.pad(scale, ((0, 0), (0, 0), (0, cut.width - cut.chunk)))

    sinks_of_query = per_query(sinks)
    queries = packed(query.reshape(reqs, decode_query_len, kv_heads, group, head_dim))
    lists: tuple[Any, Any] = (None, None)
    if block_list is not None:  # a kv head of a request is a request of its own
        queries = queries.reshape(reqs * kv_heads, row_tiles, *queries.shape[2:])
        lists = block_list.ids.reshape(reqs * kv_heads, -1), block_list.counts.reshape(-1)
    results = decode_partials(
        cut.split(queries),
        in_cache.cut_cache(k_cache),
        in_cache.cut_cache(v_cache),
        block_table,
        seq_lens,
        cut_scale(k_scale),
        cut_scale(v_scale),
        per_query(alibi_slopes),
        sinks_of_query,
        schedule,
        lists,
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
    seq_lens: jax.Array,
    *,
    score: Score,
    tiles: Tiles,
    kv_heads: int,
    group: int,
    decode_query_len: int,
    block_list: BlockList | None = None,
    list_block_size: int | None = None,
    max_kv: int | None = None,
) -> Schedule:
    """The schedule that paged_decode makes for itself: make it once for all layers of a step.

    `max_kv`, the most keys that a request can have, spares thread blocks that could never have a unit.
    """
    rows = seq_lens.shape[0] if block_list is None else block_list.counts.size
    slots = tiles.slots(1 if block_list is not None else kv_heads, group * decode_query_len)
    if max_kv is not None:
        slots = min(slots, rows * -(-max_kv // (tiles.unit)))
    return make_schedule(
        seq_lens,
        score=score,
        tiles=tiles,
        decode_query_len=decode_query_len,
        slots=slots,
        block_list=block_list,
        list_block_size=list_block_size,
    )
