"""Published sparsity patterns, each a function that returns a mask for causal attention.

Recipes that select blocks do so for a complete sequence. Documents packed into one sequence, for
`segment_ids`, would select among each other's keys, so pass them as separate batch elements. The mask has one
row per batch element; `attention` therefore rejects a mask selected from a packed sequence together with
`cu_seqlens`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.masks import BlockMask, Mask, Sinks, VerticalSlash, Window
from jattn.masks.checks import require_floats, require_ints
from jattn.sparsity.prefill_selection import top_mass
from jattn.sparsity.scores import as_batch, block_means, force_blocks, split_into_blocks, top_k_blocks
from pallas_kernels.checks import require, require_number


def streaming_llm(*, num_first: int, num_recent: int) -> Mask:
    """Return a mask of the first and the most recent keys, for every head.

    To restrict only some heads (DuoAttention), use `masks.streaming_heads`.

    Args:
        num_first: Number of keys at the start of the sequence.
        num_recent: Number of most recent keys, including the query's own.

    Raises:
        ValueError: If a number is not a positive int.

    Source: StreamingLLM.
    """
    require_ints(1, num_first=num_first, num_recent=num_recent)
    return Sinks(num_first) | Window(left=num_recent - 1)


def moba(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    *,
    block_size: int,
    top_k: int,
    block_q: int = 1,
) -> BlockMask:
    """Return a mask under which each query attends to its own block and the best-scoring earlier blocks.

    A block's score is the product of the query and the block's mean key.

    Args:
        q: Queries [batch, tokens, q_heads, head_dim], or [tokens, q_heads, head_dim].
        k: Keys [batch, tokens, kv_heads, head_dim], or [tokens, kv_heads, head_dim].
        block_size: Static: number of keys per block.
        top_k: Static: number of blocks per query, including its own.
        block_q: Static: number of consecutive queries that share the selection of the first of them, so that
            no selection depends on later queries. 1 in MoBA; with more, the kernels skip more tiles.

    Returns:
        A mask with one row per batch element.

    Raises:
        ValueError: If the arrays do not match, or a size is out of range.

    Source: MoBA.
    """
    require_ints(1, block_size=block_size, top_k=top_k, block_q=block_q)
    q, k = as_batch(q, k)
    scores = _dot_products(q[:, ::block_q].astype(jnp.float32), block_means(k, block_size))
    scores = force_blocks(scores, block_q=block_q, block_kv=block_size)
    return BlockMask(blocks=top_k_blocks(scores, top_k), block_q=block_q, block_kv=block_size)


def x_attention(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    *,
    mass: float,
    block_size: int = 128,
    stride: int = 16,
) -> BlockMask:
    """Return a mask of the fewest blocks that hold `mass` of an attention estimated from antidiagonals.

    Of each square of stride x stride pairs only the antidiagonal is evaluated. The first block, the queries'
    own block, and blocks that score NaN are always selected.

    Args:
        q: Queries [batch, tokens, q_heads, head_dim], or [tokens, q_heads, head_dim].
        k: Keys [batch, tokens, kv_heads, head_dim], or [tokens, kv_heads, head_dim].
        mass: Static: fraction of the estimated attention to keep, in (0, 1].
        block_size: Static: number of queries and keys per block.
        stride: Static: side of the squares; divides block_size.

    Returns:
        A mask with one row per batch element.

    Raises:
        ValueError: If the arrays do not match, or a number is out of range.

    Source: XAttention.
    """
    require_number(mass=mass)
    require(0 < mass <= 1, "mass", "lie in (0, 1]", mass)
    require_ints(1, block_size=block_size, stride=stride)
    require(block_size % stride == 0, "stride", f"divide block_size ({block_size})", stride)
    q, k = as_batch(q, k)
    # Query s - 1 - r of a square meets its key r: concatenated, the antidiagonal is a single dot product.
    queries = _concat_vectors(q, block_size, stride, reverse=True)
    keys = _concat_vectors(k, block_size, stride, reverse=False)
    scores = _dot_products(queries, keys) * (q.shape[-1] ** -0.5 / stride)
    squares = jnp.arange(scores.shape[-1])
    is_causal = (squares[None, :] <= squares[:, None])[None, None]
    probs = jax.nn.softmax(jnp.where(is_causal, scores, -jnp.inf), axis=-1)
    has_queries = squares * stride < q.shape[1]  # Padding of the last block attends to nothing.
    probs = jnp.where(has_queries[None, None, :, None], probs, 0.0)
    blocks, size = scores.shape[-1] * stride // block_size, block_size // stride
    weights = probs.reshape(*probs.shape[:2], blocks, size, blocks, size).sum(axis=(3, 5))
    # mass=1 must not drop blocks whose f32 weight is lost next to larger ones.
    selected = top_mass(jax.lax.stop_gradient(weights), mass) if mass < 1 else jnp.ones(weights.shape, bool)
    forced = force_blocks(jnp.zeros(weights.shape), block_q=block_size, block_kv=block_size, num_first=1)
    selected = (selected | jnp.isposinf(forced)) & ~jnp.isneginf(forced)
    return BlockMask(blocks=selected, block_q=block_size, block_kv=block_size)


def vertical_slash(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    *,
    num_columns: int,
    num_slashes: int,
    last: int = 64,
) -> VerticalSlash:
    """Return a mask of the keys and distances that receive most attention from a sequence's last queries.

    Keys and distances with NaN scores are selected first, so that NaN propagates to the output.

    Args:
        q: Queries of one sequence [tokens, q_heads, head_dim]. For a batch, apply jax.vmap to this function
            and the attention.
        k: Keys of the sequence [tokens, kv_heads, head_dim].
        num_columns: Static: number of keys per head that all queries attend to.
        num_slashes: Static: number of distances per head at which all queries attend.
        last: Static: number of last queries whose attention is evaluated.

    Returns:
        A mask with one row.

    Raises:
        ValueError: If the arrays do not match, or a number is out of range.

    Source: MInference.
    """
    require_floats(q=q)
    if q.ndim != 3:
        raise ValueError(
            f"q must have shape [tokens, q_heads, head_dim], got {tuple(q.shape)}. Use jax.vmap for a batch."
        )
    require_ints(1, last=last)
    require_ints(0, num_columns=num_columns, num_slashes=num_slashes)
    q, k = (x[0] for x in as_batch(q, k))
    tokens, last = q.shape[0], min(last, q.shape[0])
    scores = _dot_products(q[None, -last:], k[None])[0] * q.shape[-1] ** -0.5  # [q_heads, last, tokens]
    distance = jnp.arange(tokens - last, tokens)[:, None] - jnp.arange(tokens)[None, :]
    is_nan = jnp.isnan(scores)
    probs = jax.nn.softmax(jnp.where(is_nan | (distance < 0)[None], -jnp.inf, scores), axis=-1)
    probs = jnp.where(distance < 0, 0.0, jnp.where(is_nan, jnp.inf, probs))
    by_column = jax.lax.stop_gradient(probs.sum(axis=1))
    by_distance = jnp.zeros((q.shape[1], tokens)).at[:, jnp.maximum(distance, 0)].add(probs)
    _, columns = jax.lax.top_k(by_column, min(num_columns, tokens))
    _, slashes = jax.lax.top_k(jax.lax.stop_gradient(by_distance), min(num_slashes, tokens))
    return VerticalSlash.from_indices(columns[None], slashes[None], tokens)


def _concat_vectors(
    x: Float[Array, "batch tokens heads head_dim"], block_size: int, stride: int, *, reverse: bool
) -> Float[Array, "batch squares heads width"]:
    """Concatenate the vectors of every `stride` tokens, optionally in reverse order; pads to full blocks."""
    blocks = split_into_blocks(x, block_size)
    squares = blocks.shape[1] * block_size // stride
    pieces = blocks.reshape(x.shape[0], squares, stride, *x.shape[2:])
    pieces = jnp.moveaxis(pieces[:, :, ::-1] if reverse else pieces, 2, 3)
    return jax.lax.collapse(pieces, 3)


def _dot_products(
    q: Float[Array, "batch queries q_heads head_dim"], k: Float[Array, "batch keys kv_heads head_dim"]
) -> Float[Array, "batch q_heads queries keys"]:
    """Return the dot products of each query head with its kv head's keys, in f32."""
    (batch, queries, q_heads, head_dim), kv_heads = q.shape, k.shape[2]
    grouped = q.reshape(batch, queries, kv_heads, q_heads // kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
    return scores.reshape(batch, q_heads, queries, k.shape[1])
