"""Attention in plain XLA: an online softmax over chunks of keys.

Queries are split into tiles of one request each; a tile loops over the chunks of keys visible to it. Only a
few tiles are processed at a time, so memory does not grow with the number of requests or their length.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache
from jattn.implementations.xla.kv_chunks import has_no_keys
from jattn.implementations.xla.query_tiles import TILE_Q, QueryTiles, group_tiles, prefill_tiles
from jattn.implementations.xla.tile_attention import AttentionArgs, attend_tile
from jattn.masks import Mask
from jattn.spec import AttentionSpec

# Decode rows per batch of tiles, and queries per batch of prefill tiles (at least one tile).
TILES_AT_ONCE = 64
PREFILL_QUERIES_AT_ONCE = 512

type OutAndLse = tuple[Array, Array]


def attend(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    *,
    tiles: QueryTiles | None,
    mask: Mask | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Return output and log-sum-exp of every token, as `jattn.attend` defines them.

    Args:
        query: Queries of the step.
        kv: Keys and values.
        metadata: Metadata of the step.
        spec: Attention of the layer.
        tiles: Query tiles of the prefill region; None computes them here.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        sinks: Attention sinks per head.
        alibi_slopes: ALiBi slope per head.
    """
    bucket = metadata.bucket
    if bucket.max_tokens == 0 or has_no_keys(kv, metadata):
        return jnp.zeros_like(query), jnp.full((spec.num_q_heads, query.shape[0]), -jnp.inf, jnp.float32)
    args = AttentionArgs(kv, metadata, spec, mask, sinks, alibi_slopes)
    regions = []
    if bucket.max_decodes:
        regions.append(_decodes(query[: bucket.max_decode_tokens], args))
    if bucket.max_prefill_tokens:
        regions.append(_prefills(query[bucket.max_decode_tokens :], args, tiles))
    outs, lses = zip(*regions, strict=True)
    return jnp.concatenate(outs), jnp.concatenate(lses).T


def _decodes(query: Array, args: AttentionArgs) -> OutAndLse:
    """Attend in the decode region, one tile per row; the LSE is [tokens, q_heads]."""
    metadata, bucket = args.metadata, args.metadata.bucket
    q = query.reshape(bucket.max_decodes, bucket.decode_query_len, *query.shape[1:])
    rows = jnp.arange(bucket.max_decodes, dtype=jnp.int32)
    firsts = metadata.num_computed_tokens[: bucket.max_decodes]
    lens = metadata.query_lens[: bucket.max_decodes]
    at_once = 1 if args.spec.batch_invariant else TILES_AT_ONCE
    tile = functools.partial(attend_tile, args=args, is_prefill=False)
    out, lse = _map_tiles(tile, (q, rows, firsts, lens), at_once)
    return out.reshape(query.shape), lse.reshape(query.shape[0], -1)


def _prefills(query: Array, args: AttentionArgs, tiles: QueryTiles | None) -> OutAndLse:
    """Attend in the prefill region; the LSE is [tokens, q_heads]."""
    metadata, is_invariant = args.metadata, args.spec.batch_invariant
    if is_invariant:  # tiles of one size whatever the bucket, one at a time
        tiles = prefill_tiles(metadata, TILE_Q)
    tiles = prefill_tiles(metadata) if tiles is None else tiles
    index = tiles.token_index(past_end=metadata.bucket.max_prefill_tokens)  # [tiles, tile_q]
    q_tiles = jnp.take(query, index, axis=0, mode="clip")
    at_once = 1 if is_invariant else max(PREFILL_QUERIES_AT_ONCE // tiles.tile_q, 1)
    tile = functools.partial(attend_tile, args=args, is_prefill=True)
    firsts = tiles.first_positions(metadata)
    out, lse = _map_tiles(tile, (q_tiles, tiles.rows, firsts, tiles.lens), at_once)
    lses = jnp.full(query.shape[:2], -jnp.inf, lse.dtype).at[index].set(lse, mode="drop")
    return jnp.zeros_like(query).at[index].set(out, mode="drop"), lses


def _map_tiles(tile: Callable[..., OutAndLse], inputs: tuple[Array, ...], at_once: int) -> OutAndLse:
    """Map over tiles, at most `at_once` at a time.

    Tiles are split into equal groups, the last padded with empty tiles: a smaller remainder, as `jax.lax.map`
    handles it, would compile the loop a second time.
    """
    if at_once == 1:
        return jax.lax.map(lambda xs: tile(*xs), inputs)
    num = inputs[0].shape[0]
    groups = -(-num // at_once)
    if groups == 1:
        return jax.vmap(tile)(*inputs)
    size = -(-num // groups)
    outputs = jax.lax.map(lambda xs: jax.vmap(tile)(*xs), tuple(group_tiles(x, size) for x in inputs))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num], outputs)
