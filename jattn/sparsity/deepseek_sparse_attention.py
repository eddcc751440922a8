"""DeepSeek sparse attention: an indexer scores all keys, and each query attends to the best of them.

The indexer is a second, small attention without values: a few query heads of low dimension and one key per
token. It is trained to predict the attention of the model, with `indexer_loss`; the selection itself has no
gradient.

Source: DeepSeek-V3.2 ("lightning indexer").
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.dense.attention import attention
from jattn.masks import BlockMask, ListedBlocks
from jattn.masks.checks import require_array, require_floats, require_ints
from jattn.sparsity.decode_selection import check_step_keys
from jattn.sparsity.scores import as_batch
from pallas_kernels.checks import require, require_shape

CHUNK = 512  # queries whose scores are in memory at a time


def dsa(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    index_q: Float[Array, "..."],
    index_k: Float[Array, "..."],
    index_weights: Float[Array, "..."],
    *,
    num_selected: int,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "..."]:
    """Compute causal attention to the `num_selected` keys of each query that the indexer scores best.

    The score of a pair is the sum over index heads of `weight * relu(index_q . index_k)`. All heads share the
    selection. The output has no gradient with respect to the indexer: add `indexer_loss` to the loss. Pass
    packed documents as separate batch elements: within one sequence they select among each other's keys.

    Args:
        q: Queries [batch, tokens, q_heads, head_dim], or [tokens, q_heads, head_dim].
        k: Keys [batch, tokens, kv_heads, head_dim], or [tokens, kv_heads, head_dim].
        v: Values, with the shape of k.
        index_q: Queries of the indexer [batch, tokens, index_heads, index_dim], in any floating-point dtype.
        index_k: Keys of the indexer [batch, tokens, index_dim].
        index_weights: Weight of each index head [batch, tokens, index_heads].
        num_selected: Static: number of keys per query. Of keys with equal scores, the earlier is selected.
        implementation: Implementation name or names; see `jattn.attention`.

    Returns:
        Output with the shape of q.

    Raises:
        ValueError: If shapes do not match, or num_selected is not positive.
    """
    has_batch = getattr(q, "ndim", None) == 4
    q, k, v = as_batch(q, k, v)
    if not has_batch:
        index_q, index_k, index_weights = index_q[None], index_k[None], index_weights[None]
    _check_indexer(index_q, index_k, index_weights, tokens=q.shape[:2])
    mask = select_tokens(index_q, index_k, index_weights, num_selected=num_selected)
    out = attention(q, k, v, causal=True, mask=mask, implementation=implementation)
    return out if has_batch else out[0]


def select_tokens(
    index_q: Float[Array, "batch tokens index_heads index_dim"],
    index_k: Float[Array, "batch tokens index_dim"],
    index_weights: Float[Array, "batch tokens index_heads"],
    *,
    num_selected: int,
) -> BlockMask:
    """Select for each query the `num_selected` keys up to its own that the indexer scores best.

    Args:
        index_q: Queries of the indexer, in any floating-point dtype, fp8 included.
        index_k: Keys of the indexer.
        index_weights: Weight of each index head.
        num_selected: Static: number of keys per query. Of keys with equal scores, the earlier is selected.

    Returns:
        A mask for `jattn.attention(causal=True, mask=)` with one row per sequence of the batch.

    Raises:
        ValueError: If shapes do not match, or num_selected is not positive.
    """
    require_ints(1, num_selected=num_selected)
    _check_indexer(index_q, index_k, index_weights)

    def select_chunk(index_q: Array, index_weights: Array, first: Array) -> Bool[Array, "batch chunk tokens"]:
        scores = index_scores(index_q, index_k, index_weights)
        is_past = _is_past(first, scores)
        return _mark(_best_keys(scores, is_past, num_selected), is_past)

    index_q, index_k, index_weights = jax.lax.stop_gradient((index_q, index_k, index_weights))
    selected = _map_chunks(select_chunk, index_q, index_weights)
    return BlockMask(blocks=selected[:, None], block_q=1, block_kv=1)


def index_scores(
    index_q: Float[Array, "batch queries index_heads index_dim"],
    index_k: Float[Array, "batch keys index_dim"],
    index_weights: Float[Array, "batch queries index_heads"],
) -> Float[Array, "batch queries keys"]:
    """Return the sum over index heads of `weight * relu(index_q . index_k)`, in f32, of all pairs.

    Args:
        index_q: Queries of the indexer, in any floating-point dtype, fp8 included.
        index_k: Keys of the indexer.
        index_weights: Weight of each index head.
    """
    dtype = jnp.float64 if index_q.dtype == jnp.float64 else jnp.float32
    keys = index_k.astype(dtype)

    @jax.checkpoint  # The backward pass holds the products of one head at a time, too.
    def add_head(total: Array, head: tuple[Array, Array]) -> tuple[Array, None]:
        query, weight = head
        return total + weight[..., None] * jax.nn.relu(jnp.einsum("btd,bsd->bts", query, keys)), None

    heads = jnp.moveaxis(index_q.astype(dtype), 2, 0), jnp.moveaxis(index_weights.astype(dtype), 2, 0)
    zeros = jnp.zeros((*index_q.shape[:2], index_k.shape[1]), dtype)
    return jax.lax.scan(add_head, zeros, heads)[0]


def indexer_loss(
    q: Float[Array, "batch tokens q_heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    index_q: Float[Array, "batch tokens index_heads index_dim"],
    index_k: Float[Array, "batch tokens index_dim"],
    index_weights: Float[Array, "batch tokens index_heads"],
    *,
    num_selected: int | None = None,
    softmax_scale: float | None = None,
) -> Float[Array, ""]:
    """Return the mean over queries of the divergence KL(attention, softmax of the indexer's scores).

    The attention is the mean of the query heads' causal attention probabilities, computed from q and k. Both
    distributions are over the selected keys. Only the indexer's arrays receive gradients.

    Args:
        q: Queries of the attention layer.
        k: Keys of the attention layer.
        index_q: Queries of the indexer.
        index_k: Keys of the indexer.
        index_weights: Weight of each index head.
        num_selected: Static: number of selected keys per query. None = all keys, for warming up the indexer.
        softmax_scale: Scale of the attention's scores; None = `head_dim ** -0.5`.

    Raises:
        ValueError: If shapes do not match, or num_selected is not positive.
    """
    q, k = as_batch(q, k, names=("k",))
    _check_indexer(index_q, index_k, index_weights, tokens=q.shape[:2])
    num_selected = q.shape[1] if num_selected is None else num_selected
    require_ints(1, num_selected=num_selected)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    group = q.shape[2] // k.shape[2]
    q, k = jax.lax.stop_gradient((q.astype(dtype), k.astype(dtype)))

    @jax.checkpoint
    def loss_of_chunk(
        q: Array, index_q: Array, index_weights: Array, first: Array
    ) -> Float[Array, "batch chunk"]:
        scores = index_scores(index_q, index_k, index_weights)
        is_past = _is_past(first, scores)
        best = _mark(_best_keys(jax.lax.stop_gradient(scores), is_past, num_selected), is_past)

        def add_head(total: Array, head: Array) -> tuple[Array, None]:
            products = jnp.einsum("btd,bsd->bts", q[:, :, head], k[:, :, head // group]) * scale
            return total + jax.nn.softmax(jnp.where(best, products, -jnp.inf), axis=-1), None

        probs = jax.lax.scan(add_head, jnp.zeros(scores.shape, dtype), jnp.arange(q.shape[2]))[0] / q.shape[2]
        log_probs = jax.nn.log_softmax(jnp.where(best, scores, -jnp.inf), axis=-1)
        return jnp.where(probs > 0, probs * (jnp.log(probs) - jnp.where(best, log_probs, 0)), 0).sum(axis=-1)

    return _map_chunks(loss_of_chunk, q, index_q, index_weights).mean()


@functools.partial(jax.jit, donate_argnums=0)
def write_index_keys(
    index_cache: Float[Array, "blocks block_size index_dim"],
    index_k: Float[Array, "kv_tokens index_dim"],
    slot_mapping: Int[Array, " tokens"],
) -> Float[Array, "blocks block_size index_dim"]:
    """Write the indexer's keys of a step to its paged cache. Call it next to write_kv; donates `index_cache`.

    Args:
        index_cache: Keys of the indexer by cache block, with the block ids of the paged KV cache.
        index_k: Keys of the indexer of the step's tokens; may have more (padding) tokens than slot_mapping.
        slot_mapping: Cache slot of each token; negative slots are not written.

    Raises:
        ValueError: If there are fewer keys than slots, or index_dim differs.
    """
    require_floats(index_cache=index_cache, index_k=index_k)
    dim, slots = index_cache.shape[-1], index_cache.shape[0] * index_cache.shape[1]
    check_step_keys("index_k", index_k, slot_mapping, (dim,), "tokens, and the cache's index_dim")
    slot = jnp.where(slot_mapping < 0, slots, slot_mapping.astype(jnp.int32))
    keys = index_k[: slot.shape[0]].astype(index_cache.dtype)
    rows = index_cache.reshape(slots, dim).at[slot].set(keys, mode="drop")
    return rows.reshape(index_cache.shape)


def select_cached_tokens(
    index_q: Float[Array, "reqs index_heads index_dim"],
    index_cache: Float[Array, "blocks block_size index_dim"],
    index_weights: Float[Array, "reqs index_heads"],
    block_table: Int[Array, "reqs max_blocks"],
    seq_lens: Int[Array, " reqs"],
    *,
    num_selected: int,
) -> ListedBlocks:
    """Select the `num_selected` cached keys of each request that the indexer scores best, for one query each.

    Args:
        index_q: Queries of the indexer, of the decode region.
        index_cache: Keys of the indexer, including those of the current step.
        index_weights: Weight of each index head.
        block_table: Block table of the decode region.
        seq_lens: Number of keys of each request; 0 marks a padding row.
        num_selected: Static: number of keys per request. Of keys with equal scores, the earlier one is
            selected.

    Returns:
        A mask for `attend(mask=)` with one row per decode request. If the step also has prefill rows, attend
        to the decode region only (`metadata.decode_region`).

    Raises:
        ValueError: If shapes do not match, or num_selected is not positive.
    """
    require_ints(1, num_selected=num_selected)
    require_floats(index_q=index_q, index_cache=index_cache, index_weights=index_weights)
    require_array("block_table", block_table, "integer", {2: "[reqs, max_blocks]"})
    require_array("seq_lens", seq_lens, "integer", {1: "[reqs]"})
    reqs = index_q.shape[0]
    require_shape("block_table", block_table.shape, (reqs, block_table.shape[1]), "one row per request")
    require_shape("seq_lens", seq_lens.shape, (reqs,), "one per request")
    index_q, index_cache, index_weights = jax.lax.stop_gradient((index_q, index_cache, index_weights))
    blocks = jnp.clip(block_table, 0, index_cache.shape[0] - 1)
    keys = index_cache[blocks].reshape(reqs, -1, index_cache.shape[-1])
    _check_indexer(index_q[:, None], keys, index_weights[:, None], num_keys=keys.shape[1])
    scores = index_scores(index_q[:, None], keys, index_weights[:, None])[:, 0]
    is_key = jnp.arange(keys.shape[1])[None] < seq_lens[:, None]
    best = _best_keys(scores, is_key, num_selected)
    counts = jnp.minimum(seq_lens.astype(jnp.int32), best.shape[1])
    is_listed = jnp.arange(best.shape[1])[None] < counts[:, None]
    return ListedBlocks(
        blocks=_mark(best, is_key)[:, None, None],
        block_q=None,
        block_kv=1,
        ids=jnp.sort(jnp.where(is_listed, best, keys.shape[1]), axis=1)[:, None],
        counts=counts[:, None],
    )


# ------------------------------------------------------------------------------------------ inside
def _best_keys(
    scores: Float[Array, "*rows keys"], is_candidate: Bool[Array, "*rows keys"], num_selected: int
) -> Int[Array, "*rows selected"]:
    """Return the candidates with the largest scores of each row, then, if there are too few, other keys.

    NaN counts as +inf, so that it propagates to the output as in dense attention.
    """
    scores = jnp.where(is_candidate, jnp.where(jnp.isnan(scores), jnp.inf, scores), -jnp.inf)
    return jax.lax.top_k(scores, min(num_selected, scores.shape[-1]))[1]


def _mark(
    keys: Int[Array, "*rows selected"], is_candidate: Bool[Array, "*rows keys"]
) -> Bool[Array, "*rows keys"]:
    """Return whether each key is a candidate and among the given keys of its row."""
    marks = jnp.put_along_axis(jnp.zeros(is_candidate.shape, bool), keys, True, axis=-1, inplace=False)
    return marks & is_candidate


def _is_past(first: Array, scores: Float[Array, "batch queries keys"]) -> Bool[Array, "batch queries keys"]:
    """Return whether each key lies at or before the query, where `first` is the first query's position."""
    query, key = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (1, 2))
    return key <= first + query


def _map_chunks(function: Any, *arrays: Array) -> Array:
    """Call a function with CHUNK queries of [batch, tokens, ...] arrays and the position of the first."""
    batch, tokens = arrays[0].shape[:2]
    size = min(tokens, CHUNK)
    chunks = -(-tokens // size)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * size - tokens), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)

    firsts = jnp.arange(chunks) * size
    results = jax.lax.map(lambda chunk: function(*chunk), (*map(split, arrays), firsts))
    return jnp.moveaxis(results, 0, 1).reshape(batch, chunks * size, *results.shape[3:])[:, :tokens]


def _check_indexer(
    index_q: Any,
    index_k: Any,
    index_weights: Any,
    *,
    tokens: tuple[int, ...] | None = None,
    num_keys: int | None = None,
) -> None:
    """Raise ValueError unless the arrays of the indexer match.

    Args:
        index_q: Queries of the indexer.
        index_k: Keys of the indexer.
        index_weights: Weight of each index head.
        tokens: Batch and tokens of the attention layer; None = those of index_q.
        num_keys: Number of keys; None = as many as queries.
    """
    require_floats(index_q=index_q, index_k=index_k, index_weights=index_weights)
    require(index_q.ndim == 4, "index_q", "have shape [batch, tokens, index_heads, index_dim]", index_q.shape)
    heads, dim = index_q.shape[2:]
    batch, queries = tokens = tokens or index_q.shape[:2]
    require_shape("index_q", index_q.shape, (*tokens, heads, dim), "batch, tokens, index_heads, index_dim")
    expected = batch, num_keys or queries, dim
    require_shape("index_k", index_k.shape, expected, "batch, tokens, index_q's index_dim")
    require_shape(
        "index_weights", index_weights.shape, (*tokens, heads), "batch, tokens, index_q's index_heads"
    )
