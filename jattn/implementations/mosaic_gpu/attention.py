"""Attention with the Mosaic GPU kernels paged_decode and varlen_prefill, one region at a time."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache
from jattn.cache.quantization import round_token_head
from jattn.implementations.mosaic_gpu.dequantized_prefill import attend_dequantized
from jattn.implementations.mosaic_gpu.kernel_config import DecodeKernelConfig, KernelConfig, score_of
from jattn.implementations.mosaic_gpu.kernel_plans import DecodeKernelPlan, KernelPlan, plan_decode_kernel
from jattn.implementations.mosaic_gpu.prefill import attend_prefill
from jattn.masks import Mask
from jattn.score_mod import ScoreMod
from jattn.spec import QUERY_DTYPES, AttentionSpec
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.shared import Interpret


def attend(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    kernel: KernelConfig,
    kernel_plan: KernelPlan | None,
    *,
    mask: Mask | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
    score_mod: ScoreMod | None,
    return_lse: bool = True,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"] | None]:
    """Return output and log-sum-exp of every token of a region, as `jattn.attend` defines them.

    Args:
        query: Queries of the region.
        kv: Keys and values.
        metadata: Metadata of the region as a separate step.
        spec: Attention of the layer.
        kernel: Kernel and its sizes, from choose_kernel.
        kernel_plan: Kernel plan of the step; None computes it here.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        sinks: Attention sinks per head.
        alibi_slopes: ALiBi slope per head.
        score_mod: Score function of the layer; None without one.
        return_lse: Return the log-sum-exp; if False, None may be returned instead.
        interpret: plgpu.InterpretGPUParams to run the kernels on a CPU, for tests.
    """
    if spec.query_quantization is not None:
        # The kernels multiply in 16 bits, so queries are dequantized again.
        query = round_token_head(query, QUERY_DTYPES[spec.query_quantization]).astype(query.dtype)
    if isinstance(kernel, DecodeKernelConfig):
        assert isinstance(kv, PagedCache)
        if kernel_plan is None:
            kernel_plan = plan_decode_kernel(kernel, metadata, spec, mask)
        assert isinstance(kernel_plan, DecodeKernelPlan)
        k_scale, v_scale = kv.stored_k_scale, kv.stored_v_scale
        return paged_decode(
            query,
            jnp.asarray(kv.k),
            jnp.asarray(kv.v),
            metadata.block_table,
            metadata.seq_lens,
            score=score_of(spec),
            layout=kv.layout,
            decode_query_len=metadata.bucket.decode_query_len,
            k_scale=None if k_scale is None else jnp.asarray(k_scale),
            v_scale=None if v_scale is None else jnp.asarray(v_scale),
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            score_mod=None if score_mod is None else score_mod.for_kernels(),
            block_list=kernel_plan.block_list,
            list_block_size=kernel.list_block_size,
            lists_have_head_bits=kernel.lists_have_head_bits,
            schedule=kernel_plan.schedule,
            sizes=kernel.sizes,
            interpret=interpret,
        )
    assert not isinstance(kernel_plan, DecodeKernelPlan)
    if kernel.uses_cache_read and isinstance(kv, PagedCache):
        return attend_dequantized(
            query,
            kv,
            metadata,
            spec,
            kernel,
            mask=mask,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            score_mod=score_mod,
            return_lse=return_lse,
            interpret=interpret,
        )
    return attend_prefill(
        query,
        kv,
        metadata,
        spec,
        kernel,
        kernel_plan,
        mask=mask,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        score_mod=score_mod,
        return_lse=return_lse,
        interpret=interpret,
    )
