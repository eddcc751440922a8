"""Blocks by scores of one's own: of mean keys, of a learned indexer, of whatever a model computes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.masks.checks import require_floats, require_ints
from pallas_kernels.checks import require, require_shape


def top_k_blocks(
    scores: Float[Array, "*rows blocks"] | Int[Array, "*rows blocks"], k: int
) -> Bool[Array, "*rows blocks"]:
    """The blocks with the k largest scores of each row, as `BlockMask(blocks=)` takes them. Traced.

    There is no gradient through a choice. Scores that are to be trained enter the output through a gate, too.

    Args:
        scores: Of each block of keys, floats or ints; +inf = always, -inf = never. NaN counts as +inf, so
            that it comes out of attention, as it does of dense attention.
        k: Static: how many. What scores as the last of them is taken, too.

    Raises:
        ValueError: k is no int or less than 1, or scores are no array or of no blocks.
    """
    require_ints(1, k=k)
    require(hasattr(scores, "ndim"), "scores", "be an array [*rows, blocks]", type(scores).__name__)
    require(scores.ndim > 0 and scores.shape[-1] > 0, "scores", "be of at least one block", scores.shape)
    scores = jax.lax.stop_gradient(scores)
    if not jnp.issubdtype(scores.dtype, jnp.integer):  # in f32 large ints would be equals
        scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    least = jax.lax.top_k(scores, min(k, scores.shape[-1]))[0][..., -1:]
    return (scores >= least) & ~jnp.isneginf(scores)


def block_means(
    x: Float[Array, "batch tokens heads head_dim"], block_size: int
) -> Float[Array, "batch blocks heads head_dim"]:
    """Mean of each block of tokens in f32; the last block's of those that there are.

    Args:
        x: Keys, say, of texts as `attention` takes them.
        block_size: Tokens of a block.

    Raises:
        ValueError: x has other axes, or block_size is not positive.
    """
    require(hasattr(x, "ndim"), "x", "be an array [batch, tokens, heads, head_dim]", type(x).__name__)
    require(x.ndim == 4, "x", "have shape [batch, tokens, heads, head_dim]", x.shape)
    tokens = x.shape[1]
    sums = split_into_blocks(x.astype(jnp.float32), block_size).sum(axis=2)
    counts = jnp.minimum(tokens - jnp.arange(sums.shape[1]) * block_size, block_size)
    return sums / counts.astype(jnp.float32)[None, :, None, None]


def split_into_blocks(
    x: Float[Array, "batch tokens heads head_dim"], block_size: int
) -> Float[Array, "batch blocks block_size heads head_dim"]:
    """Tokens by block, the last one filled up with zeros."""
    require_ints(1, block_size=block_size)
    require(x.ndim == 4, "x", "have shape [batch, tokens, heads, head_dim]", x.shape)
    batch, tokens, *width = x.shape
    blocks = -(-tokens // block_size)
    x = jnp.pad(x, ((0, 0), (0, blocks * block_size - tokens), (0, 0), (0, 0)))
    return x.reshape(batch, blocks, block_size, *width)


def force_blocks(
    scores: Float[Array, "batch heads q_blocks kv_blocks"],
    *,
    block_q: int,
    block_kv: int,
    num_first: int = 0,
    num_recent: int = 1,
) -> Float[Array, "batch heads q_blocks kv_blocks"]:
    """Scores with -inf for blocks behind the queries' own, +inf for the first and the most recent ones.

    Args:
        scores: Any.
        block_q: Static: queries of a block; divides block_kv.
        block_kv: Static: keys of a block.
        num_first: Static: blocks at a text's start that are always taken.
        num_recent: Static: blocks up to and with the queries' own that are.
    """
    require_ints(1, block_q=block_q)
    require(block_kv % block_q == 0, "block_q", f"divide block_kv ({block_kv})", block_q)
    q_blocks, kv_blocks = scores.shape[-2:]
    own = (jnp.arange(q_blocks) * block_q // block_kv)[None, None, :, None]
    nth = jnp.arange(kv_blocks)[None, None, None, :]
    is_kept = (nth < num_first) | (nth > own - num_recent)
    return jnp.where(nth > own, -jnp.inf, jnp.where(is_kept, jnp.inf, scores))


def as_batch(
    q: Float[Array, "..."], *keys: Float[Array, "..."], names: Sequence[str] = ("k", "v")
) -> tuple[Float[Array, "batch tokens heads head_dim"], ...]:
    """The same with a batch, of one where there is none.

    Args:
        q: [batch, tokens, q_heads, head_dim], or without the batch.
        *keys: As q, of kv heads.
        names: Of the keys.

    Raises:
        ValueError: They do not belong together, or have no tokens.
    """
    require_floats(**dict(zip(("q", *names), (q, *keys), strict=False)))
    rule = "have shape [batch, tokens, q_heads, head_dim], or no batch"
    require(q.ndim in (3, 4), "q", rule, tuple(q.shape))
    require(q.shape[-3] > 0, "q", "have at least one token", tuple(q.shape))
    for name, array in zip(names, keys, strict=False):
        q_heads, heads = q.shape[-2], array.shape[-2] if array.ndim == q.ndim else 1
        require_shape(name, array.shape, (*q.shape[:-2], heads, q.shape[-1]), "as q, of its own heads")
        rule = f"be a multiple of {name}'s ({heads})"
        require(heads > 0 and q_heads % heads == 0, "q's heads", rule, q_heads)
    return tuple(x if x.ndim == 4 else x[None] for x in (q, *keys))
