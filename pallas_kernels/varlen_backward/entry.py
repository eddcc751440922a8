"""varlen_backward: gradients of packed attention."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.architectures import kernel_architecture
from pallas_kernels.checks import (
    check_heads,
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
from pallas_kernels.shared.memory import (
    ALIGN,
    PANEL,
    TokenRows,
    copy_if_unaligned,
    head_chunks,
    pad_tokens,
    split_tail,
)
from pallas_kernels.shared.paged_kv import KvRefs
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E, in_log2
from pallas_kernels.shared.types import Interpret, Ref
from pallas_kernels.support import why_not_backward
from pallas_kernels.varlen_backward.dkdv_kernel import output_types, run_dkdv
from pallas_kernels.varlen_backward.dkdv_spec import ComputedGrads, DkDvSpec, head_panels
from pallas_kernels.varlen_backward.dq_kernel import run_dq
from pallas_kernels.varlen_backward.refs import (
    DkDvInputs,
    DkDvOutputs,
    DkDvScheduleRefs,
    DqInputs,
    QueryListRefs,
)
from pallas_kernels.varlen_backward.schedule import (
    BackwardSchedule,
    BackwardScheduleKey,
    make_schedule,
    max_tiles,
    schedule_key,
)
from pallas_kernels.varlen_backward.sizes import (
    BackwardSizes,
    check_head_dim,
    default_layer_sizes,
    list_block_sizes,
)
from pallas_kernels.varlen_backward.tile_lists import BackwardMask, BackwardTileLists
from pallas_kernels.varlen_prefill.schedule import TABLE_WIDTH, heads_per_l2_group
from pallas_kernels.varlen_prefill.spec import PrefillInputs, PrefillShape, PrefillSpec
from pallas_kernels.varlen_prefill.tile_lists import schedule_refs


def varlen_backward(
    query: Float[Array, "tokens q_heads head_dim"],
    key: Float[Array, "kv_tokens kv_heads head_dim"],
    value: Float[Array, "kv_tokens kv_heads head_dim"],
    out: Float[Array, "tokens q_heads head_dim"],
    lse: Float[Array, "q_heads tokens"],
    grad_out: Float[Array, "tokens q_heads head_dim"],
    *,
    query_start_loc: Int[Array, " bounds"],
    seq_lens: Int[Array, " reqs"],
    kv_start_loc: Int[Array, " reqs"],
    has_aligned_keys: bool = False,
    score: Score,
    grad_lse: Float[Array, "q_heads tokens"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    score_mod: KernelScoreMod | None = None,
    schedule: BackwardSchedule | None = None,
    lists: BackwardTileLists | None = None,
    mask: BackwardMask | None = None,
    deterministic: bool = False,
    sizes: BackwardSizes | None = None,
    interpret: Interpret = None,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of the queries, keys and values of varlen_prefill with packed keys.

    Rows outside of all requests and keys after a request's last key may have any value, including NaN. Their
    gradients are 0, and they do not affect other gradients. Sinks enter through `lse`: the gradient of a
    head's sink is the sum over its tokens of `exp(sink - lse) * (grad_lse - delta)`, where `delta` is a
    token's sum of `out * grad_out`.

    Args:
        query: Tokens of all requests one after the other, optionally followed by padding.
        key: Keys of all requests one after the other, optionally followed by padding.
        value: Values, like `key`.
        out: Output of varlen_prefill.
        lse: Log-sum-exp of varlen_prefill: natural logarithm, -inf for rows without visible keys.
        grad_out: Gradient of the output.
        query_start_loc: First token of each request and one past the last; starts with 0.
        seq_lens: Number of keys of each request. Its last token is at position `seq_len - 1`.
        kv_start_loc: First key of each request; starts with 0 and ascends.
        has_aligned_keys: Whether each element of kv_start_loc is a multiple of 8. Static.
        score: Scale, soft cap, causality, window and chunk size. Static. With `rows_per_token`, the tokens of
            query, out, lse and grad_out, and query_start_loc, are rows; seq_lens counts keys.
        grad_lse: Gradient of the log-sum-exp; None for 0.
        alibi_slopes: ALiBi slope of each head.
        score_mod: Score function of varlen_prefill. Static except for its arrays, whose gradients are not
            computed.
        schedule: Result of make_schedule for the same lengths, score and sizes; None to build it here.
        lists: Lists of the query tiles that attend to each key tile, for the call's schedule; None for all
            tiles. All queries and keys of the tiles in the lists must be finite, even if the mask hides them.
        mask: Mask that applies to the partial tiles of the lists, or None. Static except for its arrays.
        deterministic: Whether all gradients must be bitwise reproducible, including dq. Static.
        sizes: Tile sizes; None for those of the schedule or lists, or defaults for the shapes. Static.
        interpret: plgpu.InterpretGPUParams to run on a CPU, or None. Static.

    Returns:
        The gradients of query, key and value.

    Raises:
        ValueError: If the arguments do not fit together.
        NotImplementedError: If there is no kernel for the request, or if the call is differentiated.
    """
    # Check the arguments.
    require_axes(3, query=query, key=key, value=value, out=out, grad_out=grad_out)
    require_axes(2, lse=lse)
    require_arrays(grad_lse=grad_lse, alibi_slopes=alibi_slopes)
    require_axes(1, seq_lens=seq_lens, query_start_loc=query_start_loc, kv_start_loc=kv_start_loc)
    (tokens, q_heads, head_dim), (kv_tokens, kv_heads, _), (reqs,) = query.shape, key.shape, seq_lens.shape
    check_heads(q_heads, kv_heads, alibi_slopes=alibi_slopes)
    require_shape("key's head_dim", key.shape[-1:], (head_dim,), "as query")
    require_shape("value", value.shape, key.shape, "as key")
    require_shape("out", out.shape, query.shape, "as query")
    require_shape("grad_out", grad_out.shape, query.shape, "as query")
    for name, stats in (("lse", lse), ("grad_lse", grad_lse)):
        if stats is not None:
            require_shape(name, stats.shape, (q_heads, tokens), "q_heads, tokens")
    require_shape("query_start_loc", query_start_loc.shape, (reqs + 1,), "reqs + 1")
    require_shape("kv_start_loc", kv_start_loc.shape, (reqs,), "reqs")
    if lists is None and mask is not None:
        raise ValueError("mask requires lists. Build them with make_tile_lists.")
    if alibi_slopes is not None or score_mod is not None:  # a row does not tell its head
        rule = "be 1 with ALiBi or a score function"
        require(score.rows_per_token == 1, "score.rows_per_token", rule, score.rows_per_token)
    named = {"query": query, "key": key, "value": value, "out": out, "grad_out": grad_out}
    dtypes = {name: array.dtype for name, array in named.items()}
    prebuilt = schedule if lists is None else lists
    if sizes is None and prebuilt is not None:
        sizes = prebuilt.built_for.sizes
    gpu = kernel_architecture(query) if sizes is None else sizes.gpu
    check_supported("varlen_backward", why_not_backward(dtypes=dtypes, head_dim=head_dim, gpu=gpu))
    arrays = query, key, value, out, lse, grad_out, grad_lse, alibi_slopes, score_mod
    query, key, value, out, lse, grad_out, grad_lse, alibi_slopes, score_mod = forbid_kernel_derivative(
        arrays, "varlen_backward", "Call attend with implementation='reference'"
    )
    if 0 in (tokens, kv_tokens, reqs):
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)

    # Choose the sizes, and lay out the work.
    if sizes is None:
        sizes = default_layer_sizes(
            head_dim, score, mean_len=tokens // reqs, deterministic=deterministic, gpu=gpu
        )
    check_head_dim(sizes, head_dim)
    check_dq(sizes, lists, deterministic=deterministic)
    if schedule is None:
        schedule = make_schedule(
            query_start_loc, seq_lens, kv_start_loc, kv_tokens=kv_tokens, kv_heads=kv_heads,
            head_dim=head_dim, score=score, sizes=sizes, num_tokens=tokens,
        )  # fmt: skip
    needed = schedule_key(kv_tokens, kv_heads, score, sizes, tokens)
    check_prebuilt(schedule, lists, needed, reqs=reqs, q_heads=q_heads)
    spec = DkDvSpec(
        kv_heads=kv_heads,
        group=q_heads // kv_heads,
        head=head_chunks(head_dim) if sizes.per_warp_mma else head_panels(head_dim),
        score=score,
        sizes=sizes,
        dtype=query.dtype,
        computes=ComputedGrads(dk=True, dv=True),
        has_alibi=alibi_slopes is not None,
        has_lists=lists is not None,
        list_block_size=None if lists is None else lists.built_for.list_block_size,
        interpret=interpret,
    )

    # Reshape the arrays.
    table, order, list_refs = schedule.table, schedule.order, None
    if lists is not None:
        table, order = lists.table, lists.order
        list_refs = QueryListRefs(lists.entries, lists.num_partial, lists.num_full)
    dq_sum = None
    if spec.adds_dq:
        dq_rows = tokens + -tokens % ALIGN + sizes.tile_q
        dq_sum = jnp.zeros((q_heads, spec.num_head_panels, dq_rows, PANEL), jnp.float32)

    # All kernels share the tails, which are as large as the largest tile.
    max_kv_rows = PANEL if sizes.dq_sizes is None else max(PANEL, sizes.dq_sizes.tile_kv)

    def token_rows(x: Array, max_rows: int) -> TokenRows:
        # Copies by cp.async, unlike those by TMA, read an array of any number of rows in place.
        rows = TokenRows(copy_if_unaligned(x)) if sizes.per_warp_mma else split_tail(x, max_rows)
        return spec.head.split_rows(rows)

    inputs = DkDvInputs(
        query=token_rows(query, sizes.tile_q),
        key=token_rows(key, max_kv_rows),
        value=token_rows(value, max_kv_rows),
        dout=token_rows(grad_out, sizes.tile_q),
        row_stats=make_row_stats(out, lse, grad_out, grad_lse, spec),
        slopes=in_log2(alibi_slopes),
        schedule=DkDvScheduleRefs(table, schedule.num_valid, order, list_refs),
        mask=None if mask is None else mask.dkdv_mask,
        score_mod=score_mod,
        dq=dq_sum,
    )

    # Run the kernels.
    if dq_sum is not None:
        # One kernel: dq is added up in f32 and converted afterwards.

        def run_fused(dq: Any) -> Any:
            return run_dkdv(inputs._replace(dq=dq), spec, kv_tokens)

        outputs, dq_sum = _run_with_ref(run_fused, dq_sum, output_types(inputs, spec, kv_tokens))
        dq = (dq_sum[:, :, :tokens, : spec.head.chunk_dim] * score.scale).astype(query.dtype)
        dq = dq.transpose(2, 0, 1, 3).reshape(tokens, q_heads, head_dim)
    else:
        # The dq kernel runs first if it computes delta, which the dk/dv kernel then reads.
        out_rows = token_rows(out, sizes.tile_q) if sizes.dq_computes_delta else None
        dq_inputs, dq_spec = make_dq_call(
            inputs, out_rows, spec, schedule, lists, mask, has_aligned_keys=has_aligned_keys
        )

        def run(row_stats: Any) -> Any:
            return run_dq(dq_inputs._replace(row_stats=row_stats), dq_spec, tokens)

        row_stats = inputs.row_stats
        if sizes.dq_computes_delta:
            dq_type = jax.ShapeDtypeStruct((tokens, *inputs.query.rows.shape[1:]), query.dtype)
            dq, row_stats = _run_with_ref(run, row_stats, dq_type)
        else:
            dq = run(row_stats)
        outputs = run_dkdv(inputs._replace(row_stats=row_stats), spec, kv_tokens)
    if sizes.list_splits > 1:
        outputs = DkDvOutputs(*(_sum_splits(x, sizes.list_splits) for x in outputs))
    return dq.reshape(query.shape), outputs.dk.reshape(key.shape), outputs.dv.reshape(value.shape)


def check_prebuilt(
    schedule: BackwardSchedule,
    lists: BackwardTileLists | None,
    needed: BackwardScheduleKey,
    *,
    reqs: int,
    q_heads: int,
) -> None:
    """Raise ValueError if the schedule or the lists were built for another call than the one of `needed`."""
    require_built_for("schedule", schedule.built_for, needed)
    num_tiles, kv_heads = max_tiles(needed.kv_tokens, reqs, needed.sizes.tile_kv), needed.kv_heads
    meaning = f"{needed.kv_tokens} keys of {reqs} requests"
    require_shape("schedule.table", schedule.table.shape, (num_tiles, TABLE_WIDTH), meaning)
    if lists is None:
        return
    list_block_size = lists.built_for.list_block_size
    allowed = None, *list_block_sizes(needed.sizes)
    require_one_of("lists.built_for.list_block_size", list_block_size, allowed)
    lists_key = dataclasses.replace(needed, list_block_size=list_block_size)
    require_built_for("lists", lists.built_for, lists_key)
    meaning = f"{num_tiles} key tiles, {q_heads} query heads, {kv_heads} KV heads"
    num_work_tiles = num_tiles * kv_heads * needed.sizes.list_splits
    require_shape("lists.table", lists.table.shape, (num_tiles, TABLE_WIDTH), meaning)
    require_shape("lists.order", lists.order.shape, (num_work_tiles,), meaning)
    require_shape("lists.entries", lists.entries.shape[:1], (num_tiles * q_heads,), meaning)
    if lists.dq_lists is not None and schedule.dq_schedule is not None:
        built_for = lists.dq_lists.built_for
        dq_key = dataclasses.replace(
            schedule.dq_schedule.built_for,
            list_block_size=built_for.list_block_size,
            block_q=built_for.block_q,
        )
        require_built_for("lists.dq_lists", built_for, dq_key)
        shape = schedule.dq_schedule.table.shape[0] * q_heads, TABLE_WIDTH
        meaning = f"tiles of {needed.num_tokens} queries, {q_heads} heads"
        require_shape("lists.dq_lists", lists.dq_lists.table.shape, shape, meaning)


def check_dq(
    sizes: BackwardSizes,
    lists: BackwardTileLists | None,
    *,
    deterministic: bool,
) -> None:
    """Raise ValueError if sizes.dq_sizes do not match `deterministic` or the lists."""
    has_dq_kernel = sizes.dq_sizes is not None
    if deterministic and not has_dq_kernel:
        raise ValueError("deterministic=True requires a dq kernel. Set sizes.dq_sizes.")
    if lists is None:
        require(sizes.list_splits == 1, "sizes.list_splits", "be 1 without lists", sizes.list_splits)
        return
    if not has_dq_kernel:  # these lists would have bits per warpgroup, which only the dq kernel allows
        if lists.dq_lists is not None:
            raise ValueError("lists.dq_lists requires a dq kernel. Set sizes.dq_sizes.")
        return
    if lists.dq_lists is None:
        raise ValueError(
            "sizes.dq_sizes is set, so lists.dq_lists is required. Build it for schedule.dq_schedule."
        )


def _sum_splits(grads: Array, splits: int) -> Array:
    """Return the sum over the splits of lists of the gradients of each KV head."""
    by_split = grads.reshape(grads.shape[0], -1, splits, *grads.shape[2:])
    return by_split.sum(axis=2, dtype=jnp.float32).astype(grads.dtype)


def make_row_stats(out: Array, lse: Array, grad_out: Array, grad_lse: Array | None, spec: DkDvSpec) -> Array:
    """Return the base-2 LSE and delta of each row, f32 [q_heads, 2, tokens].

    If the dq kernel computes delta, the second row is 0, and grad_lse is a third row if it is not None.
    """
    extra = 0 if spec.adds_dq else PANEL  # the dq kernel reads whole tiles
    lse = lse.astype(jnp.float32)
    # Rows without keys have probabilities of 0.
    lse_log2 = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    if spec.sizes.dq_computes_delta:
        rows = [lse_log2, jnp.zeros_like(lse_log2)] + (
            [] if grad_lse is None else [grad_lse.astype(jnp.float32)]
        )
    else:
        # A separate XLA kernel computes delta: fused with the stacking, each thread would read a whole head.
        products = out.astype(jnp.float32) * grad_out.astype(jnp.float32)
        delta = jax.lax.optimization_barrier(products.sum(axis=-1)).T
        rows = [lse_log2, delta if grad_lse is None else delta - grad_lse.astype(jnp.float32)]
    # Unlike the arrays of tokens, these small rows are padded: TMA requires a multiple of 16 bytes per row.
    return pad_tokens(jnp.stack(rows, axis=1), axis=2, extra=extra)


def make_dq_call(
    inputs: DkDvInputs,
    out: TokenRows | None,
    spec: DkDvSpec,
    schedule: BackwardSchedule,
    lists: BackwardTileLists | None,
    mask: BackwardMask | None,
    *,
    has_aligned_keys: bool,
) -> tuple[DqInputs, PrefillSpec]:
    """Return the arrays and the static description of the dq kernel.

    Args:
        inputs: Arrays of the dk/dv kernel.
        out: Output of attention if the dq kernel computes delta, else None.
        spec: Static description of the dk/dv kernel.
        schedule: Schedule of the call.
        lists: Lists of the call, or None.
        mask: Mask of the call, or None.
        has_aligned_keys: Whether each request's first key is the first key of a tile.
    """
    dq_sizes, dq_schedule = spec.sizes.dq_sizes, schedule.dq_schedule
    assert dq_sizes is not None
    assert dq_schedule is not None
    dq_lists = None if lists is None else lists.dq_lists
    q_heads, head_dim = spec.kv_heads * spec.group, spec.head.num_chunks * spec.head.chunk_dim
    kv_bytes = 4 * schedule.built_for.kv_tokens * head_dim
    shape = PrefillShape(
        q_heads=q_heads,
        group=spec.group,
        head=head_chunks(head_dim),
        cache_tiling=None,
        has_aligned_keys=has_aligned_keys,
        heads_per_l2_group=heads_per_l2_group(
            q_heads, spec.kv_heads, kv_bytes=kv_bytes, rows=len(dq_schedule.table), sizes=dq_sizes
        ),
        list_block_size=None if dq_lists is None else dq_lists.built_for.list_block_size,
        block_q=None if dq_lists is None else dq_lists.built_for.block_q,
    )
    dq_spec = PrefillSpec(
        shape=shape, score=spec.score, sizes=dq_sizes, dtype=spec.dtype, has_lists=spec.has_lists,
        has_alibi=spec.has_alibi, has_score_mod=inputs.score_mod is not None, returns_lse=False,
        interpret=spec.interpret,
    )  # fmt: skip
    k, v = inputs.key, inputs.value
    attention = PrefillInputs(
        query=inputs.query,
        kv=KvRefs(k.rows, v.rows, None, k_tail=k.tail, v_tail=v.tail),
        slopes=inputs.slopes,
        sinks=None,
        schedule=schedule_refs(dq_schedule, dq_lists),
        mask=None if mask is None else mask.dq_mask,
        score_mod=inputs.score_mod,
    )
    return DqInputs(attention, inputs.dout, inputs.row_stats, out), dq_spec


def _run_with_ref(run: Callable[[Ref], Any], array: Array, types: Any) -> tuple[Any, Array]:
    """Call `run` with a reference to an array; return its result and the changed array.

    jax.new_ref is not used: it has an effect, and JAX cannot partition functions with effects. The HLO is the
    same. pl.run_state has no batching rule, so under jax.vmap the calls run one after another.

    Args:
        run: Calls a kernel.
        array: Initial value of the reference.
        types: Arrays or types with the shapes and dtypes of the results.
    """

    def body(refs: tuple[Ref, Any]) -> None:
        ref, result_refs = refs

        def store(to: Ref, x: Array) -> None:
            to[...] = x

        jax.tree.map(store, result_refs, run(ref))

    def run_once(array: Array) -> tuple[Array, Any]:
        empty = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), types)
        array, results = pl.run_state(body)((array, empty))
        return array, results

    closed, shape = jax.make_jaxpr(run_once, return_shape=True)(array)

    @jax.custom_batching.sequential_vmap
    def run_sequentially(array: Array, *captured: Array) -> list[Array]:
        return jax.core.eval_jaxpr(closed.jaxpr, captured, array)

    leaves = run_sequentially(array, *closed.consts)
    array, results = jax.tree.unflatten(jax.tree.structure(shape), leaves)
    return results, array
