"""Attention by the Mosaic GPU kernels, a region at a time: paged_decode, and varlen_prefill for the rest."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.cache import PackedKV, PagedCache
from jattn.implementations import tile_lists
from jattn.implementations.kernel_work import (
    DecodeKernel,
    DecodeWork,
    Kernel,
    PrefillKernel,
    PrefillWork,
    Work,
    decode_work,
    list_call,
    prefill_work,
    score_of,
)
from jattn.implementations.widening import attend_widened
from jattn.masks import Mask
from jattn.metadata.batch import BatchMetadata
from jattn.quantize import rounded_token_head
from jattn.spec import QUERY_DTYPES, AttentionSpec
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.varlen_prefill import varlen_prefill


def attend(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    kernel: Kernel,
    work: Work | None,
    *,
    mask: Mask | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
    return_lse: bool = True,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"] | None]:
    """Output and log-sum-exp of every token of a region, as `jattn.attend` defines them.

    Args:
        query: The region's queries.
        kv: Where keys and values are.
        metadata: The region as a step of its own.
        spec: The layer.
        kernel: Which kernel, of which sizes: choose_kernel's for this layer.
        work: What was made for it once a step; None where that depends on where the layer's keys are.
        mask: Which keys a query sees beyond the spec's numbers.
        sinks: One more score per head.
        alibi_slopes: Slope per head.
        return_lse: Whether the log-sum-exp is wanted; None comes back where the kernel can do without.
        interpret: plgpu.InterpretGPUParams to run the kernels on a CPU, for tests.
    """
    if spec.query_quantization is not None:
        # In 16 bits again, in which the kernels multiply.
        query = rounded_token_head(query, QUERY_DTYPES[spec.query_quantization]).astype(query.dtype)
        spec = dataclasses.replace(spec, query_quantization=None)
    options: dict[str, Any] = {"sinks": sinks, "alibi_slopes": alibi_slopes, "interpret": interpret}
    if isinstance(kernel, DecodeKernel):
        assert isinstance(kv, PagedCache)
        assert work is None or isinstance(work, DecodeWork)
        return _decode(query, kv, metadata, spec, kernel, work, mask, **options)
    assert work is None or isinstance(work, PrefillWork)
    return _prefill(query, kv, metadata, spec, kernel, work, mask, return_lse=return_lse, **options)


def _decode(
    query: Array,
    kv: PagedCache,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    kernel: DecodeKernel,
    work: DecodeWork | None,
    mask: Mask | None,
    **options: Any,
) -> tuple[Array, Array]:
    """A decode region by paged_decode."""
    work = decode_work(kernel, metadata, spec, mask) if work is None else work
    return paged_decode(
        query,
        jnp.asarray(kv.k),
        jnp.asarray(kv.v),
        metadata.block_table,
        metadata.seq_lens,
        score=score_of(spec),
        layout=kv.layout,
        decode_query_len=metadata.bucket.decode_query_len,
        k_scale=_as_jax(kv.stored_k_scale),
        v_scale=_as_jax(kv.stored_v_scale),
        block_list=work.block_list,
        list_block_size=kernel.list_block_size,
        lists_tell_heads=kernel.lists_tell_heads,
        schedule=work.schedule,
        tiles=kernel.tiles,
        **options,
    )


def _prefill(
    query: Array,
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    kernel: PrefillKernel,
    work: PrefillWork | None,
    mask: Mask | None,
    **options: Any,
) -> tuple[Array, Array | None]:
    """A region by varlen_prefill."""
    if kernel.is_widened and isinstance(kv, PagedCache):
        of = functools.partial(_prefill, query, spec=spec, kernel=kernel, work=None, mask=mask, **options)
        how = {name: options[name] for name in ("return_lse", "interpret")}
        return attend_widened(query, kv, metadata, spec, of, **how)
    max_seq_len = kv.k.shape[0] if kernel.is_packed else None
    where: dict[str, Any]
    if isinstance(kv, PackedKV):
        where = {"kv_start_loc": kv.kv_start_loc}
    else:
        where = {"block_table": metadata.block_table, "layout": kv.layout}
    if work is None:
        starts = where.get("kv_start_loc")
        work = prefill_work(kernel, metadata, spec, mask, kv_start_loc=starts, max_seq_len=max_seq_len)
    if mask is not None:
        of_pairs = tile_lists.mask_of_pairs(
            mask, spec, kernel.tiles, **list_call(kernel, metadata, max_seq_len)
        )
        where |= {
            "lists": work.lists,
            "block_q": tile_lists.parts_of(mask, kernel.tiles, is_packed=kernel.is_packed).block_q,
            "mask": None if of_pairs is None else of_pairs._replace(arrays=work.mask_arrays),
        }
    return varlen_prefill(
        query,
        jnp.asarray(kv.k),
        jnp.asarray(kv.v),
        metadata.query_start_loc,
        metadata.seq_lens,
        score=score_of(spec),
        schedule=work.schedule,
        tiles=kernel.tiles,
        **where,
        **options,
    )


def _as_jax(scale: Any) -> Array | None:
    return None if scale is None else jnp.asarray(scale)
