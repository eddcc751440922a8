"""Attention patterns to compare, for full sequences in training and for a paged cache in decode."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import jattn
from jattn import masks, sparsity

BLOCK, TOP_K, WINDOW = 16, 4, 64  # keys per block, blocks per query, window size
INDEX_HEADS, INDEX_DIM = 4, 16  # heads of DSA's indexer and their size


class Selection(NamedTuple):
    """What the attention of some tokens needs besides queries, keys and values.

    Attributes:
        gates: Weights of NSA's three attention branches.
        index_q: Queries of DSA's indexer.
        index_k: Keys of DSA's indexer.
        index_weights: Weight of each head of DSA's indexer.
    """

    gates: Float[Array, "*tokens q_heads 3"]
    index_q: Float[Array, "*tokens index_heads index_dim"]
    index_k: Float[Array, "*tokens index_dim"]
    index_weights: Float[Array, "*tokens index_heads"]


class LayerState(NamedTuple):
    """State of a layer between decode steps.

    Attributes:
        cache: Paged cache of the layer.
        selector: Query of the first token of each request's current block, which selects the key blocks.
        index_keys: Keys of DSA's indexer by cache block.
    """

    cache: jattn.PagedCache
    selector: Float[Array, "reqs q_heads head_dim"]
    index_keys: Float[Array, "blocks block_size index_dim"]


# (q, k, v [batch, tokens, heads, head_dim], selection) -> out
type Train = Callable[[Array, Array, Array, Selection], Array]
# (query [reqs, q_heads, head_dim], state, metadata, spec, selection) -> out
type Decode = Callable[[Array, LayerState, jattn.BatchMetadata, jattn.AttentionSpec, Selection], Array]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Attention of a layer.

    For patterns of blocks, the first query of each block of BLOCK queries selects the key blocks for all of
    them. In decode, this query is the state's `selector`.

    Attributes:
        train: Attention over full sequences.
        decode: Attention of one token per request over the paged cache.
        mask: Mask of `train` for queries, keys and selection, for plotting.
        loss: Term of the training loss that trains the selection, from queries, keys and selection.
    """

    train: Train
    decode: Decode
    mask: Callable[[Array, Array, Selection], masks.Mask]
    loss: Callable[[Array, Array, Selection], Array] = lambda q, k, selection: jnp.zeros(())


def windowed(window: tuple[int, int] | None) -> Pattern:
    """Return sliding-window attention, or causal attention if `window` is None."""
    left = None if window is None else window[0]
    return Pattern(
        train=lambda q, k, v, selection: jattn.attention(q, k, v, causal=True, window=window),
        decode=lambda query, state, metadata, spec, selection: jattn.attend(
            query, state.cache, metadata, dataclasses.replace(spec, window=window)
        ),
        mask=lambda q, k, selection: masks.Causal() & masks.Window(left=left),
    )


def moba() -> Pattern:
    """Return MoBA-like attention: the query's block, and the blocks whose mean keys score highest."""

    def select_blocks(q: Array, k: Array) -> masks.Mask:
        return sparsity.moba(q, k, block_size=BLOCK, top_k=TOP_K, block_q=BLOCK)

    def decode(
        query: Array, state: LayerState, metadata: jattn.BatchMetadata, spec: jattn.AttentionSpec,
        selection: Selection,
    ) -> Array:  # fmt: skip
        keys, _ = cached_means(state.cache, metadata)
        scores = block_scores(state.selector, keys)  # [reqs, q_heads, blocks]
        return jattn.attend(query, state.cache, metadata, spec, mask=select_best_blocks(scores, metadata))

    return Pattern(
        train=lambda q, k, v, selection: jattn.attention(q, k, v, causal=True, mask=select_blocks(q, k)),
        decode=decode,
        mask=lambda q, k, selection: masks.Causal() & select_blocks(q, k),
    )


def nsa() -> Pattern:
    """Return NSA-like attention: compressed blocks, selected blocks and a window, with trained gates."""

    def decode(
        query: Array, state: LayerState, metadata: jattn.BatchMetadata, spec: jattn.AttentionSpec,
        selection: Selection,
    ) -> Array:  # fmt: skip
        keys, values = cached_means(state.cache, metadata)
        group, position = spec.q_heads_per_kv_head, metadata.seq_lens - 1
        scale = spec.softmax_scale
        probs = jnp.exp(complete_block_log_probs(block_scores(query, keys) * scale, position))
        compressed = jnp.einsum("rhb,rbhd->rhd", probs, jnp.repeat(values, group, axis=2))
        log_probs = complete_block_log_probs(
            block_scores(state.selector, keys) * scale, position // BLOCK * BLOCK
        )
        kv_head_scores = jax.nn.logsumexp(log_probs.reshape(len(log_probs), -1, group, keys.shape[1]), axis=2)
        mask = select_best_blocks(kv_head_scores, metadata, num_first=1)
        selected = jattn.attend(query, state.cache, metadata, spec, mask=mask)
        window_spec = dataclasses.replace(spec, window=(WINDOW - 1, 0))
        branches = compressed, selected, jattn.attend(query, state.cache, metadata, window_spec)
        gates = selection.gates
        gated = [gates[..., i, None] * out.astype(gates.dtype) for i, out in enumerate(branches)]
        return sum(gated[1:], gated[0]).astype(query.dtype)

    def select_nsa_blocks(q: Array, k: Array) -> masks.Mask:
        return sparsity.select_nsa_blocks(
            q, sparsity.block_means(k, BLOCK), block_size=BLOCK, num_selected=TOP_K, block_q=BLOCK
        )

    return Pattern(
        train=lambda q, k, v, selection: sparsity.nsa(
            q, k, v, selection.gates, block_size=BLOCK, num_selected=TOP_K, window=WINDOW, block_q=BLOCK
        ),
        decode=decode,
        mask=lambda q, k, selection: (
            masks.Causal() & (select_nsa_blocks(q, k) | masks.Window(left=WINDOW - 1))
        ),
    )


def dsa() -> Pattern:
    """Return DeepSeek sparse attention: the keys that an indexer scores best, with a loss for the indexer."""
    count = TOP_K * BLOCK

    def decode(
        query: Array, state: LayerState, metadata: jattn.BatchMetadata, spec: jattn.AttentionSpec,
        selection: Selection,
    ) -> Array:  # fmt: skip
        mask = sparsity.select_cached_tokens(
            selection.index_q, state.index_keys, selection.index_weights, metadata.block_table,
            metadata.seq_lens, num_selected=count,
        )  # fmt: skip
        return jattn.attend(query, state.cache, metadata, spec, mask=mask)

    return Pattern(
        train=lambda q, k, v, selection: sparsity.dsa(q, k, v, *selection[1:], num_selected=count),
        decode=decode,
        mask=lambda q, k, selection: (
            masks.Causal() & sparsity.select_tokens(*selection[1:], num_selected=count)
        ),
        loss=lambda q, k, selection: sparsity.indexer_loss(q, k, *selection[1:], num_selected=count),
    )


def cached_means(
    cache: jattn.PagedCache, metadata: jattn.BatchMetadata
) -> tuple[Float[Array, "reqs blocks kv_heads head_dim"], Float[Array, "reqs blocks kv_heads head_dim"]]:
    """Return the mean key and value of each block of each request; valid only for full blocks."""
    keys, values = jattn.blocks_of(cache, metadata.block_table)
    return keys.astype(jnp.float32).mean(axis=2), values.astype(jnp.float32).mean(axis=2)


def block_scores(
    query: Float[Array, "reqs q_heads head_dim"], keys: Float[Array, "reqs blocks kv_heads head_dim"]
) -> Float[Array, "reqs q_heads blocks"]:
    """Return q.k of each query head with the mean keys of its kv head."""
    keys = jnp.repeat(keys, query.shape[1] // keys.shape[2], axis=2)
    return jnp.einsum("rhd,rbhd->rhb", query.astype(jnp.float32), keys)


def complete_block_log_probs(
    scores: Float[Array, "reqs q_heads blocks"], position: Int[Array, " reqs"]
) -> Float[Array, "reqs q_heads blocks"]:
    """Return the log-softmax over the blocks that end at or before `position`; -inf for other blocks."""
    is_complete = ((jnp.arange(scores.shape[2]) + 1)[None] * BLOCK <= position[:, None] + 1)[:, None]
    return jnp.where(
        is_complete, jax.nn.log_softmax(jnp.where(is_complete, scores, -1e30), axis=-1), -jnp.inf
    )


def select_best_blocks(
    scores: Float[Array, "reqs heads blocks"], metadata: jattn.BatchMetadata, num_first: int = 0
) -> masks.BlockMask:
    """Return a mask of TOP_K blocks per request, among them the query's block and the first `num_first`."""
    own_block = ((metadata.seq_lens - 1) // BLOCK)[:, None, None]
    block = jnp.arange(scores.shape[-1])[None, None]
    scores = jnp.where((block == own_block) | (block < num_first), jnp.inf, scores)
    chosen = sparsity.top_k_blocks(jnp.where(block > own_block, -jnp.inf, scores), TOP_K)
    return masks.BlockMask(blocks=chosen[:, :, None], block_q=None, block_kv=BLOCK)


PATTERNS = {
    **{"dense": windowed(None), "window": windowed((WINDOW - 1, 0))},
    **{"MoBA": moba(), "NSA": nsa(), "DSA": dsa()},
}
