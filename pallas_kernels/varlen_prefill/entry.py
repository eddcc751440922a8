"""varlen_prefill: attention of packed prompts to their own keys, packed or in a paged cache."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.checks import require, require_one_of, require_positive, require_shape, unsupported
from pallas_kernels.list_tiles import MAX_PARTS
from pallas_kernels.shared.head_dims import head_cut
from pallas_kernels.shared.paged_kv import CacheCut, sizes_of
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_prefill
from pallas_kernels.varlen_prefill.bias import LOG2E
from pallas_kernels.varlen_prefill.kernel import prefill
from pallas_kernels.varlen_prefill.lists import TileLists, num_parts
from pallas_kernels.varlen_prefill.masks import KernelMask
from pallas_kernels.varlen_prefill.refs import CacheRefs, Inputs, ScheduleRefs
from pallas_kernels.varlen_prefill.schedule import (
    ALIGN,
    TABLE_WIDTH,
    Schedule,
    heads_at_once,
    make_schedule,
    max_tiles,
)
from pallas_kernels.varlen_prefill.spec import PrefillSpec, Shape
from pallas_kernels.varlen_prefill.tiles import Tiles, default_tiles


def varlen_prefill(
    query: Float[Array, "tokens q_heads head_dim"],
    key: Shaped[Array, "..."],
    value: Shaped[Array, "..."],
    query_start_loc: Int[Array, " bounds"],
    seq_lens: Int[Array, " reqs"],
    *,
    score: Score,
    kv_start_loc: Int[Array, " reqs"] | None = None,
    block_table: Int[Array, "reqs max_blocks"] | None = None,
    layout: str = "NHD",
    sinks: Float[Array, " q_heads"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    schedule: Schedule | None = None,
    lists: TileLists | None = None,
    block_q: int | None = None,
    mask: KernelMask | None = None,
    tiles: Tiles | None = None,
    return_lse: bool = False,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"] | None]:
    """Attends each token to the keys of its request. The last token stands at position `seq_len - 1`.

    Args:
        query: Tokens of all requests, one request after the other; behind the last there may be padding.
        key: With kv_start_loc: packed keys [kv_tokens, kv_heads, head_dim]. With block_table: a paged cache,
            NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim]. Keys
            and values that no query sees may be anything.
        value: As key.
        query_start_loc: First token of each request, and one past the last; starts with 0.
        seq_lens: Keys of each request, at most those that the table has room for.
        score: Static: scale, mask, soft cap.
        kv_start_loc: First key of each request in packed keys.
        block_table: `block_table[r, i]` holds keys `i * block_size` onward of request r. Entries of blocks
            that no query sees are never used.
        layout: Static: "NHD" or "HND"; of a paged cache.
        sinks: One more score of each head, without a value.
        alibi_slopes: Slope of each head.
        schedule: make_schedule's for the same lengths and tiles; made here when None. Its lengths are at most
            the keys that the block table has room for.
        lists: make_lists' for that schedule: each head's tiles of keys. Of a listed tile, values must be
            finite from the first key that some query of the request sees by the score's numbers to the
            request's last, even where the mask hides them; the others may be anything.
        block_q: Static: queries of a block of queries, where the parts that the lists tell apart are needed:
            queries of one block see a tile's keys alike, but for what `score` and `mask` hide.
        mask: What queries see in tiles that are listed as seen in part; static but for its arrays. Only with
            lists.
        tiles: Static. Chosen from the shapes when None.
        return_lse: Static: whether the log-sum-exp is wanted.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        Output in query.dtype, and the natural log of the softmax's denominator, f32, or None. Padding and
        rows without a key are 0 and -inf.

    Raises:
        ValueError: Shapes disagree.
        NotImplementedError: There is no kernel for this request; the message says why.
    """
    block_size, kv_heads = _check_shapes(
        query, key, value, query_start_loc, seq_lens, kv_start_loc, block_table, layout
    )
    num_tokens, q_heads, head_dim = query.shape
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        require_shape(name, (q_heads,) if per_head is None else per_head.shape, (q_heads,), "q_heads")
    reason = why_not_prefill(dtype=query.dtype, kv_dtype=key.dtype, head_dim=head_dim, block_size=block_size)
    if reason is not None:
        raise unsupported("varlen_prefill", reason, "Use another implementation")
    tiles = default_tiles(head_dim, has_lists=lists is not None) if tiles is None else tiles
    _check_block_q(block_q, tiles, has_lists=lists is not None, has_mask=mask is not None)
    if 0 in (num_tokens, *key.shape, *(seq_lens if block_table is None else block_table).shape):
        lse = jnp.full((q_heads, num_tokens), -jnp.inf, jnp.float32)
        return jnp.zeros_like(query), lse if return_lse else None

    if schedule is None:
        if block_table is not None and block_size is not None:  # no table is read behind its end
            seq_lens = jnp.minimum(seq_lens.astype(jnp.int32), block_table.shape[1] * block_size)
        schedule = make_schedule(
            query_start_loc, seq_lens, kv_start_loc, num_tokens=num_tokens, score=score, tiles=tiles
        )
    _check_schedule(schedule, lists, num_tokens, seq_lens.shape[0], q_heads, tiles)
    num_rows, kv_bytes = schedule.table.shape[0], _kv_bytes(key, block_table, block_size)
    spec = PrefillSpec(
        shape=Shape(
            q_heads=q_heads,
            group=q_heads // kv_heads,
            cut=head_cut(head_dim),
            in_cache=_in_cache(block_size, head_dim, layout, tiles),
            heads_at_once=heads_at_once(q_heads, kv_heads, kv_bytes=kv_bytes, rows=num_rows, tiles=tiles),
            block_q=block_q,
        ),
        score=score,
        tiles=tiles,
        dtype=query.dtype,
        mask=mask,
        has_lists=lists is not None,
        has_alibi=alibi_slopes is not None,
        returns_lse=return_lse,
        interpret=interpret,
    )
    in_log2 = lambda x: None if x is None else x.astype(jnp.float32) * LOG2E
    inputs = Inputs(
        query=spec.shape.cut.split(_whole_rows(query)),
        cache=_cut_kv(key, value, block_table, spec),
        slopes=in_log2(alibi_slopes),
        sinks=in_log2(sinks),
        schedule=ScheduleRefs(*(lists or (schedule.table, schedule.num_live, None))),
        mask=() if mask is None else mask.arrays,
    )
    outputs = prefill(inputs, num_rows, spec)
    out = outputs.out.reshape(-1, q_heads, head_dim)[:num_tokens]
    if outputs.lse is None:
        return out, None
    return out, _lse_of_tokens(outputs.lse, query_start_loc, schedule, num_tokens)


def _in_cache(block_size: int | None, head_dim: int, layout: str, tiles: Tiles) -> CacheCut | None:
    """How a tile of keys is fetched from the cache, if there is one."""
    if block_size is None:
        return None
    cut = head_cut(head_dim)
    return CacheCut(block_size=block_size, tile_kv=tiles.tile_kv, is_hnd=layout == "HND", head=cut)


def _kv_bytes(key: Array, block_table: Array | None, block_size: int | None) -> int:
    """Of a kv head's keys and values in 16 bits, of all requests together, at most."""
    kv_tokens = key.shape[0]
    if block_table is not None and block_size is not None:
        kv_tokens = min(kv_tokens, math.prod(block_table.shape)) * block_size
    return 4 * kv_tokens * key.shape[-1]


def _whole_rows(x: Array) -> Array:
    """Tokens padded to what TMA takes."""
    missing = -x.shape[0] % ALIGN
    return jnp.pad(x, ((0, missing), (0, 0), (0, 0))) if missing else x


def _cut_kv(key: Array, value: Array, block_table: Array | None, spec: PrefillSpec) -> CacheRefs:
    """Keys and values as the kernel copies them."""
    in_cache, cut = spec.shape.in_cache, spec.shape.cut
    as_copied = lambda x: cut.split(_whole_rows(x)) if in_cache is None else in_cache.cut_cache(x)
    return CacheRefs(as_copied(key), as_copied(value), block_table)


def _check_shapes(
    query: Array,
    key: Array,
    value: Array,
    query_start_loc: Array,
    seq_lens: Array,
    kv_start_loc: Array | None,
    block_table: Array | None,
    layout: str,
) -> tuple[int | None, int]:
    """The block size of a paged cache, else None; and kv heads."""
    require_one_of("layout", layout, ("NHD", "HND"))
    given = (kv_start_loc is not None) + (block_table is not None)
    require(given == 1, "kv_start_loc or block_table", "be given, and not both", given)
    num_axes = 3 if block_table is None else 4
    require(key.ndim == num_axes, "key", f"have {num_axes} axes", key.shape)
    block_size, kv_heads = None, key.shape[-2]
    if block_table is not None:
        _, block_size, kv_heads, _ = sizes_of(key, is_hnd=layout == "HND")
    (_, q_heads, head_dim), reqs = query.shape, seq_lens.shape[0]
    require_positive(kv_heads=kv_heads, q_heads=q_heads)
    require_shape("value", value.shape, key.shape, "as key")
    require_shape("key's head_dim", key.shape[-1:], (head_dim,), "as query")
    require_shape("query_start_loc", query_start_loc.shape, (reqs + 1,), "reqs + 1")
    if kv_start_loc is not None:
        require_shape("kv_start_loc", kv_start_loc.shape, (reqs,), "reqs")
    if block_table is not None:
        require_shape("block_table", block_table.shape, (reqs, *block_table.shape[1:2]), "reqs, max_blocks")
    require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
    return block_size, kv_heads


def _check_block_q(block_q: int | None, tiles: Tiles, *, has_lists: bool, has_mask: bool) -> None:
    """Refuses what lists are needed for without them, and blocks of queries too small for their bits."""
    require(has_lists or (not has_mask and block_q is None), "lists", "be given with a mask", None)
    if block_q is not None:
        parts = num_parts(tiles.tile_q, block_q)
        rule = f"cut {tiles.tile_q} queries into {MAX_PARTS} at most"
        require(parts <= MAX_PARTS, "block_q", rule, block_q)


def _check_schedule(
    schedule: Schedule, lists: TileLists | None, num_tokens: int, reqs: int, q_heads: int, tiles: Tiles
) -> None:
    """Refuses a schedule that was made for other tokens, requests, heads or tiles, as far as shapes tell."""
    rows = max_tiles(num_tokens, reqs, tiles.tile_q)
    what = f"{num_tokens} tokens of {reqs} requests in tiles of {tiles.tile_q}"
    require_shape("schedule.table", schedule.table.shape, (rows, TABLE_WIDTH), what)
    require_shape("schedule.first_tiles", schedule.first_tiles.shape, (reqs + 1,), what)
    if lists is not None:
        what = f"{rows} tiles of queries, {q_heads} heads"
        require_shape("lists.table", lists.table.shape, (rows * q_heads, TABLE_WIDTH), what)
        require_shape("lists.entries", lists.entries.shape[:1], (rows * q_heads,), what)


def _lse_of_tokens(lse_tiles: Array, query_start_loc: Array, schedule: Schedule, num_tokens: int) -> Array:
    """From [tiles, q_heads, tile_q] to [q_heads, tokens]."""
    tile_q = lse_tiles.shape[2]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    starts = query_start_loc.astype(jnp.int32)
    req = (starts[None, 1:] <= token[:, None]).sum(axis=1, dtype=jnp.int32)
    row = token - schedule.first_rows[req]
    tile = schedule.first_tiles[req] + row // tile_q
    return lse_tiles[tile, :, row % tile_q].T
