"""paged_decode: attention of each request's last few tokens to its paged KV cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.paged_decode.call import DecodeCall, from_rows
from pallas_kernels.paged_decode.combine import combine_splits
from pallas_kernels.paged_decode.kernel import run_decode_kernel
from pallas_kernels.paged_decode.schedule import BlockList, DecodeSchedule
from pallas_kernels.paged_decode.sizes import DecodeSizes, default_sizes
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.types import Interpret


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
    lists_have_head_bits: bool = False,
    schedule: DecodeSchedule | None = None,
    sizes: DecodeSizes | None = None,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Compute attention of each request's last `decode_query_len` tokens to all of its keys.

    Args:
        query: `decode_query_len` tokens of each request, request by request.
        k_cache: Paged keys; see DecodeCall for the layouts, dtypes, scales and lists.
        v_cache: Paged values, of the shape of k_cache; may have another dtype.
        block_table: Blocks of each request.
        seq_lens: Keys of each request, at most as many as its row of the table holds. 0 marks a padding row.
        score: Static: scale, mask and soft cap.
        layout: Static: "NHD" or "HND".
        decode_query_len: Static: query tokens per request, 1 to 8.
        k_scale: Factor of the stored keys; None = 1.
        v_scale: Factor of the stored values; None = 1.
        sinks: Attention sink of each query head: one more score, without a value.
        alibi_slopes: ALiBi slope of each query head.
        block_list: Sparse blocks to visit; None = all keys.
        list_block_size: Static: keys per sparse block; None without block_list.
        lists_have_head_bits: Static: whether lists say which query heads visit a block.
        schedule: Result of `make_schedule` for the same seq_lens, mask, sizes and lists; None = computed
            here.
        sizes: Static sizes of the kernel; None = chosen from the shapes.
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        The output in query.dtype, and the natural logarithm of the softmax's denominator in f32. A query
        without keys has output 0 and log-sum-exp -inf.

    Raises:
        ValueError: If shapes disagree.
        NotImplementedError: If the kernel does not support the request, or is differentiated.
    """
    call = DecodeCall(
        query=query, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens,
        layout=layout, decode_query_len=decode_query_len, k_scale=k_scale, v_scale=v_scale, sinks=sinks,
        alibi_slopes=alibi_slopes, block_list=block_list, list_block_size=list_block_size,
        lists_have_head_bits=lists_have_head_bits,
    )  # fmt: skip
    return attend_call(call, score=score, schedule=schedule, sizes=sizes, interpret=interpret)


def attend_call(
    call: DecodeCall,
    *,
    score: Score,
    schedule: DecodeSchedule | None,
    sizes: DecodeSizes | None,
    interpret: Interpret,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Check a call, choose its sizes and its schedule if they are None, and run both kernels."""
    query, k_cache, v_cache = call.query, call.k_cache, call.v_cache
    call.check()
    if 0 in (*k_cache.shape, *call.block_table.shape):
        return jnp.zeros_like(query), jnp.full(query.shape[1::-1], -jnp.inf, jnp.float32)
    if sizes is None:
        kv_dtypes = k_cache.dtype, v_cache.dtype
        has_lists = call.block_list is not None
        sizes = default_sizes(query.shape[2], rows=call.rows, kv_dtypes=kv_dtypes, has_lists=has_lists)
    schedule = call.make_schedule(score, sizes) if schedule is None else schedule
    call.check_schedule(schedule, score, sizes)
    spec = DecodeSpec(
        shape=call.shape(sizes), score=score, sizes=sizes, num_spans=schedule.num_spans, dtype=query.dtype,
        interpret=interpret,
    )  # fmt: skip
    fix = "Use jattn.attend over a PackedKV"
    inputs = forbid_kernel_derivative(call.inputs(spec, schedule.unit_ends), "paged_decode", fix)
    outputs = run_decode_kernel(inputs, spec)
    out, lse = combine_splits(outputs, inputs.sinks, schedule.unit_ends, spec)
    out = out.reshape(*out.shape[:3], query.shape[2])
    return from_rows(out, spec.shape), from_rows(lse, spec.shape).T
