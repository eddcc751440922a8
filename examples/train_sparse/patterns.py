"""The patterns that are compared: each attends to whole texts in training, and to a paged cache in decode."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import jattn
from jattn import masks, sparsity

BLOCK, TOP_K, WINDOW = 16, 4, 64  # keys of a block, blocks that a query sees, keys nearby

# (q, k, v [batch, tokens, heads, head_dim], gates [batch, tokens, q_heads, 3]) -> out
type Train = Callable[[Array, Array, Array, Array], Array]
# (query and chooser [reqs, q_heads, head_dim], cache, metadata, spec, gates [reqs, q_heads, 3]) -> out
type Decode = Callable[
    [Array, Array, jattn.PagedCache, jattn.BatchMetadata, jattn.AttentionSpec, Array], Array
]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """How a layer attends; `mask` is what is drawn of it.

    BLOCK queries see what the first of them chooses, in decode, too: there it is the `chooser`.
    """

    train: Train
    decode: Decode
    mask: Callable[[Array, Array], masks.Mask]


def windowed(window: tuple[int, int] | None) -> Pattern:
    """The keys nearby, or all of them."""
    of = lambda spec: dataclasses.replace(spec, window=window)
    left = None if window is None else window[0]
    return Pattern(
        train=lambda q, k, v, gates: jattn.attention(q, k, v, causal=True, window=window),
        decode=lambda q, chooser, cache, metadata, spec, gates: jattn.attend(q, cache, metadata, of(spec)),
        mask=lambda q, k: masks.Causal() & masks.Window(left=left),
    )


def moba() -> Pattern:
    """The query's own block, and those whose mean key it likes best."""
    choose = lambda q, k: sparsity.moba(q, k, block_size=BLOCK, top_k=TOP_K, block_q=BLOCK)

    def decode(
        query: Array, chooser: Array, cache: jattn.PagedCache, metadata: jattn.BatchMetadata,
        spec: jattn.AttentionSpec, gates: Array,
    ) -> Array:  # fmt: skip
        keys, _ = cached_means(cache, metadata)
        scores = products(chooser, keys)  # [reqs, q_heads, blocks]
        return jattn.attend(query, cache, metadata, spec, mask=best_blocks(scores, metadata))

    return Pattern(
        train=lambda q, k, v, gates: jattn.attention(q, k, v, causal=True, mask=choose(q, k)),
        decode=decode,
        mask=lambda q, k: masks.Causal() & choose(q, k),
    )


def nsa() -> Pattern:
    """Blocks as one key each, the best of them whole, and a window, mixed by gates that are trained."""

    def decode(
        query: Array, chooser: Array, cache: jattn.PagedCache, metadata: jattn.BatchMetadata,
        spec: jattn.AttentionSpec, gates: Array,
    ) -> Array:  # fmt: skip
        keys, values = cached_means(cache, metadata)
        group, place = spec.q_heads_per_kv_head, metadata.seq_lens - 1
        scale = spec.softmax_scale
        shares = jnp.exp(log_shares_of_ended(products(query, keys) * scale, place))
        compressed = jnp.einsum("rhb,rbhd->rhd", shares, jnp.repeat(values, group, axis=2))
        first = log_shares_of_ended(products(chooser, keys) * scale, place // BLOCK * BLOCK)
        by_kv_head = jax.nn.logsumexp(first.reshape(len(first), -1, group, keys.shape[1]), axis=2)
        mask = best_blocks(by_kv_head, metadata, num_first=1)
        selected = jattn.attend(query, cache, metadata, spec, mask=mask)
        near = dataclasses.replace(spec, window=(WINDOW - 1, 0))
        parts = compressed, selected, jattn.attend(query, cache, metadata, near)
        gated = [gates[..., n, None] * x.astype(gates.dtype) for n, x in enumerate(parts)]
        return sum(gated[1:], gated[0]).astype(query.dtype)

    def select_nsa_blocks(q: Array, k: Array) -> masks.Mask:
        return sparsity.select_nsa_blocks(
            q, sparsity.block_means(k, BLOCK), block_size=BLOCK, num_selected=TOP_K, block_q=BLOCK
        )

    return Pattern(
        train=lambda q, k, v, gates: sparsity.nsa(
            q, k, v, gates, block_size=BLOCK, num_selected=TOP_K, window=WINDOW, block_q=BLOCK
        ),
        decode=decode,
        mask=lambda q, k: masks.Causal() & (select_nsa_blocks(q, k) | masks.Window(left=WINDOW - 1)),
    )


def cached_means(
    cache: jattn.PagedCache, metadata: jattn.BatchMetadata
) -> tuple[Float[Array, "reqs blocks kv_heads head_dim"], Float[Array, "reqs blocks kv_heads head_dim"]]:
    """Mean key and value of each of the cache's blocks of a request; right of those that are full."""
    keys, values = jattn.blocks_of(cache, metadata.block_table)
    return keys.astype(jnp.float32).mean(axis=2), values.astype(jnp.float32).mean(axis=2)


def products(
    query: Float[Array, "reqs q_heads head_dim"], keys: Float[Array, "reqs blocks kv_heads head_dim"]
) -> Float[Array, "reqs q_heads blocks"]:
    """q.k of each query head with its kv head's keys."""
    keys = jnp.repeat(keys, query.shape[1] // keys.shape[2], axis=2)
    return jnp.einsum("rhd,rbhd->rhb", query.astype(jnp.float32), keys)


def log_shares_of_ended(
    scores: Float[Array, "reqs q_heads blocks"], place: Int[Array, " reqs"]
) -> Float[Array, "reqs q_heads blocks"]:
    """Logarithm of the softmax over the blocks that end up to a query's place; -inf of the others."""
    has_ended = ((jnp.arange(scores.shape[2]) + 1)[None] * BLOCK <= place[:, None] + 1)[:, None]
    return jnp.where(has_ended, jax.nn.log_softmax(jnp.where(has_ended, scores, -1e30), axis=-1), -jnp.inf)


def best_blocks(
    scores: Float[Array, "reqs heads blocks"], metadata: jattn.BatchMetadata, num_first: int = 0
) -> masks.BlockMask:
    """The TOP_K blocks of each request's one query, its own and the first ones among them."""
    own = ((metadata.seq_lens - 1) // BLOCK)[:, None, None]
    nth = jnp.arange(scores.shape[-1])[None, None]
    scores = jnp.where((nth == own) | (nth < num_first), jnp.inf, scores)
    chosen = sparsity.top_k_blocks(jnp.where(nth > own, -jnp.inf, scores), TOP_K)
    return masks.BlockMask(blocks=chosen[:, :, None], block_q=None, block_kv=BLOCK)


PATTERNS = {"dense": windowed(None), "window": windowed((WINDOW - 1, 0)), "MoBA": moba(), "NSA": nsa()}
