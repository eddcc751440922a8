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
from pallas_kernels.varlen_backward.spec import BackwardSpec, ComputedGrads, head_panels
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
    """Compute the gradients of the queries, keys and values of varlen_prefill with packed keys.

    Rows outside of all requests and keys after a request's last key may have any value, including NaN. Their
    gradients are 0, and they do not affect other gradients. Sinks enter through `lse`; see BackwardCall for
    their gradient.

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
        score: Scale, soft cap, causality, window and chunk size. Static.
        grad_lse: Gradient of the log-sum-exp; None for 0.
        alibi_slopes: ALiBi slope of each head.
        schedule: Result of make_schedule for the same lengths, score and sizes; None to build it here.
        lists: Lists of the query tiles that attend to each key tile; None for all tiles. See BackwardCall.
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
    call = BackwardCall(
        query=query, key=key, value=value, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse, mask=mask,
        query_start_loc=query_start_loc, seq_lens=seq_lens, kv_start_loc=kv_start_loc, lists=lists,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return run_backward(
        call, schedule, score=score, deterministic=deterministic, sizes=sizes, interpret=interpret
    )


def run_backward(
    call: BackwardCall,
    schedule: BackwardSchedule | None,
    *,
    score: Score,
    deterministic: bool,
    sizes: BackwardSizes | None,
    interpret: Interpret,
) -> tuple[Array, Array, Array]:
    """Validate a call, choose default sizes and the schedule if they are None, and run the kernels."""
    call.check()
    call = call.forbid_derivative()
    query, key, value = call.query, call.key, call.value
    if call.is_empty:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    sizes = call.default_sizes(schedule, score, deterministic=deterministic) if sizes is None else sizes
    call.check_dq(sizes, deterministic=deterministic)
    schedule = call.make_schedule(score, sizes) if schedule is None else schedule
    call.check_schedule(schedule, score, sizes)
    kv_heads, mask = key.shape[1], None if call.mask is None else call.mask.dkdv_mask
    spec = BackwardSpec(
        kv_heads=kv_heads, group=query.shape[1] // kv_heads, head=head_panels(query.shape[2]), score=score,
        sizes=sizes, dtype=query.dtype, has_alibi=call.alibi_slopes is not None,
        has_lists=call.lists is not None, mask=mask, computes=ComputedGrads(dk=True, dv=True),
        interpret=interpret,
    )  # fmt: skip
    inputs = call.dkdv_inputs(schedule, spec)

    def without_padding(x: Array, like: Array) -> Array:
        return x.reshape(-1, *like.shape[1:])[: like.shape[0]]

    if spec.adds_dq:
        # One kernel: dq is added up in f32 and converted afterwards.

        def run_fused(dq: Any) -> Any:
            return run_dkdv(inputs._replace(dq=dq), spec)

        outputs, dq_sum = _run_with_ref(run_fused, inputs.dq, output_types(inputs, spec))
        dq = call.dq_from_sum(dq_sum, spec)
    else:
        # The dq kernel runs first if it computes delta, which the dk/dv kernel then reads.
        dq_spec, row_stats = call.dq_spec(schedule, spec), inputs.row_stats
        dq_inputs = call.dq_inputs(inputs, schedule, dq_spec, fuses_delta=sizes.fuses_delta)

        def run(row_stats: Any) -> Any:
            return run_dq(dq_inputs._replace(row_stats=row_stats), dq_spec)

        if sizes.fuses_delta:
            padded_dq, row_stats = _run_with_ref(run, row_stats, dq_inputs.attention.query)
        else:
            padded_dq = run(row_stats)
        dq = without_padding(padded_dq, query)
        outputs = run_dkdv(inputs._replace(row_stats=row_stats), spec)
    return dq, without_padding(outputs.dk, key), without_padding(outputs.dv, value)


def _run_with_ref(run: Callable[[Ref], Any], array: Array, types: Any) -> tuple[Any, Array]:
    """Call `run` with a reference to an array; return its result and the changed array.

    jax.new_ref is not used: it has an effect, and JAX cannot partition functions with effects. The HLO is the
    same.

    Args:
        run: Calls a kernel.
        array: Initial value of the reference.
        types: Arrays or types with the shapes and dtypes of the results.
    """
    empty = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), types)

    def body(refs: tuple[Ref, Any]) -> None:
        ref, result_refs = refs

        def store(to: Ref, x: Array) -> None:
            to[...] = x

        jax.tree.map(store, result_refs, run(ref))

    array, results = pl.run_state(body)((array, empty))
    return results, array
