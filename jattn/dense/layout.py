"""The layout of a batch of sequences, or of packed documents, as the batch metadata of a step.

All functions work inside jit.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, Shaped

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata
from jattn.batch.slots import PAD_SLOT_ID
from jattn.cache import PackedKV
from jattn.masks import Mask, Sinks
from pallas_kernels.varlen_prefill import ALIGN


class DenseLayout(NamedTuple):
    """Dense attention expressed as a step of requests.

    Attributes:
        query: Queries of all rows, concatenated.
        kv: Keys and values of all rows, concatenated.
        metadata: Batch metadata of the step.
        mask: Mask, including the padding that the layout adds.
        row_tokens: Static: number of tokens per row, for rows of equal length.
        q_tokens: Static: number of queries per row; the other tokens are padding.
    """

    query: Float[Array, "tokens q_heads head_dim"]
    kv: PackedKV
    metadata: BatchMetadata
    mask: Mask | None
    row_tokens: int
    q_tokens: int


def layout_batch(
    q: Float[Array, "batch q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_tokens kv_heads head_dim"],
    mask: Mask | None,
    *,
    max_lookahead: int | None,
    is_positional: bool,
) -> DenseLayout:
    """Lay out one row per batch element, with query i at key i.

    In a step, the last query of a row is at its last key. If the numbers of queries and keys differ, the
    shorter side is padded, unless the positions do not matter.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: Mask with one row per batch element, if any.
        max_lookahead: Static: maximum distance from a query to a later key it attends to; None = unlimited.
        is_positional: Static: whether the output depends on the positions of the queries.
    """
    (batch, q_tokens), kv_tokens = q.shape[:2], k.shape[1]
    num_visible = kv_tokens if max_lookahead is None else min(kv_tokens, q_tokens + max_lookahead)
    row_stride, query_len, seq_len = kv_tokens, q_tokens, num_visible
    if is_positional and 0 < num_visible != q_tokens:
        query_len = seq_len = max(q_tokens, num_visible)
        q = _pad_tokens(q, query_len)
        if num_visible < q_tokens:
            k, v, row_stride = _pad_tokens(k, q_tokens), _pad_tokens(v, q_tokens), max(kv_tokens, q_tokens)
            mask = Sinks(num_visible) if mask is None else mask & Sinks(num_visible)

    def flat(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])

    metadata = _metadata(
        jnp.arange(batch + 1, dtype=jnp.int32) * query_len,
        jnp.full(batch, seq_len, jnp.int32),
        num_tokens=batch * query_len,
    )
    starts = jnp.arange(batch, dtype=jnp.int32) * row_stride
    kv = PackedKV(
        k=flat(k),
        v=flat(v),
        kv_start_loc=starts,
        is_in_order=True,
        is_aligned=query_len == seq_len and (batch == 1 or row_stride % ALIGN == query_len % ALIGN == 0),
        max_seq_len=seq_len,
    )
    return DenseLayout(flat(q), kv, metadata, mask, query_len, q_tokens)


def layout_packed(
    q: Array, k: Array, v: Array, cu_seqlens: Int[Array, " bounds"], mask: Mask | None
) -> DenseLayout:
    """Lay out one row per packed document, given by `cu_seqlens`."""
    bounds = cu_seqlens.astype(jnp.int32)
    metadata = _metadata(bounds, bounds[1:] - bounds[:-1], num_tokens=q.shape[0])
    kv = PackedKV(k=k, v=v, kv_start_loc=bounds[:-1], is_in_order=True)
    return DenseLayout(q, kv, metadata, mask, row_tokens=q.shape[0], q_tokens=q.shape[0])


def unpad(layout: DenseLayout, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Reshape [tokens, ...] to [batch, q_tokens, ...], dropping padding."""
    batch = layout.metadata.bucket.max_reqs
    return x.reshape(batch, layout.row_tokens, *x.shape[1:])[:, : layout.q_tokens]


def repad(layout: DenseLayout, x: Shaped[Array, "..."], fill_value: float) -> Shaped[Array, "..."]:
    """Reshape [batch, q_tokens, ...] to [tokens, ...], the inverse of `unpad`, filling the padding."""
    batch, num_padding = x.shape[0], layout.row_tokens - layout.q_tokens
    widths = ((0, 0), (0, num_padding), *[(0, 0)] * (x.ndim - 2))
    padded = jnp.pad(x, widths, constant_values=fill_value)
    return padded.reshape(batch * layout.row_tokens, *x.shape[2:])


def _metadata(query_start_loc: Array, seq_lens: Int32[Array, " reqs"], num_tokens: int) -> BatchMetadata:
    reqs = seq_lens.shape[0]
    return BatchMetadata(
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        block_table=jnp.zeros((reqs, 0), jnp.int32),
        slot_mapping=jnp.full(num_tokens, PAD_SLOT_ID, jnp.int32),
        num_decodes=jnp.int32(0),
        num_prefills=jnp.int32(reqs),
        bucket=Bucket(max_prefills=reqs, max_prefill_tokens=num_tokens),
        block_size=16,  # Unused: there is no cache.
    )


def _pad_tokens(x: Array, tokens: int) -> Array:
    """Pad each sequence with zeros to at least `tokens` tokens."""
    return jnp.pad(x, ((0, 0), (0, max(tokens - x.shape[1], 0)), (0, 0), (0, 0)))
