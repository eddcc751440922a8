"""Gathered columns of a VerticalSlash mask: the column keys of each query head, copied side by side.

Two attentions over disjoint keys are combined: one over the gathered keys, which differ between query heads,
and one over the remaining keys, which only slashes make visible. n columns then cost n keys per query instead
of one KV tile per column. MInference computes columns in the same way.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache, gather_tokens
from jattn.masks import GatheredColumns, Mask
from jattn.masks.vertical_slash import UNUSED_POSITION
from jattn.spec import AttentionSpec


def gathers_columns(mask: Mask, spec: AttentionSpec) -> bool:
    """Return whether a layer gathers columns, which requires that visibility follows from positions alone."""
    is_plain = spec.causal and spec.window is None and spec.chunk_size is None and not spec.batch_invariant
    return mask.num_gathered > 0 and is_plain


def gathered_columns_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the attention to the gathered keys of a layer, which differ between query heads."""
    return dataclasses.replace(spec, num_kv_heads=spec.num_q_heads, causal=False, sparsity=None)


def gathered_kv_layout(
    columns: GatheredColumns, metadata: BatchMetadata
) -> tuple[Int32[Array, " reqs"], int]:
    """Return the index of each row's first gathered key, and the room for keys per row."""
    room = columns.positions.shape[-1]
    return jnp.arange(metadata.seq_lens.shape[0], dtype=jnp.int32) * room, room


def gather_kv(
    kv: PagedCache | PackedKV, metadata: BatchMetadata, columns: GatheredColumns
) -> tuple[PackedKV, Int32[Array, "reqs gathered q_heads"]]:
    """Return the gathered keys and values, row after row, and their positions; zeros at UNUSED_POSITION.

    Rows keep their seq_lens, from which query positions follow, though they have fewer gathered keys.
    """
    lens = metadata.seq_lens
    heads, room = columns.positions.shape[-2:]
    positions = columns.positions.reshape(-1, heads, room)[: len(lens)]  # decode rows are first
    positions = jnp.swapaxes(jnp.broadcast_to(positions, (len(lens), heads, room)), 1, 2)
    positions = jnp.where(positions < lens[:, None, None], positions, UNUSED_POSITION)
    k, v = gather_tokens(kv, metadata.block_table, positions, positions < UNUSED_POSITION)
    k, v = (x.reshape(len(lens) * room, heads, x.shape[-1]) for x in (k, v))
    starts, _ = gathered_kv_layout(columns, metadata)
    return PackedKV(k=k, v=v, kv_start_loc=starts, is_in_order=True, max_seq_len=room), positions


def add_gathered_gradients(
    dkv: Float[Array, "kv_tokens kv_heads head_dim"],
    gathered_dkv: Float[Array, "gathered_keys q_heads head_dim"],
    positions: Int32[Array, "reqs gathered q_heads"],
    kv_start_loc: Int32[Array, " reqs"],
) -> Float[Array, "kv_tokens kv_heads head_dim"]:
    """Add the gradients of gathered keys (or values) to the gradients of the keys they were copied from.

    The query heads of a group are added one after another, so that the order of the sum is fixed.

    Args:
        dkv: Gradient of the keys, or of the values.
        gathered_dkv: Gradient of the gathered keys, or of the gathered values, per query head.
        positions: Position of each gathered key; UNUSED_POSITION in unused places.
        kv_start_loc: Index of the first key of each request.
    """
    kv_tokens, kv_heads, head_dim = dkv.shape
    reqs, room, q_heads = positions.shape
    groups = (reqs, room, kv_heads, q_heads // kv_heads)
    token = jnp.where(
        positions < UNUSED_POSITION, kv_start_loc.astype(jnp.int32)[:, None, None] + positions, kv_tokens
    )
    token, gathered_dkv = token.reshape(groups), gathered_dkv.reshape(*groups, head_dim)
    dkv_sum, head = dkv.astype(jnp.float32), jnp.arange(kv_heads, dtype=jnp.int32)
    for index in range(q_heads // kv_heads):
        head_grad = gathered_dkv[:, :, :, index].astype(jnp.float32)
        dkv_sum = dkv_sum.at[token[..., index], head].add(head_grad, mode="drop")
    return dkv_sum.astype(dkv.dtype)
