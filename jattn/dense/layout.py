"""Texts of a batch, or documents packed one behind the other, as the rows of a step. Traced."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, Shaped

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata
from jattn.batch.slots import PAD_SLOT_ID
from jattn.cache import PackedKV
from jattn.masks import Document, Mask, Sinks
from jattn.masks.documents import document_runs


class Laid(NamedTuple):
    """Attention as a step of requests.

    Attributes:
        query: Of all rows, one behind the other.
        kv: Likewise.
        metadata: The step's.
        mask: With what the layout itself hides.
        row_tokens: Static: tokens of a row, where rows are equally long.
        q_tokens: Static: how many of them are queries; what stands behind is padding.
    """

    query: Float[Array, "tokens q_heads head_dim"]
    kv: PackedKV
    metadata: BatchMetadata
    mask: Mask | None
    row_tokens: int
    q_tokens: int


def lay_batch(
    q: Float[Array, "batch q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_tokens kv_heads head_dim"],
    mask: Mask | None,
    *,
    last_ahead: int | None,
    is_positional: bool,
) -> Laid:
    """A row for each text: its query i stands at its key i.

    A row's last query stands at its last key, so where there are more of the ones than of the others, the
    others are padded; where it does not matter where a query stands, nothing is.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: What queries see of each row.
        last_ahead: Static: how far ahead of a query's own place a key may be seen; None = any distance.
        is_positional: Static: whether it matters where a query stands.
    """
    (batch, q_tokens), kv_tokens = q.shape[:2], k.shape[1]
    seen = kv_tokens if last_ahead is None else min(kv_tokens, q_tokens + last_ahead)
    room, starts = kv_tokens, jnp.arange(batch, dtype=jnp.int32)
    query_len, seq_len = q_tokens, seen
    if is_positional and 0 < seen != q_tokens:
        query_len = seq_len = max(q_tokens, seen)
        q = _padded(q, query_len)
        if seen < q_tokens:
            k, v, room = _padded(k, q_tokens), _padded(v, q_tokens), max(kv_tokens, q_tokens)
            mask = Sinks(seen) if mask is None else mask & Sinks(seen)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    metadata = _metadata(
        jnp.arange(batch + 1, dtype=jnp.int32) * query_len,
        jnp.full(batch, seq_len, jnp.int32),
        num_tokens=batch * query_len,
    )
    starts = starts * room
    kv = PackedKV(k=flat(k), v=flat(v), kv_start_loc=starts, is_in_order=True, max_seq_len=seq_len)
    return Laid(flat(q), kv, metadata, mask, query_len, q_tokens)


def lay_packed(q: Array, k: Array, v: Array, cu_seqlens: Int[Array, " bounds"], mask: Mask | None) -> Laid:
    """A row for each document: the tokens from one of `cu_seqlens` to the next."""
    bounds = cu_seqlens.astype(jnp.int32)
    metadata = _metadata(bounds, bounds[1:] - bounds[:-1], num_tokens=q.shape[0])
    kv = PackedKV(k=k, v=v, kv_start_loc=bounds[:-1], is_in_order=True)
    return Laid(q, kv, metadata, mask, row_tokens=q.shape[0], q_tokens=q.shape[0])


def unpadded(laid: Laid, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """From [tokens, ...] to [batch, q_tokens, ...]: those that are queries, by text."""
    batch = laid.metadata.bucket.max_reqs
    return x.reshape(batch, laid.row_tokens, *x.shape[1:])[:, : laid.q_tokens]


def repadded(laid: Laid, x: Shaped[Array, "..."], filler: float) -> Shaped[Array, "..."]:
    """From [batch, q_tokens, ...] to [tokens, ...], the way back of `unpadded`, with a filler for padding."""
    batch, behind = x.shape[0], laid.row_tokens - laid.q_tokens
    widths = ((0, 0), (0, behind), *[(0, 0)] * (x.ndim - 2))
    wide = jnp.pad(x, widths, constant_values=filler)
    return wide.reshape(batch * laid.row_tokens, *x.shape[2:])


def segments(segment_ids: Int[Array, "batch tokens"], *, as_runs: bool) -> Document:
    """The mask under which a token sees those of its own id.

    Args:
        segment_ids: An id of each token.
        as_runs: Static: number the runs of equal ids instead: ids that ascend, as skipping whole tiles needs.
    """
    return document_runs(segment_ids) if as_runs else Document(ids=segment_ids)


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
        block_size=16,  # of no cache
    )


def _padded(x: Any, tokens: int) -> Any:
    """With zeros behind each text, so that it has at least so many tokens."""
    return jnp.pad(x, ((0, 0), (0, max(tokens - x.shape[1], 0)), (0, 0), (0, 0)))
