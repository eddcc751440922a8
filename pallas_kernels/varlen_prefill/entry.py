"""varlen_prefill: attention of packed prompts over their own keys, packed or in a paged cache."""

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
    """Compute the attention of each token over the keys of its request.

    The last token of a request is at position `seq_len - 1`.

    Args:
        query: Tokens of all requests one after the other, optionally followed by padding.
        key: Packed keys with kv_start_loc, or a paged cache with block_table; see PrefillCall for the shapes.
        value: Values, like `key`.
        query_start_loc: First token of each request and one past the last; starts with 0.
        seq_lens: Number of keys of each request, at most what the block table has room for.
        score: Scale, soft cap, causality, window and chunk size. Static.
        kv_start_loc: First key of each request if keys are packed.
        block_table: Block ids of each request for a paged cache.
        layout: Layout of a paged cache: "NHD" or "HND". Static.
        k_scale: Scale of 8-bit keys, key = stored * k_scale; None for 1. See PrefillCall for the shapes.
        v_scale: Scale of 8-bit values, like `k_scale`.
        sinks: Attention sinks: an extra score per head without a value.
        alibi_slopes: ALiBi slope of each head.
        schedule: Result of make_schedule for the same lengths, mask and sizes; None to build it here.
        lists: Tile lists, the KV tiles to visit; None for all. See PrefillCall.
        block_q: Queries per query block that the tile lists distinguish, or None. Static.
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
    """Validate a call, choose what is None, and run the kernels; see varlen_prefill."""
    call.check()
    num_tokens, q_heads, head_dim = call.query.shape
    if sizes is None:
        prebuilt = call.lists if schedule is None else schedule
        sizes = call.default_sizes(score) if prebuilt is None else prebuilt.built_for.sizes
    call.check_lists(sizes)
    call.check_heads(sizes)
    call.check_quantized(sizes)
    if call.is_empty:
        lse = jnp.full((q_heads, num_tokens), -jnp.inf, jnp.float32)
        return jnp.zeros_like(call.query), lse if return_lse else None
    schedule = call.make_schedule(score, sizes) if schedule is None else schedule
    call.check_schedule(schedule, score, sizes)
    spec = PrefillSpec(
        shape=call.shape(sizes), score=score, sizes=sizes, dtype=call.query.dtype, mask=call.mask,
        has_lists=call.lists is not None, has_alibi=call.alibi_slopes is not None, returns_lse=return_lse,
        quantized=call.quantized, interpret=interpret,
    )  # fmt: skip
    fix = "Use jattn.attention or jattn.attend over a PackedKV, which take varlen_backward"
    inputs = forbid_kernel_derivative(call.inputs(schedule, spec), "varlen_prefill", fix)
    outputs = prefill(inputs, spec)
    if schedule.split_tiles is not None:
        outputs = combine_splits(outputs, schedule.table, schedule.split_tiles, inputs.sinks, spec)
    out = outputs.out.reshape(-1, q_heads, head_dim)[:num_tokens]
    return out, None if outputs.lse is None else outputs.lse[:, :num_tokens]
