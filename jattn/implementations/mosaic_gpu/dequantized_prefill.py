"""Prefill over an 8-bit cache: dequantize keys and values to a 16-bit buffer, then attend.

The queries of a prompt share the cost of dequantizing. Only keys visible to the queries are dequantized,
request after request, into a buffer of static size; requests that do not fit are processed in further passes.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache
from jattn.implementations.mosaic_gpu.kernel_config import PrefillKernelConfig, score_of
from jattn.implementations.mosaic_gpu.prefill import attend_prefill
from jattn.implementations.region_inputs import OutAndLse, RegionInputs
from jattn.pytree import replace
from jattn.spec import AttentionSpec
from pallas_kernels import varlen_prefill as prefill_kernel
from pallas_kernels.cache_read import TILE, cache_read, padded_len
from pallas_kernels.shared import Interpret

MAX_BYTES = 2**31  # of the buffer, unless a single request may need more
ALIGN = 128  # keys of the widest tile: a request's rows begin where a tile does


class KeyRanges(NamedTuple):
    """Range of keys to dequantize per request, and its place in the concatenation of all requests.

    Attributes:
        first_keys: First key visible to a query.
        seq_lens: One past the last key; 0 for a request that is not processed.
        base: Key in the request's first buffer row, a multiple of ALIGN.
        starts: First row of the request in the concatenation.
        ends: One past the request's last row.
    """

    first_keys: Int32[Array, " reqs"]
    seq_lens: Int32[Array, " reqs"]
    base: Int32[Array, " reqs"]
    starts: Int32[Array, " reqs"]
    ends: Int32[Array, " reqs"]


def attend_dequantized(
    inputs: RegionInputs,
    kernel: PrefillKernelConfig,
    *,
    return_lse: bool,
    interpret: Interpret = None,
) -> OutAndLse:
    """Return output and log-sum-exp of a region over an 8-bit cache.

    Args:
        inputs: Inputs of the region, whose cache has 8-bit keys or values.
        kernel: Kernel that attends to the dequantized keys.
        return_lse: Whether to return the log-sum-exp.
        interpret: plgpu.InterpretGPUParams to run cache_read on a CPU.
    """
    query, cache, metadata, spec = inputs.query, inputs.kv, inputs.metadata, inputs.spec
    assert isinstance(cache, PagedCache)
    key_ranges = _visible_key_ranges(metadata, spec)
    rows, reqs = buffer_len(metadata, spec), metadata.bucket.max_reqs

    def attend_ranges(key_ranges: KeyRanges, begin: Array) -> tuple[Array, Array | None]:
        """Attend in the requests with seq_len > 0; row `begin` of the concatenation is the buffer's first."""
        dequantized = replace(
            inputs,
            kv=_read(cache, metadata, key_ranges, begin, rows, query.dtype, interpret),
            metadata=replace(metadata, seq_lens=key_ranges.seq_lens),
        )
        return attend_prefill(dequantized, kernel, None, return_lse=return_lse, interpret=interpret)

    if worst_buffer_len(metadata, spec) <= rows:
        return attend_ranges(key_ranges, jnp.int32(0))

    def attend_chunk(first: Array) -> tuple[Array, Array, Array | None]:
        """Attend to as many requests, from `first` on, as fit the buffer."""
        begin = key_ranges.starts[first]
        next_request = (key_ranges.ends <= begin + rows).sum(dtype=jnp.int32)
        req = jnp.arange(reqs, dtype=jnp.int32)
        seq_lens = jnp.where((req >= first) & (req < next_request), key_ranges.seq_lens, 0)
        out, lse = attend_ranges(key_ranges._replace(seq_lens=seq_lens), begin)
        return next_request, out, lse

    def next_chunk(state: tuple[Array, Array, Array | None]) -> tuple[Array, Array, Array | None]:
        first, out, lse = state
        next_request, chunk_out, chunk_lse = attend_chunk(first)
        token, bounds = jnp.arange(query.shape[0], dtype=jnp.int32), metadata.query_start_loc
        is_processed = (token >= bounds[first]) & (token < bounds[next_request])
        out = jnp.where(is_processed[:, None, None], chunk_out, out)
        if lse is not None:
            assert chunk_lse is not None
            lse = jnp.where(is_processed[None, :], chunk_lse, lse)
        return next_request, out, lse

    no_lse = jnp.full((query.shape[1], query.shape[0]), -jnp.inf, jnp.float32) if return_lse else None
    start = jnp.int32(0), jnp.zeros_like(query), no_lse
    _, out, lse = lax.while_loop(lambda state: state[0] < reqs, next_chunk, start)
    return out, lse


def buffer_len(metadata: BatchMetadata, spec: AttentionSpec) -> int:
    """Return the static number of buffer rows: MAX_BYTES, within one request's and all requests' need."""
    request_len = padded_len(metadata.block_table.shape[1], metadata.block_size)
    bytes_of_row = 2 * 2 * spec.num_kv_heads * spec.head_dim  # keys and values, two bytes each
    return min(max(MAX_BYTES // bytes_of_row // TILE * TILE, request_len), worst_buffer_len(metadata, spec))


def worst_buffer_len(metadata: BatchMetadata, spec: AttentionSpec) -> int:
    """Return the static maximum number of rows that all requests of a bucket need."""
    reqs = metadata.bucket.max_reqs
    request_len = padded_len(metadata.block_table.shape[1], metadata.block_size)
    left, _ = spec.window or (None, None)
    reaches = [reach for reach in (left, spec.chunk_size) if reach is not None]
    if not reaches:
        return reqs * request_len
    # Of the keys before its first query, a request attends to at most the window or chunk size. Ends are
    # rounded to full tiles.
    num_visible = metadata.bucket.max_tokens + reqs * (min(reaches) + ALIGN + TILE)
    return min(reqs * request_len, -(-num_visible // TILE) * TILE)


def _visible_key_ranges(metadata: BatchMetadata, spec: AttentionSpec) -> KeyRanges:
    lens = metadata.seq_lens
    first_keys, _ = prefill_kernel.key_range(score_of(spec), lens - metadata.query_lens, lens)
    first_keys = jnp.clip(first_keys, 0, lens)
    base = first_keys // ALIGN * ALIGN
    rows = jnp.where(lens > 0, -(-(lens - base) // TILE) * TILE, 0)
    ends = jnp.cumsum(rows, dtype=jnp.int32)
    return KeyRanges(first_keys, lens, base, ends - rows, ends)


def _read(
    cache: PagedCache,
    metadata: BatchMetadata,
    key_ranges: KeyRanges,
    begin: Array,
    rows: int,
    dtype: DTypeLike,
    interpret: Interpret,
) -> PackedKV:
    """Dequantize the requests with seq_len > 0; row `begin` of the concatenation is the buffer's first."""
    starts = key_ranges.starts - begin - key_ranges.base

    def read(stored: Any, scale: Any) -> Array:
        return cache_read(
            jnp.asarray(stored),
            metadata.block_table,
            key_ranges.first_keys,
            key_ranges.seq_lens,
            dtype=dtype,
            scale=None if scale is None else jnp.asarray(scale),
            layout=cache.layout,
            kv_start_loc=starts,
            buffer_len=rows,
            interpret=interpret,
        )

    k, v = read(cache.k, cache.stored_k_scale), read(cache.v, cache.stored_v_scale)
    return PackedKV(k=k, v=v, kv_start_loc=starts)
