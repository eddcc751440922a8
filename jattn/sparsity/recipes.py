"""Published patterns as short functions: each returns a mask for causal attention.

What chooses does so for a whole text. Documents that are packed into one, for `segment_ids`, choose among
each other's keys; as texts of a batch each chooses among its own. A mask has a row for each text, so
`cu_seqlens` of several documents refuses one that was chosen of them together.
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
    """A text's first keys and the most recent ones, the query's own among them, of every head.

    Of some heads alone, while the others see everything: `masks.streaming_heads`, DuoAttention's.

    Args:
        num_first: Keys from a text's beginning.
        num_recent: Keys up to the query's own, which is one of them.

    Raises:
        ValueError: A number is no int, or not positive.

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
    """Each query sees its own block and those before whose mean key it likes best.

    Documents packed into one text choose among each other's keys: make them texts of a batch.

    Args:
        q: Queries [batch, tokens, q_heads, head_dim], or of one text without the batch.
        k: Keys, likewise.
        block_size: Static: keys of a block.
        top_k: Static: blocks of a query, its own among them.
        block_q: Static: so many neighbours see what the first of them chooses, so that nothing depends on
            later ones, and decode can do the same. 1 is MoBA's; the kernels take 8 and more, in training 16.

    Raises:
        ValueError: Arrays do not belong together, or a size is out of range.

    Returns:
        A mask with a row for each text.

    Source: MoBA.
    """
    require_ints(1, block_size=block_size, top_k=top_k, block_q=block_q)
    q, k = as_batch(q, k)
    scores = _products(q[:, ::block_q].astype(jnp.float32), block_means(k, block_size))
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
    """The fewest blocks that hold `mass` of an attention that is estimated by sums over antidiagonals.

    Of each square of stride x stride pairs only the antidiagonal is looked at. The queries' own block and the
    first one are always seen, and what scores NaN, so that it shows. Documents packed into one text choose
    among each other's keys: make them texts of a batch.

    Args:
        q: Queries [batch, tokens, q_heads, head_dim], or of one text without the batch.
        k: Keys, likewise.
        mass: Static: share of the estimated attention to keep, in (0, 1].
        block_size: Static: queries and keys of a block.
        stride: Static: divides block_size.

    Raises:
        ValueError: Arrays do not belong together, or a number is out of range.

    Returns:
        A mask with a row for each text.

    Source: XAttention.
    """
    require_number(mass=mass)
    require(0 < mass <= 1, "mass", "lie in (0, 1]", mass)
    require_ints(1, block_size=block_size, stride=stride)
    require(block_size % stride == 0, "stride", f"divide block_size ({block_size})", stride)
    q, k = as_batch(q, k)
    # Query s - 1 - r of a square's rows meets key r of its columns: side by side they are one long product.
    queries = _side_by_side(q, block_size, stride, is_backward=True)
    keys = _side_by_side(k, block_size, stride, is_backward=False)
    scores = _products(queries, keys) * (q.shape[-1] ** -0.5 / stride)
    squares = jnp.arange(scores.shape[-1])
    seen = (squares[None, :] <= squares[:, None])[None, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    has_queries = squares * stride < q.shape[1]  # what fills up the last block attends to nothing
    shares = jnp.where(has_queries[None, None, :, None], shares, 0.0)
    blocks, size = scores.shape[-1] * stride // block_size, block_size // stride
    weights = shares.reshape(*shares.shape[:2], blocks, size, blocks, size).sum(axis=(3, 5))
    # In f32 shares vanish beside larger ones, and with them blocks whose keys one query may want.
    kept = top_mass(jax.lax.stop_gradient(weights), mass) if mass < 1 else jnp.ones(weights.shape, bool)
    always = force_blocks(jnp.zeros(weights.shape), block_q=block_size, block_kv=block_size, num_first=1)
    kept = (kept | jnp.isposinf(always)) & ~jnp.isneginf(always)
    return BlockMask(blocks=kept, block_q=block_size, block_kv=block_size)


def vertical_slash(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    *,
    num_columns: int,
    num_slashes: int,
    last: int = 64,
) -> VerticalSlash:
    """The keys and the distances in which a text's last queries have most of their attention.

    What scores NaN counts as most of it, so that it shows. Of documents packed into one text the last one's
    queries choose for all: make each a text.

    Args:
        q: Queries of one text [tokens, q_heads, head_dim]; jax.vmap, with the attention, takes several.
        k: Its keys.
        num_columns: Static: keys of each head that all queries see.
        num_slashes: Static: distances at which they see.
        last: Static: how many queries are looked at.

    Raises:
        ValueError: Arrays do not belong together, or a number is out of range.

    Returns:
        A mask with one row, the text's.

    Source: MInference.
    """
    require_floats(q=q)
    require(q.ndim == 3, "q", "be of one text (jax.vmap takes several)", tuple(q.shape))
    require_ints(1, last=last)
    require_ints(0, num_columns=num_columns, num_slashes=num_slashes)
    q, k = (x[0] for x in as_batch(q, k))
    tokens, last = q.shape[0], min(last, q.shape[0])
    scores = _products(q[None, -last:], k[None])[0] * q.shape[-1] ** -0.5  # [q_heads, last, tokens]
    distance = jnp.arange(tokens - last, tokens)[:, None] - jnp.arange(tokens)[None, :]
    is_nan = jnp.isnan(scores)
    shares = jax.nn.softmax(jnp.where(is_nan | (distance < 0)[None], -jnp.inf, scores), axis=-1)
    shares = jnp.where(distance < 0, 0.0, jnp.where(is_nan, jnp.inf, shares))
    by_distance = jnp.zeros((q.shape[1], tokens)).at[:, jnp.maximum(distance, 0)].add(shares)
    best = lambda x, count: jax.lax.top_k(jax.lax.stop_gradient(x), min(count, tokens))[1]
    columns, slashes = best(shares.sum(axis=1), num_columns), best(by_distance, num_slashes)
    return VerticalSlash.of(columns[None], slashes[None], tokens, gather=True)


def _side_by_side(
    x: Float[Array, "batch tokens heads head_dim"], block_size: int, stride: int, *, is_backward: bool
) -> Float[Array, "batch squares heads width"]:
    """The vectors of each `stride` tokens as one, first or last token first; whole blocks of them."""
    whole = split_into_blocks(x, block_size)
    squares = whole.shape[1] * block_size // stride
    pieces = whole.reshape(x.shape[0], squares, stride, *x.shape[2:])
    pieces = jnp.moveaxis(pieces[:, :, ::-1] if is_backward else pieces, 2, 3)
    return jax.lax.collapse(pieces, 3)


def _products(
    q: Float[Array, "batch queries q_heads head_dim"], k: Float[Array, "batch keys kv_heads head_dim"]
) -> Float[Array, "batch q_heads queries keys"]:
    """q.k of each query head with its kv head's keys, in f32."""
    (batch, queries, q_heads, head_dim), kv_heads = q.shape, k.shape[2]
    grouped = q.reshape(batch, queries, kv_heads, q_heads // kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
    return scores.reshape(batch, q_heads, queries, k.shape[1])
