"""varlen_prefill: attention of packed prompts to their own keys, packed or in a paged cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.types import Interpret
from pallas_kernels.varlen_prefill.call import PrefillCall
from pallas_kernels.varlen_prefill.combine import combine_splits
from pallas_kernels.varlen_prefill.kernel import prefill
from pallas_kernels.varlen_prefill.kernel_mask import KernelMask
from pallas_kernels.varlen_prefill.schedule import PrefillSchedule
from pallas_kernels.varlen_prefill.sizes import PrefillSizes
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.tile_lists import PrefillTileLists


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
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    schedule: PrefillSchedule | None = None,
    lists: PrefillTileLists | None = None,
    block_q: int | None = None,
    mask: KernelMask | None = None,
    sizes: PrefillSizes | None = None,
    return_lse: bool = False,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"] | None]:
    """Attends each token to the keys of its request. The last token stands at position `seq_len - 1`.

    Args:
        query: Tokens of all requests, one request after the other; behind the last there may be padding.
        key: Packed with kv_start_loc, paged with block_table; Call tells how they lie.
        value: As key.
        query_start_loc: First token of each request, and one past the last; starts with 0.
        seq_lens: Keys of each request, at most those that the table has room for.
        score: Static: scale, mask, soft cap.
        kv_start_loc: First key of each request in packed keys.
        block_table: Blocks of each request.
        layout: Static: "NHD" or "HND"; of a paged cache.
        k_scale: key = stored * k_scale, of keys in 8 bits; None = 1. For its shapes see Call.
        v_scale: The same for values.
        sinks: One more score of each head, without a value.
        alibi_slopes: Slope of each head.
        schedule: make_schedule's for the same lengths, mask and sizes; made here when None.
        lists: The tiles of keys to visit; None = all. For it and the next two see Call.
        block_q: Static.
        mask: Static but for its arrays.
        sizes: Static. Those of the schedule or the lists when None, or chosen from the shapes.
        return_lse: Static: whether the log-sum-exp is wanted.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        Output in query.dtype; log of the softmax's denominator, f32, or None. Padding, no key: 0 and -inf.

    Raises:
        ValueError: Shapes disagree.
        NotImplementedError: There is no kernel for this request, or it is differentiated.
    """
    call = PrefillCall(
        query=query, key=key, value=value, query_start_loc=query_start_loc, seq_lens=seq_lens,
        kv_start_loc=kv_start_loc, block_table=block_table, layout=layout, k_scale=k_scale, v_scale=v_scale,
        sinks=sinks, alibi_slopes=alibi_slopes, lists=lists, block_q=block_q, mask=mask,
    )  # fmt: skip
    return run_prefill(call, schedule, score=score, sizes=sizes, return_lse=return_lse, interpret=interpret)


def run_prefill(
    call: PrefillCall,
    schedule: PrefillSchedule | None,
    *,
    score: Score,
    sizes: PrefillSizes | None,
    return_lse: bool,
    interpret: Interpret,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"] | None]:
    """Checks a call, chooses what it leaves open, and runs the kernel; see varlen_prefill."""
    call.check()
    num_tokens, q_heads, head_dim = call.query.shape
    if sizes is None:
        given = call.lists if schedule is None else schedule
        sizes = call.default_sizes(score) if given is None else given.built_for.sizes
    call.check_lists(sizes)
    call.check_heads(sizes)
    call.check_widening(sizes)
    if call.is_empty:
        lse = jnp.full((q_heads, num_tokens), -jnp.inf, jnp.float32)
        return jnp.zeros_like(call.query), lse if return_lse else None
    schedule = call.make_schedule(score, sizes) if schedule is None else schedule
    call.check_schedule(schedule, score, sizes)
    spec = PrefillSpec(
        shape=call.shape(sizes), score=score, sizes=sizes, dtype=call.query.dtype, mask=call.mask,
        has_lists=call.lists is not None, has_alibi=call.alibi_slopes is not None, returns_lse=return_lse,
        narrow=call.narrow, interpret=interpret,
    )  # fmt: skip
    way_out = "Use jattn.attention or jattn.attend over a PackedKV, which take varlen_backward"
    inputs = forbid_kernel_derivative(call.inputs(schedule, spec), "varlen_prefill", way_out)
    outputs = prefill(inputs, spec)
    if schedule.split_tiles is not None:
        outputs = combine_splits(outputs, schedule.table, schedule.split_tiles, inputs.sinks, spec)
    out = outputs.out.reshape(-1, q_heads, head_dim)[:num_tokens]
    return out, None if outputs.lse is None else outputs.lse[:, :num_tokens]
