"""varlen_backward: gradients of packed attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.shared.score import Score
from pallas_kernels.shared.types import Interpret, Ref
from pallas_kernels.varlen_backward.call import BackwardCall
from pallas_kernels.varlen_backward.dkdv_kernel import output_types, run_dkdv
from pallas_kernels.varlen_backward.dq_kernel import run_dq
from pallas_kernels.varlen_backward.schedule import BackwardSchedule
from pallas_kernels.varlen_backward.sizes import BackwardSizes
from pallas_kernels.varlen_backward.spec import BackwardSpec, ComputedGrads, head_units
from pallas_kernels.varlen_backward.tile_lists import BackwardMask, BackwardTileLists


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
    score: Score,
    grad_lse: Float[Array, "q_heads tokens"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    schedule: BackwardSchedule | None = None,
    lists: BackwardTileLists | None = None,
    mask: BackwardMask | None = None,
    deterministic: bool = False,
    sizes: BackwardSizes | None = None,
    interpret: Interpret = None,
) -> tuple[Array, Array, Array]:
    """Gradients of the queries, keys and values that varlen_prefill attended over, packed.

    Rows of no request, and keys behind a request's last, may hold anything: their gradients are 0, and they
    reach nothing. Sinks are in `lse`; Call tells their own gradient.

    Args:
        query: Tokens of all requests, one after the other; behind the last there may be padding.
        key: Keys, likewise.
        value: As key.
        out: What varlen_prefill returned.
        lse: Likewise: natural log; -inf for rows that saw no key.
        grad_out: Gradient of out.
        query_start_loc: First token of each request, and one past the last; starts with 0.
        seq_lens: Keys of each request. Its last token stands at position `seq_len - 1`.
        kv_start_loc: First key of each request; starts with 0 and ascends.
        score: Static: scale, mask, soft cap.
        grad_lse: Gradient of lse, or None: 0.
        alibi_slopes: Slope of each head.
        schedule: make_schedule's for the same lengths, score and sizes; made here when None.
        lists: The tiles of queries that see each tile of keys; None = all. For it and the next see Call.
        mask: Static but for its arrays.
        deterministic: Static: the same bits twice, also of the gradient of queries.
        sizes: Static; those of the schedule or the lists when None, or chosen from the shapes.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        Gradients of query, key and value.

    Raises:
        ValueError: Shapes disagree.
        NotImplementedError: There is no kernel for this request, or it is differentiated.
    """
    call = BackwardCall(
        query=query, key=key, value=value, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, mask=mask,
        query_start_loc=query_start_loc, seq_lens=seq_lens, kv_start_loc=kv_start_loc, lists=lists,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip
    options: dict[str, Any] = {"deterministic": deterministic, "sizes": sizes, "interpret": interpret}
    return run_backward(call, schedule, score=score, **options)


def run_backward(
    call: BackwardCall,
    schedule: BackwardSchedule | None,
    *,
    score: Score,
    deterministic: bool,
    sizes: BackwardSizes | None,
    interpret: Interpret,
) -> tuple[Array, Array, Array]:
    """Checks a call, chooses what it leaves open, and runs the kernel; see varlen_backward."""
    call.check()
    call = call.forbid_kernel_derivative()
    query, key, value = call.query, call.key, call.value
    if call.is_empty:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    sizes = call.default_sizes(schedule, score, deterministic=deterministic) if sizes is None else sizes
    call.check_queries(sizes, deterministic=deterministic)
    schedule = call.make_schedule(score, sizes) if schedule is None else schedule
    call.check_schedule(schedule, score, sizes)
    kv_heads, mask = key.shape[1], None if call.mask is None else call.mask.dkdv_mask
    spec = BackwardSpec(
        kv_heads=kv_heads, group=query.shape[1] // kv_heads, cut=head_units(query.shape[2]), score=score,
        sizes=sizes, dtype=query.dtype, has_alibi=call.alibi_slopes is not None,
        has_lists=call.lists is not None, mask=mask, makes=ComputedGrads(key=True, value=True),
        interpret=interpret,
    )  # fmt: skip
    inputs = call.inputs(schedule, spec)
    live = lambda x, like: x.reshape(-1, *like.shape[1:])[: like.shape[0]]
    if spec.adds_grad_query:
        of_keys = lambda summed: run_dkdv(inputs._replace(grad_query=summed), spec)
        outputs, summed = _with_ref(of_keys, inputs.grad_query, output_types(inputs, spec))
        grad_query = call.grad_query(summed, spec)
    else:
        of_queries, stats = call.query_spec(schedule, spec), inputs.stats
        given = call.query_inputs(inputs, schedule, of_queries, fuses_delta=sizes.fuses_delta)
        grads_of = lambda stats: run_dq(given._replace(stats=stats), of_queries)
        if sizes.fuses_delta:
            grads, stats = _with_ref(grads_of, stats, given.attention.query)
        else:
            grads = grads_of(stats)
        grad_query = live(grads, query)
        outputs = run_dkdv(inputs._replace(stats=stats), spec)
    return grad_query, live(outputs.grad_key, key), live(outputs.grad_value, value)


def _with_ref(run: Callable[[Ref], Any], array: Array, types: Any) -> tuple[Any, Array]:
    """What `run` returns, given a reference to what the array holds, and what that holds then.

    jax.new_ref has an effect, with which JAX lowers nothing for XLA's partitioner. The HLO is the same.

    Args:
        run: Calls a kernel.
        array: What the reference holds first.
        types: Arrays, or types, like the results.
    """
    empty = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), types)

    def body(refs: tuple[Ref, Any]) -> None:
        ref, result_refs = refs

        def store(to: Ref, x: Array) -> None:
            to[...] = x

        jax.tree.map(store, result_refs, run(ref))

    array, results = pl.run_state(body)((array, empty))
    return results, array
