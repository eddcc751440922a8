"""varlen_prefill: attention of packed prompts over their own keys, packed or in a paged cache."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

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
from pallas_kernels.score_mod import KernelScoreMod
from pallas_kernels.shared.memory import TokenRows, copy_if_unaligned, head_chunks, split_tail
from pallas_kernels.shared.paged_kv import CacheTiling, KvRefs, cache_dims
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import in_log2
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_dequantize, why_not_prefill
from pallas_kernels.varlen_prefill.combine import combine_splits
from pallas_kernels.varlen_prefill.kernel import prefill
from pallas_kernels.varlen_prefill.kernel_mask import KernelMask
from pallas_kernels.varlen_prefill.schedule import (
    TABLE_WIDTH,
    PrefillSchedule,
    heads_per_l2_group,
    make_schedule,
    max_tiles,
    schedule_key,
)
from pallas_kernels.varlen_prefill.sizes import CallBounds, PrefillSizes, check_quantized, default_sizes
from pallas_kernels.varlen_prefill.spec import (
    PrefillInputs,
    PrefillShape,
    PrefillSpec,
    QuantizedKV,
)
from pallas_kernels.varlen_prefill.tile_lists import (
    LIST_BLOCK_SIZES,
    PrefillTileLists,
    schedule_refs,
)


def varlen_prefill(
    query: Float[Array, "tokens q_heads head_dim"],
    key: Shaped[Array, "..."],
    value: Shaped[Array, "..."],
    query_start_loc: Int[Array, " bounds"],
    seq_lens: Int[Array, " reqs"],
    *,
    score: Score,
    kv_start_loc: Int[Array, " reqs"] | None = None,
    has_aligned_keys: bool = False,
    block_table: Int[Array, "reqs max_blocks"] | None = None,
    layout: str = "NHD",
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    sinks: Float[Array, " sinks"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    score_mod: KernelScoreMod | None = None,
    schedule: PrefillSchedule | None = None,
    lists: PrefillTileLists | None = None,
    mask: KernelMask | None = None,
    sizes: PrefillSizes | None = None,
    return_lse: bool = False,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"] | None]:
    """Compute the attention of each token over the keys of its request.

    The last token of a request is at position `seq_len - 1`.

    Args:
        query: Tokens of all requests one after the other, optionally followed by padding.
        key: With kv_start_loc packed keys [kv_tokens, kv_heads, head_dim]. With block_table a paged cache,
            NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim]. Keys
            and values that no query attends to may have any value, including NaN.
        value: Values, like `key`.
        query_start_loc: First token of each request and one past the last; starts with 0.
        seq_lens: Number of keys of each request; at most max_blocks * block_size.
        score: Scale, soft cap, causality, window and chunk size. Static. With `rows_per_token`, the tokens of
            `query` and `query_start_loc` are rows, and `mask` counts queries in rows.
        kv_start_loc: First key of each request if keys are packed.
        has_aligned_keys: Whether each element of kv_start_loc is a multiple of 8. Static.
        block_table: `block_table[r, i]` is the block of keys `i * block_size` onward of request r; None if
            keys are packed. Entries of blocks without visible keys are never used.
        layout: Layout of a paged cache: "NHD" or "HND". Static.
        k_scale: Scale of an 8-bit cache, key = stored * k_scale: a scalar, [kv_heads], [kv_heads, head_dim],
            or per token and head [blocks, kv_heads, block_size]; None for 1.
        v_scale: Scale of 8-bit values, like `k_scale`.
        sinks: Attention sinks: an extra score per head without a value, for each row of a token.
        alibi_slopes: ALiBi slope of each head.
        score_mod: Score function, applied after the soft cap and ALiBi; why_no_kernel must be None. Static
            except for its arrays.
        schedule: Result of make_schedule for the same lengths, mask and sizes; None to build it here.
        lists: Tile lists for the call's schedule, or None for all KV tiles. Heads that sizes.pack_gqa packs
            into a tile share a list, and `mask` must be the same for them. Values in the tiles of the lists
            must be finite, even if the mask hides them. This does not apply to values after the request's
            last key, or outside of the window of all its queries.
        mask: Mask that applies to the partial tiles of the lists, or None. Static except for its arrays.
        sizes: Tile sizes; None for those of the schedule or lists, or defaults for the shapes. Static.
        return_lse: Whether to return the log-sum-exp. Static.
        interpret: plgpu.InterpretGPUParams to run on a CPU, or None. Static.

    Returns:
        The output in query.dtype, and the natural logarithm of the softmax's denominator in f32 or None. For
        padding and for rows without visible keys they are 0 and -inf.

    Raises:
        ValueError: If the arguments do not fit together.
        NotImplementedError: If there is no kernel for the request, or if the call is differentiated.
    """
    # Check the arguments.
    require_arrays(
        kv_start_loc=kv_start_loc, k_scale=k_scale, v_scale=v_scale, sinks=sinks, alibi_slopes=alibi_slopes
    )
    require_one_of("layout", layout, ("NHD", "HND"))
    num_locations = (kv_start_loc is not None) + (block_table is not None)
    if num_locations != 1:
        raise ValueError(
            "Pass either kv_start_loc (packed keys) or block_table (a paged cache), "
            f"got {num_locations} of them."
        )
    require_axes(3 if block_table is None else 4, key=key, value=value)
    require_axes(3, query=query)
    require_axes(1, query_start_loc=query_start_loc, seq_lens=seq_lens)
    (num_tokens, q_heads, head_dim), (reqs,) = query.shape, seq_lens.shape
    is_hnd, is_packed, has_lists = layout == "HND", block_table is None, lists is not None
    blocks, block_size, kv_heads, max_kv = 0, None, key.shape[1], key.shape[0]
    if block_table is not None:
        require_axes(2, block_table=block_table)
        blocks, block_size, kv_heads, _ = cache_dims(key, is_hnd=is_hnd)
        max_kv = block_table.shape[1] * block_size
    check_heads(q_heads, kv_heads, alibi_slopes=alibi_slopes)
    if sinks is not None:
        num_sinks = q_heads * score.rows_per_token
        require_shape("sinks", sinks.shape, (num_sinks,), "q_heads times rows per token")
    if alibi_slopes is not None or score_mod is not None:
        rule = "be 1 with ALiBi or a score function"
        require(score.rows_per_token == 1, "score.rows_per_token", rule, score.rows_per_token)
    require_shape("value", value.shape, key.shape, "as key")
    require_shape("key's head_dim", key.shape[-1:], (head_dim,), "as query")
    require_shape("query_start_loc", query_start_loc.shape, (reqs + 1,), "reqs + 1")
    if kv_start_loc is not None:
        require_shape("kv_start_loc", kv_start_loc.shape, (reqs,), "reqs")
    if block_table is not None:
        require_shape("block_table", block_table.shape, (reqs, block_table.shape[1]), "reqs, max_blocks")
    is_quantized = block_table is not None and 1 in (key.dtype.itemsize, value.dtype.itemsize)
    kv_dtype = query.dtype if is_quantized else key.dtype
    prebuilt = lists if schedule is None else schedule
    if sizes is None and prebuilt is not None:
        sizes = prebuilt.built_for.sizes
    gpu = kernel_architecture(query) if sizes is None else sizes.gpu
    reason = why_not_prefill(dtype=query.dtype, kv_dtype=kv_dtype, head_dim=head_dim, block_size=block_size)
    if is_quantized and reason is None:
        reason = why_not_dequantize(kv_dtypes=(key.dtype, value.dtype), head_dim=head_dim, gpu=gpu)
    check_supported("varlen_prefill", reason)
    scale_shapes = ((), (kv_heads,), (kv_heads, head_dim), (blocks, kv_heads, block_size or 0))
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            require(is_quantized, name, f"be None with keys of {key.dtype.name}", jnp.shape(scale))
            check_scale(name, scale, scale_shapes)
    if mask is not None and not has_lists:
        raise ValueError("mask requires tile lists. Build them with make_tile_lists and pass them as lists.")
    if is_quantized and has_lists:
        raise ValueError(
            f"lists (tile lists of a mask) require a 16-bit KV cache, but the cache has dtype "
            f"{key.dtype.name}. Dequantize the cache first."
        )

    # Choose the sizes, and lay out the work.
    if sizes is None:
        bounds = CallBounds(num_tokens, reqs, q_heads, kv_heads, max_kv).limited_by(score)
        sizes = default_sizes(
            head_dim, has_lists=has_lists, bounds=None if is_packed else bounds, is_quantized=is_quantized,
            gpu=gpu,
        )  # fmt: skip
    group, pack_gqa = q_heads // kv_heads, sizes.pack_gqa
    require(group % pack_gqa == 0, "pack_gqa", f"divide the {group} query heads per KV head", pack_gqa)
    head = head_chunks(head_dim)
    if is_quantized:
        check_quantized(sizes, head.padded_dim)
    if 0 in (num_tokens, *key.shape, *(seq_lens.shape if block_table is None else block_table.shape)):
        lse = jnp.full((q_heads, num_tokens), -jnp.inf, jnp.float32)
        return jnp.zeros_like(query), lse if return_lse else None
    if schedule is None:
        # Never read past the end of the block table.
        lens = seq_lens if is_packed else jnp.minimum(seq_lens.astype(jnp.int32), max_kv)
        schedule = make_schedule(
            query_start_loc, lens, kv_start_loc,
            num_tokens=num_tokens, score=score, sizes=sizes, q_heads=q_heads, has_lists=has_lists,
        )  # fmt: skip
    list_block_size = None if lists is None else lists.built_for.list_block_size
    block_q = None if lists is None else lists.built_for.block_q
    if list_block_size is not None:
        require(
            not sizes.per_warp_mma, "lists", "list tiles with per_warp_mma", f"blocks of {list_block_size}"
        )
        fits = block_size is None or block_size >= min(LIST_BLOCK_SIZES)
        require(fits, "block_size", f"be at least {min(LIST_BLOCK_SIZES)} with lists of blocks", block_size)
    require_shape("schedule.first_tiles", schedule.first_tiles.shape, (reqs + 1,), f"{reqs} requests")
    needed = schedule_key(num_tokens, score, sizes, q_heads, has_lists=has_lists, is_packed=is_packed)
    require_built_for("schedule", schedule.built_for, needed)
    if lists is not None:
        lists_key = dataclasses.replace(needed, list_block_size=list_block_size, block_q=block_q)
        require_built_for("lists", lists.built_for, lists_key)
        lists_needed = schedule.table.shape[0] * (q_heads // pack_gqa)
        meaning = f"{schedule.table.shape[0]} query tiles, each with {q_heads // pack_gqa} lists"
        require_shape("lists.table", lists.table.shape, (lists_needed, TABLE_WIDTH), meaning)
        require_shape("lists.entries", lists.entries.shape[:1], (lists_needed,), meaning)
    tiling, kv_tokens = None, key.shape[0]
    if block_table is not None and block_size is not None:
        run_length = list_block_size or sizes.tile_kv
        tiling = CacheTiling(block_size=block_size, run_length=run_length, is_hnd=is_hnd, head=head)
        kv_tokens = min(kv_tokens, math.prod(block_table.shape)) * block_size
    group_heads = heads_per_l2_group(
        q_heads, kv_heads, kv_bytes=4 * kv_tokens * head_dim,
        rows=max_tiles(num_tokens, reqs, sizes.tile_tokens), sizes=sizes,
    )  # fmt: skip
    shape = PrefillShape(
        q_heads=q_heads, group=group, head=head, cache_tiling=tiling,
        has_aligned_keys=has_aligned_keys or not is_packed,
        heads_per_l2_group=group_heads, block_q=block_q, list_block_size=list_block_size,
    )  # fmt: skip
    quantized = None
    if is_quantized:
        granularities = "head", "head", "channel", "token"  # by the number of axes
        k_granularity, v_granularity = (
            None if scale is None else granularities[scale.ndim] for scale in (k_scale, v_scale)
        )
        quantized = QuantizedKV((key.dtype, value.dtype), (k_granularity, v_granularity))
    spec = PrefillSpec(
        shape=shape, score=score, sizes=sizes, dtype=query.dtype, has_lists=has_lists,
        has_alibi=alibi_slopes is not None, returns_lse=return_lse, quantized=quantized,
        has_score_mod=score_mod is not None,
        max_score=None if score_mod is None else score_mod.max_score, interpret=interpret,
    )  # fmt: skip

    # Reshape the arrays, run the kernel, and combine the query tiles whose keys it split.
    scales: list[jax.Array | None] = [None, None]
    k_tail, v_tail = None, None
    # Copies by cp.async, unlike those by TMA, read an array of any number of rows in place.
    query_rows = TokenRows(head.split(copy_if_unaligned(query)))
    if not sizes.per_warp_mma:
        query_rows = split_tail(head.split(query), sizes.warpgroup_tokens)
    if tiling is None and sizes.per_warp_mma:
        k, v = (head.split(copy_if_unaligned(x)) for x in (key, value))
    elif tiling is None:
        k, k_tail = split_tail(head.split(key), spec.run_length)
        v, v_tail = split_tail(head.split(value), spec.run_length)
    else:
        k, v = tiling.tile_cache(key), tiling.tile_cache(value)
        scales = [
            None if scale is None else tiling.tile_scale(scale.astype(jnp.float32))
            for scale in (k_scale, v_scale)
        ]
    inputs = PrefillInputs(
        query=query_rows,
        kv=KvRefs(k, v, block_table, scales[0], scales[1], k_tail, v_tail),
        slopes=in_log2(alibi_slopes),
        sinks=in_log2(sinks),
        schedule=schedule_refs(schedule, lists),
        mask=mask,
        score_mod=score_mod,
    )
    fix = "Use jattn.attention or jattn.attend over a PackedKV, which take varlen_backward"
    inputs = forbid_kernel_derivative(inputs, "varlen_prefill", fix)
    outputs = prefill(inputs, spec, num_tokens)
    if schedule.split_tiles is not None:
        outputs = combine_splits(outputs, schedule.table, schedule.split_tiles, inputs.sinks, spec)
    return outputs.out.reshape(num_tokens, q_heads, head_dim), outputs.lse
