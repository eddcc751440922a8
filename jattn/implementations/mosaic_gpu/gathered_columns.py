"""A VerticalSlash whose columns are gathered: a head's keys side by side in tiles of their own.

Two attentions over disjoint keys are merged: one over the gathered keys, each query head with its own, and
one over what slashes see besides. What a head's n columns cost is n keys a query then, not a tile of keys
for each column. MInference computes its columns so.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache, gather_tokens
from jattn.implementations.mosaic_gpu.kernel_config import PrefillKernelConfig
from jattn.implementations.mosaic_gpu.kernel_selection import sparse_sizes
from jattn.masks import GatheredColumns
from jattn.masks.vertical_slash import UNUSED_POSITION
from jattn.spec import AttentionSpec


class GatheredColumnsLayer(NamedTuple):
    """The layer that attends to gathered keys, of which each query head has its own, and its kernel."""

    spec: AttentionSpec
    kernel: PrefillKernelConfig


def gathered_columns_layer(spec: AttentionSpec, columns: GatheredColumns) -> GatheredColumnsLayer:
    """Of a layer whose columns are gathered."""
    own = dataclasses.replace(spec, num_kv_heads=spec.num_q_heads, causal=False, sparsity=None)
    return GatheredColumnsLayer(
        own, PrefillKernelConfig(sizes=sparse_sizes(own, columns), has_lists=True, is_packed=True)
    )


def gathered_kv_layout(columns: GatheredColumns, metadata: BatchMetadata) -> dict[str, Any]:
    """First gathered key of each row, and how many there are at most: PackedKV's."""
    room = columns.positions.shape[-1]
    starts = jnp.arange(metadata.seq_lens.shape[0], dtype=jnp.int32) * room
    return {"kv_start_loc": starts, "max_seq_len": room}


def gather_kv(
    kv: PagedCache | PackedKV, metadata: BatchMetadata, columns: GatheredColumns
) -> tuple[PackedKV, Int32[Array, "reqs gathered q_heads"]]:
    """Return the gathered keys and values, row after row, and their positions; zeros at UNUSED_POSITION.

    Rows keep their seq_lens, by which queries know where they stand; of gathered keys fewer are there.
    """
    lens = metadata.seq_lens
    heads, room = columns.positions.shape[-2:]
    places = columns.positions.reshape(-1, heads, room)[
        : len(lens)
    ]  # a step's decode rows are its first ones
    places = jnp.swapaxes(jnp.broadcast_to(places, (len(lens), heads, room)), 1, 2)
    places = jnp.where(places < lens[:, None, None], places, UNUSED_POSITION)
    k, v = gather_tokens(kv, metadata.block_table, places, places < UNUSED_POSITION)
    flat = lambda x: x.reshape(len(lens) * room, heads, x.shape[-1])
    where = gathered_kv_layout(columns, metadata)
    return PackedKV(k=flat(k), v=flat(v), is_in_order=True, **where), places


def add_gathered_gradients(
    of_rest: Float[Array, "kv_tokens kv_heads head_dim"],
    of_gathered: Float[Array, "gathered_tokens q_heads head_dim"],
    places: Int32[Array, "reqs gathered q_heads"],
    kv_start_loc: Int32[Array, " reqs"],
) -> Float[Array, "kv_tokens kv_heads head_dim"]:
    """Gradients of keys, or of values: those of gathered ones are added where these came from.

    Head by head of a group, so that no two are added to one place at once: the sum has one order.
    """
    kv_tokens, kv_heads, head_dim = of_rest.shape
    reqs, room, q_heads = places.shape
    grouped = lambda x: x.reshape(reqs, room, kv_heads, q_heads // kv_heads, *x.shape[3:])
    token = jnp.where(
        places < UNUSED_POSITION, kv_start_loc.astype(jnp.int32)[:, None, None] + places, kv_tokens
    )
    token, given = grouped(token), grouped(of_gathered.reshape(reqs, room, q_heads, head_dim))
    total, head = of_rest.astype(jnp.float32), jnp.arange(kv_heads, dtype=jnp.int32)
    for nth in range(q_heads // kv_heads):
        part = given[:, :, :, nth].astype(jnp.float32)
        total = total.at[token[..., nth], head].add(part, mode="drop")
    return total.astype(of_rest.dtype)
