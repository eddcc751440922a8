"""paged_decode: attention of each request's last few tokens to its paged KV cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.architectures import kernel_architecture
from pallas_kernels.checks import (
    check_heads,
    check_scale,
    check_supported,
    forbid_kernel_derivative,
    require,
    require_arrays,
    require_axes,
    require_built_for,
    require_one_of,
    require_shape,
)
from pallas_kernels.list_tiles import MAX_QUERY_BLOCKS
from pallas_kernels.paged_decode.combine import combine_splits
from pallas_kernels.paged_decode.kernel import run_decode_kernel
from pallas_kernels.paged_decode.schedule import BlockList, DecodeSchedule, make_schedule, schedule_key
from pallas_kernels.paged_decode.sizes import DecodeSizes, default_sizes
from pallas_kernels.paged_decode.spec import DecodeInputs, DecodeListRefs, DecodeShape, DecodeSpec
from pallas_kernels.score_mod import KernelScoreMod
from pallas_kernels.shared.memory import head_chunks
from pallas_kernels.shared.paged_kv import KvRefs, cache_dims
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import in_log2
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_decode

LIST_BLOCK_SIZES = (1, 16, 32, 64, 128, 256)


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
    score_mod: KernelScoreMod | None = None,
    block_list: BlockList | None = None,
    list_block_size: int | None = None,
    lists_have_head_bits: bool = False,
    schedule: DecodeSchedule | None = None,
    sizes: DecodeSizes | None = None,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Compute attention of each request's last `decode_query_len` tokens to all of its keys.

    Args:
        query: `decode_query_len` tokens of each request, request by request.
        k_cache: Paged keys, NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads,
            block_size, head_dim], in 8 bits or in the dtype of query. Keys and values that no query attends
            to may hold anything, and so may their scales.
        v_cache: Paged values, of the shape of k_cache; may have another dtype.
        block_table: `block_table[r, i]` is the block of keys `i * block_size` onward of request r. Entries of
            blocks that no query attends to are never used.
        seq_lens: Number of keys of each request, at most max_blocks * block_size. 0 marks a padding row.
        score: Scale, soft cap, causality, window and chunk size. Static.
        layout: Layout of the cache: "NHD" or "HND". Static.
        decode_query_len: Number of query tokens per request, 1 to 8. Static.
        k_scale: Factor of the stored keys: [], [kv_heads], or for 8-bit keys per token and head [blocks,
            kv_heads, block_size], so that the scales of a block are one copy; None for 1.
        v_scale: Factor of the stored values, like k_scale, or per channel [kv_heads, head_dim].
        sinks: Attention sink of each query head: one more score, without a value.
        alibi_slopes: ALiBi slope of each query head.
        score_mod: Score function, applied after the soft cap and ALiBi; why_no_kernel must be None. Static
            except for its arrays.
        block_list: Sparse blocks to visit, the same for all queries of a request; the score's mask applies
            inside them. None for all keys.
        list_block_size: Number of keys per sparse block, one of LIST_BLOCK_SIZES; None without block_list.
            With 1 the ids are positions of keys, and `sizes.uses_tma` must be False. Static.
        lists_have_head_bits: Whether bit QUERY_BLOCK_SHIFT + g of an id says that query head g of the group
            visits the block; otherwise all heads do. Static.
        schedule: Result of `make_schedule` for the same lengths, mask, sizes and lists; None to build it
            here.
        sizes: Sizes of the kernel; None for defaults for the shapes. Static.
        interpret: plgpu.InterpretGPUParams to run on a CPU, or None. Static.

    Returns:
        The output in query.dtype, and the natural logarithm of the softmax's denominator in f32. A query
        without keys has output 0 and log-sum-exp -inf.

    Raises:
        ValueError: If shapes disagree.
        NotImplementedError: If the kernel does not support the request, or is differentiated.
    """
    # Check the arguments.
    require_one_of("layout", layout, ("NHD", "HND"))
    require_axes(4, k_cache=k_cache, v_cache=v_cache)
    require_axes(3, query=query)
    require_axes(2, block_table=block_table)
    require_axes(1, seq_lens=seq_lens)
    require_arrays(k_scale=k_scale, v_scale=v_scale, sinks=sinks, alibi_slopes=alibi_slopes)
    (reqs,), (_, q_heads, head_dim), is_hnd = seq_lens.shape, query.shape, layout == "HND"
    blocks, block_size, kv_heads, cache_dim = cache_dims(k_cache, is_hnd=is_hnd)
    expected = reqs * decode_query_len, q_heads, cache_dim
    require_shape("query", query.shape, expected, "reqs * decode_query_len, q_heads, head_dim")
    require_shape("v_cache", v_cache.shape, k_cache.shape, "the shape of k_cache")
    require(decode_query_len > 0, "decode_query_len", "be positive", decode_query_len)
    check_heads(q_heads, kv_heads, sinks=sinks, alibi_slopes=alibi_slopes)
    require(score.rows_per_token == 1, "score.rows_per_token", "be 1", score.rows_per_token)
    scale_shapes = ((), (kv_heads,), (blocks, kv_heads, block_size))
    check_scale("k_scale", k_scale, scale_shapes)
    check_scale("v_scale", v_scale, (*scale_shapes, (kv_heads, head_dim)))
    max_blocks, group = block_table.shape[1], q_heads // kv_heads
    require_shape("block_table", block_table.shape, (reqs, max_blocks), "reqs, max_blocks")
    check_lists(
        block_list,
        list_block_size,
        has_head_bits=lists_have_head_bits,
        reqs=reqs,
        kv_heads=kv_heads,
        group=group,
    )
    has_token_scales = getattr(k_scale, "ndim", 0) == 3, getattr(v_scale, "ndim", 0) == 3
    reason = why_not_decode(
        dtype=query.dtype, k_dtype=k_cache.dtype, v_dtype=v_cache.dtype, head_dim=head_dim,
        block_size=block_size, group=group, decode_query_len=decode_query_len,
        has_token_scales=has_token_scales, list_block_size=list_block_size,
    )  # fmt: skip
    check_supported("paged_decode", reason)
    if 0 in (*k_cache.shape, *block_table.shape):
        return jnp.zeros_like(query), jnp.full(query.shape[1::-1], -jnp.inf, jnp.float32)

    # Choose the sizes, and lay out the work.
    kv_dtypes, has_lists = (k_cache.dtype, v_cache.dtype), block_list is not None
    rows = group * decode_query_len
    if sizes is None:
        sizes = default_sizes(
            head_dim, rows=rows, kv_dtypes=kv_dtypes, list_block_size=list_block_size,
            gpu=kernel_architecture(query),
        )  # fmt: skip
    require(list_block_size != 1 or not sizes.uses_tma, "sizes.uses_tma", "be False for single keys", True)
    if schedule is None:
        schedule = make_schedule(
            seq_lens, score=score, sizes=sizes, kv_heads=kv_heads, group=group,
            decode_query_len=decode_query_len, block_list=block_list, list_block_size=list_block_size,
            max_kv=max_blocks * block_size,
        )  # fmt: skip
    schedule_rows = reqs * (kv_heads if has_lists else 1)
    meaning = "requests, with block_list times kv_heads"
    require_shape("schedule.unit_ends", schedule.unit_ends.shape, (schedule_rows,), meaning)
    needed = schedule_key(score, sizes, decode_query_len, list_block_size, kv_heads)
    require_built_for("schedule", schedule.built_for, needed)
    row_tiles, tile_q = sizes.row_tiles(rows)
    needs_padding = row_tiles > 1 or (rows > 8 and rows % 8 != 0)
    shape = DecodeShape(
        kv_heads=kv_heads, row_tiles=row_tiles, rows=tile_q if needs_padding else rows, group=group,
        query_len=decode_query_len, block_size=block_size, is_hnd=is_hnd,
        head=head_chunks(cache_dim, itemsize=min(k_cache.dtype.itemsize, v_cache.dtype.itemsize)),
        tile_q=tile_q,
        list_block_size=list_block_size, lists_have_head_bits=lists_have_head_bits,
    )  # fmt: skip
    spec = DecodeSpec(
        shape=shape, score=score, sizes=sizes, num_spans=schedule.num_spans, dtype=query.dtype,
        has_token_scales=has_token_scales, has_score_mod=score_mod is not None, interpret=interpret,
    )  # fmt: skip

    # Reshape the arrays, run the kernel, and combine the requests that it split.
    query_rows, lists, tiling = to_rows(query, shape), DecodeListRefs(None, None), spec.cache_tiling
    if block_list is not None:  # each KV head of a request is a row of its own
        query_rows = query_rows.reshape(schedule_rows, row_tiles, *query_rows.shape[2:])
        ids = block_list.ids.reshape(schedule_rows, -1)
        if list_block_size == 1:  # the kernel reads the keys of a whole tile
            ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % sizes.tile_kv)))
        lists = DecodeListRefs(ids, block_list.counts.reshape(-1))
    k_tiles, v_tiles = tiling.tile_cache(k_cache), tiling.tile_cache(v_cache)
    inputs = DecodeInputs(
        query=shape.head.split(query_rows),
        kv=KvRefs(k_tiles, v_tiles, block_table, tiling.tile_scale(k_scale), tiling.tile_scale(v_scale)),
        seq_lens=seq_lens,
        unit_ends=schedule.unit_ends,
        slopes=heads_to_rows(alibi_slopes, shape),
        sinks=heads_to_rows(sinks, shape),
        lists=lists,
        score_mod=score_mod,
    )
    inputs = forbid_kernel_derivative(inputs, "paged_decode", "Use jattn.attend over a PackedKV")
    outputs = run_decode_kernel(inputs, spec)
    out, lse = combine_splits(outputs, inputs.sinks, schedule.unit_ends, spec)
    out = out.reshape(*out.shape[:3], head_dim)
    return from_rows(out, shape), from_rows(lse, shape).T


def check_lists(
    lists: BlockList | None, size: int | None, *, has_head_bits: bool, reqs: int, kv_heads: int, group: int
) -> None:
    """Raise ValueError unless the lists of sparse blocks fit the call."""
    if lists is None:
        require(size is None, "list_block_size", "be None without block_list", size)
        require(not has_head_bits, "lists_have_head_bits", "be False without block_list", has_head_bits)
        return
    require_axes(3, **{"block_list.ids": lists.ids})
    expected = reqs, kv_heads
    require_shape("block_list.ids", lists.ids.shape, (*expected, lists.ids.shape[2]), "reqs, kv_heads")
    require_shape("block_list.counts", lists.counts.shape, expected, "reqs, kv_heads")
    require_one_of("list_block_size", size, LIST_BLOCK_SIZES)
    if has_head_bits and group > MAX_QUERY_BLOCKS:
        raise ValueError(
            f"lists_have_head_bits=True supports at most {MAX_QUERY_BLOCKS} query heads per KV head, "
            f"got {group}."
        )


# Query rows: the queries of a KV head are the rows of its tiles, ordered by decode token, then by query head.
def to_rows(x: jax.Array, shape: DecodeShape) -> jax.Array:
    """Reshape [reqs * query_len, q_heads, ...] to [reqs, kv_heads * row_tiles, rows, ...].

    TMA pads a single tile of rows with zeros; several tiles, or one of an odd size, are padded here.
    """
    tail, rows = x.shape[2:], shape.group * shape.query_len
    x = x.reshape(-1, shape.query_len, shape.kv_heads, shape.group, *tail)
    if shape.query_len > 1:
        x = jnp.swapaxes(x, 1, 2)
    x = x.reshape(x.shape[0], shape.kv_heads, rows, *tail)
    padding = shape.row_tiles * shape.rows - rows
    if padding:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *[(0, 0)] * len(tail)))
    return x.reshape(x.shape[0], shape.kv_heads * shape.row_tiles, shape.rows, *tail)


def from_rows(x: jax.Array, shape: DecodeShape) -> jax.Array:
    """Invert `to_rows`; tiles may have tile_q rows, and the first axis may be rows of the schedule."""
    tail, rows = x.shape[3:], shape.group * shape.query_len
    reqs = x.shape[0] * x.shape[1] // (shape.kv_heads * shape.row_tiles)
    x = x.reshape(reqs, shape.kv_heads, -1, *tail)[:, :, :rows]
    x = x.reshape(reqs, shape.kv_heads, shape.query_len, shape.group, *tail)
    if shape.query_len > 1:
        x = jnp.swapaxes(x, 1, 2)
    return x.reshape(reqs * shape.query_len, shape.kv_heads * shape.group, *tail)


def heads_to_rows(x: jax.Array | None, shape: DecodeShape) -> jax.Array | None:
    """Broadcast one number per head to [kv_heads * row_tiles, tile_q] f32, times log2(e)."""
    x = in_log2(x)
    if x is None:
        return None
    x = jnp.broadcast_to(x[None], (shape.query_len, x.shape[0]))
    x = to_rows(x, shape)[0]
    return jnp.pad(x, ((0, 0), (0, shape.tile_q - shape.rows)))
