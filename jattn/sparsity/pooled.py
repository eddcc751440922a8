"""Prefill over the blocks that matter: pooled queries against pooled keys, and how much mass to keep.

Source: MInference's block-sparse pattern and XAttention's threshold, with means as the pool.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jattn.cache import PackedKV, PagedCache
from jattn.implementations.reference import keys_and_values
from jattn.masks import BlockMask
from jattn.metadata.batch import BatchMetadata
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_positive


def select_prefill_blocks(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    *,
    mass: float,
    block_size: int = 128,
    num_first: int = 1,
    num_recent: int = 1,
) -> BlockMask:
    """For each head and block of queries the fewest blocks of keys that seem to hold `mass` of it all.

    A block of queries weighs blocks of keys by softmax(mean query . mean key); the most recent blocks and
    the request's first ones are always kept. Traced. Context in the cache counts as keys.

    Args:
        query: The step's queries; blocks are of those in the prefill region.
        kv: Where keys are, the step's own among them.
        metadata: The step's metadata.
        spec: The layer: heads, scale.
        mass: Static: share of the estimated attention to keep, in (0, 1].
        block_size: Static: queries and keys of a block.
        num_first: Static: blocks at a request's start that every query sees.
        num_recent: Static: blocks up to and with its own that every query sees.

    Returns:
        A mask for `attend(mask=)`, its rows those of the metadata.

    Raises:
        ValueError: mass or block_size is out of range.
    """
    require(0 < mass <= 1, "mass", "lie in (0, 1]", mass)
    require_positive(block_size=block_size)
    bucket = metadata.bucket
    first_q_block = metadata.num_computed_tokens // block_size
    q_blocks = -(-bucket.max_prefill_tokens // block_size) + 1
    q_means = _query_means(query, metadata, first_q_block, q_blocks, block_size)
    own = first_q_block[:, None] + jnp.arange(q_blocks, dtype=jnp.int32)[None, :]
    mean_keys = functools.partial(_key_means, kv, metadata, block_size)
    scale = spec.softmax_scale

    def one_request(inputs: tuple[Array, Array, Array]) -> Array:
        row, q, own = inputs
        k = jnp.repeat(mean_keys(row), spec.q_heads_per_kv_head, axis=0)  # [q_heads, kv_blocks, head_dim]
        s = jnp.einsum("qhd,hkd->hqk", q, k, preferred_element_type=jnp.float32) * scale
        number = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, :]
        is_past = number <= own[None, :, None]
        s = jnp.where(is_past, s, -jnp.inf)
        kept = largest(jax.nn.softmax(s, axis=-1), mass)
        return is_past & (kept | (number > own[None, :, None] - num_recent) | (number < num_first))

    rows = jnp.arange(bucket.max_reqs, dtype=jnp.int32)
    blocks = jax.lax.map(one_request, (rows, q_means, own))
    return BlockMask(blocks=blocks, first_q_block=first_q_block, block_q=block_size, block_kv=block_size)


def largest(weights: Float[Array, "*rows n"], mass: float) -> Bool[Array, "*rows n"]:
    """The fewest entries of each row that together have `mass` of its sum; zeros are never among them."""
    ordered = -jnp.sort(-weights, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    is_needed = before < mass * ordered.sum(axis=-1, keepdims=True)
    least = jnp.where(is_needed, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return (weights >= least) & (weights > 0)


def _query_means(
    query: Array, metadata: BatchMetadata, first_q_block: Array, q_blocks: int, block_size: int
) -> Float[Array, "reqs q_blocks q_heads head_dim"]:
    """Mean query of each row's blocks of the prefill region; 0 where a block has none."""
    bucket = metadata.bucket
    prefill = slice(bucket.max_decode_tokens, bucket.max_tokens)
    rows = metadata.token_rows[prefill]
    nth = metadata.positions[prefill] // block_size - first_q_block[rows]
    is_live = metadata.is_live_token[prefill]
    place = jnp.where(is_live, rows * q_blocks + nth, bucket.max_reqs * q_blocks)
    queries = jnp.where(is_live[:, None, None], query[prefill].astype(jnp.float32), 0.0)
    sums = (
        jnp.zeros((bucket.max_reqs * q_blocks, *query.shape[1:]), jnp.float32)
        .at[place]
        .add(queries, mode="drop")
    )
    counts = jnp.zeros(sums.shape[0], jnp.float32).at[place].add(1.0, mode="drop")
    means = sums / jnp.maximum(counts, 1.0)[:, None, None]
    return means.reshape(bucket.max_reqs, q_blocks, *query.shape[1:])


def _key_means(
    kv: PagedCache | PackedKV, metadata: BatchMetadata, block_size: int, row: Array
) -> Float[Array, "kv_heads kv_blocks head_dim"]:
    """Mean key of each block of one request; 0 past its end."""
    keys, _ = keys_and_values(kv, metadata, row, jnp.dtype(jnp.float32))
    is_live = jnp.arange(keys.shape[1], dtype=jnp.int32) < metadata.seq_lens[row]
    keys = jnp.where(is_live[None, :, None], keys, 0.0)
    missing = -keys.shape[1] % block_size
    blocks = lambda x: jnp.pad(x, ((0, 0), (0, missing), (0, 0))).reshape(
        x.shape[0], -1, block_size, x.shape[2]
    )
    counts = blocks(is_live.astype(jnp.float32)[None, :, None]).sum(axis=2)
    return blocks(keys).sum(axis=2) / jnp.maximum(counts, 1.0)
