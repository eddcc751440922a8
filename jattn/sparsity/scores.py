"""Block scores: top-k selection, block means, and helpers that the recipes share."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.masks.checks import require_floats, require_ints
from pallas_kernels.checks import require, require_shape


def top_k_blocks(
    scores: Float[Array, "*rows blocks"] | Int[Array, "*rows blocks"], k: int
) -> Bool[Array, "*rows blocks"]:
    """Select the blocks with the k largest scores of each row, as `BlockMask(blocks=)` expects them.

    Works inside jit. The selection has no gradient. To train the scores, also let them enter the output, for
    example as a gate.

    Args:
        scores: Score of each key block, float or int. +inf blocks are always selected, -inf blocks never. NaN
            counts as +inf, so that it propagates to the output as in dense attention.
        k: Static: number of blocks per row. Blocks that tie with the last one are selected too.

    Raises:
        ValueError: If k is not a positive int, or scores is not an array with at least one block.
    """
    require_ints(1, k=k)
    require(hasattr(scores, "ndim"), "scores", "be an array [*rows, blocks]", f"a {type(scores).__name__}")
    require(scores.ndim > 0 and scores.shape[-1] > 0, "scores", "have at least one block", scores.shape)
    scores = jax.lax.stop_gradient(scores)
    if not jnp.issubdtype(scores.dtype, jnp.integer):  # f32 would round large ints to equal values.
        scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    threshold = jax.lax.top_k(scores, min(k, scores.shape[-1]))[0][..., -1:]
    return (scores >= threshold) & ~jnp.isneginf(scores)


def block_means(
    x: Float[Array, "batch tokens heads head_dim"], block_size: int
) -> Float[Array, "batch blocks heads head_dim"]:
    """Return the mean over each block of tokens in f32; the last block may have fewer tokens.

    Args:
        x: Keys or queries, as for `jattn.attention`.
        block_size: Number of tokens per block.

    Raises:
        ValueError: If x does not have four axes, or block_size is not positive.
    """
    require(hasattr(x, "ndim"), "x", "be an array [batch, tokens, heads, head_dim]", f"a {type(x).__name__}")
    require(x.ndim == 4, "x", "have shape [batch, tokens, heads, head_dim]", x.shape)
    tokens = x.shape[1]
    sums = split_into_blocks(x.astype(jnp.float32), block_size).sum(axis=2)
    counts = jnp.minimum(tokens - jnp.arange(sums.shape[1]) * block_size, block_size)
    return sums / counts.astype(jnp.float32)[None, :, None, None]


def split_into_blocks(
    x: Float[Array, "batch tokens heads head_dim"], block_size: int
) -> Float[Array, "batch blocks block_size heads head_dim"]:
    """Reshape tokens into blocks, padding the last block with zeros."""
    require_ints(1, block_size=block_size)
    require(x.ndim == 4, "x", "have shape [batch, tokens, heads, head_dim]", x.shape)
    batch, tokens, *head_shape = x.shape
    blocks = -(-tokens // block_size)
    x = jnp.pad(x, ((0, 0), (0, blocks * block_size - tokens), (0, 0), (0, 0)))
    return x.reshape(batch, blocks, block_size, *head_shape)


def force_blocks(
    scores: Float[Array, "batch heads q_blocks kv_blocks"],
    *,
    block_q: int,
    block_kv: int,
    num_first: int = 0,
    num_recent: int = 1,
) -> Float[Array, "batch heads q_blocks kv_blocks"]:
    """Set the scores of later blocks to -inf, and of the first and most recent blocks to +inf.

    Args:
        scores: Score of each pair of a query block and a key block.
        block_q: Static: number of queries per block; divides block_kv.
        block_kv: Static: number of keys per block.
        num_first: Static: number of blocks at the start of the sequence that are always selected.
        num_recent: Static: number of blocks up to and including the queries' own that are always selected.
    """
    require_ints(1, block_q=block_q)
    require(block_kv % block_q == 0, "block_q", f"divide block_kv ({block_kv})", block_q)
    q_blocks, kv_blocks = scores.shape[-2:]
    query_block = (jnp.arange(q_blocks) * block_q // block_kv)[None, None, :, None]
    key_block = jnp.arange(kv_blocks)[None, None, None, :]
    is_forced = (key_block < num_first) | (key_block > query_block - num_recent)
    return jnp.where(key_block > query_block, -jnp.inf, jnp.where(is_forced, jnp.inf, scores))


def as_batch(
    q: Float[Array, "..."], *keys: Float[Array, "..."], names: Sequence[str] = ("k", "v")
) -> tuple[Float[Array, "batch tokens heads head_dim"], ...]:
    """Check queries and keys, and add a batch axis of size 1 if they have none.

    Args:
        q: Queries [batch, tokens, q_heads, head_dim] or [tokens, q_heads, head_dim].
        *keys: Keys and values, with kv heads in the place of query heads.
        names: Argument names of `keys` for error messages.

    Raises:
        ValueError: If the shapes or dtypes do not match, or there are no tokens.
    """
    require_floats(**dict(zip(("q", *names), (q, *keys), strict=False)))
    rule = "have shape [batch, tokens, q_heads, head_dim] or [tokens, q_heads, head_dim]"
    require(q.ndim in (3, 4), "q", rule, tuple(q.shape))
    require(q.shape[-3] > 0, "q", "have at least one token", tuple(q.shape))
    for name, array in zip(names, keys, strict=False):
        q_heads, heads = q.shape[-2], array.shape[-2] if array.ndim == q.ndim else 1
        require_shape(
            name, array.shape, (*q.shape[:-2], heads, q.shape[-1]), "q's batch, tokens and head_dim"
        )
        rule = f"be a multiple of {name}'s number of heads ({heads})"
        require(heads > 0 and q_heads % heads == 0, "q's number of heads", rule, q_heads)
    return tuple(x if x.ndim == 4 else x[None] for x in (q, *keys))
