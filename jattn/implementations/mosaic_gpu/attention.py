"""Attention with the Mosaic GPU kernels paged_decode and varlen_prefill, one region at a time."""

import jax.numpy as jnp

from jattn.cache import PagedCache
from jattn.cache.quantization import round_token_head
from jattn.implementations.mosaic_gpu.dequantized_prefill import attend_dequantized
from jattn.implementations.mosaic_gpu.kernel_config import DecodeKernelConfig, KernelConfig, score_of
from jattn.implementations.mosaic_gpu.kernel_plans import DecodeKernelPlan, KernelPlan, plan_decode_kernel
from jattn.implementations.mosaic_gpu.prefill import attend_prefill
from jattn.implementations.region_inputs import OutAndLse, RegionInputs
from jattn.pytree import replace
from jattn.spec import QUERY_DTYPES
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.shared import Interpret


def attend(
    inputs: RegionInputs,
    kernel: KernelConfig,
    kernel_plan: KernelPlan | None = None,
    *,
    return_lse: bool = True,
    interpret: Interpret = None,
) -> OutAndLse:
    """Return output and log-sum-exp of every token of a region, as `jattn.attend` defines them.

    Args:
        inputs: Inputs of the region.
        kernel: Kernel and its sizes, from choose_kernel.
        kernel_plan: Kernel plan of the step; None computes it here.
        return_lse: Return the log-sum-exp; if False, None may be returned instead.
        interpret: plgpu.InterpretGPUParams to run the kernels on a CPU, for tests.
    """
    query, kv, metadata, spec = inputs.query, inputs.kv, inputs.metadata, inputs.spec
    if spec.query_quantization is not None:
        # The kernels multiply in 16 bits, so queries are dequantized again.
        query = round_token_head(query, QUERY_DTYPES[spec.query_quantization]).astype(query.dtype)
        inputs = replace(inputs, query=query)
    if isinstance(kernel, DecodeKernelConfig):
        assert isinstance(kv, PagedCache)
        if kernel_plan is None:
            kernel_plan = plan_decode_kernel(kernel, metadata, spec, inputs.mask)
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
            sinks=inputs.sinks,
            alibi_slopes=inputs.alibi_slopes,
            score_mod=None if inputs.score_mod is None else inputs.score_mod.for_kernels(),
            block_list=kernel_plan.block_list,
            list_block_size=kernel.list_block_size,
            lists_have_head_bits=kernel.lists_have_head_bits,
            schedule=kernel_plan.schedule,
            sizes=kernel.sizes,
            interpret=interpret,
        )
    assert not isinstance(kernel_plan, DecodeKernelPlan)
    if kernel.uses_cache_read and isinstance(kv, PagedCache):
        return attend_dequantized(inputs, kernel, return_lse=return_lse, interpret=interpret)
    return attend_prefill(inputs, kernel, kernel_plan, return_lse=return_lse, interpret=interpret)
