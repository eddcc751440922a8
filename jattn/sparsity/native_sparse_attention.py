"""Native sparse attention: gated sum of attention to compressed keys, selected blocks and a window."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.dense.attention import attention
from jattn.masks import BlockMask, Coverage, Mask, Pairs, Tiles
from jattn.masks.checks import require_floats, require_ints
from jattn.masks.pairs import quotient
from jattn.sparsity.scores import as_batch, force_blocks, split_into_blocks, top_k_blocks
from pallas_kernels.checks import require, require_shape

type Compress = Callable[[Array], Array]


def nsa(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    gates: Float[Array, "..."],
    *,
    block_size: int,
    num_selected: int,
    window: int,
    block_q: int = 1,
    compress: Compress | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "..."]:
    """Compute native sparse attention: the gated sum of three causal attentions.

    The queries attend to one compressed key per block, to the blocks whose compressed keys score best, and to
    a sliding window. The selection is trained through the gates and `compress`, which receive gradients. Pass
    packed documents as separate batch elements: within one sequence they attend to each other.

    Args:
        q: Queries [batch, tokens, q_heads, head_dim], or [tokens, q_heads, head_dim].
        k: Keys [batch, tokens, kv_heads, head_dim], or [tokens, kv_heads, head_dim].
        v: Values, with the shape of k.
        gates: Weights of the compressed, selected and window attention, for example from a sigmoid:
            [batch, tokens, q_heads, 3].
        block_size: Static: number of keys per block.
        num_selected: Static: number of selected blocks per query, including its own and the first. The query
            heads of a kv head share the selection, by the sum of their attention to the compressed keys.
        window: Static: number of keys in the window, including the query's own.
        block_q: Static: number of consecutive queries that share the selection of the first of them; with
            more, the kernels skip more tiles.
        compress: Function that compresses each block to one key or value, from [batch, blocks, block_size,
            kv_heads, head_dim] to [batch, blocks, kv_heads, head_dim]; None = the mean.
        implementation: Implementation name or names; see `jattn.attention`.

    Returns:
        Output with the shape of q.

    Raises:
        ValueError: If shapes do not match, including the result of `compress`, or a size is out of range.

    Source: Native Sparse Attention (DeepSeek).
    """
    has_batch = getattr(q, "ndim", None) == 4
    q, k, v = as_batch(q, k, v)
    require(hasattr(gates, "shape"), "gates", "be an array", f"a {type(gates).__name__}")
    gates = gates if has_batch else gates[None]
    require_shape("gates", gates.shape, (*q.shape[:3], 3), "batch, tokens, q_heads, number of attentions")
    require_ints(1, block_size=block_size, num_selected=num_selected, block_q=block_q, window=window)
    keys, values = (_compress_blocks(x, block_size, compress) for x in (k, v))
    completed = CompletedBlocks(block_size)
    compressed_out = attention(q, keys, values, mask=completed, implementation=implementation)
    mask = select_nsa_blocks(q, keys, block_size=block_size, num_selected=num_selected, block_q=block_q)
    selected_out = attention(q, k, v, causal=True, mask=mask, implementation=implementation)
    window_out = attention(q, k, v, causal=True, window=(window - 1, 0), implementation=implementation)
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    outs = (compressed_out, selected_out, window_out)
    gated = (gates[..., i, None].astype(dtype) * x.astype(dtype) for i, x in enumerate(outs))
    out = sum(gated, jnp.zeros((), dtype)).astype(q.dtype)
    return out if has_batch else out[0]


def _compress_blocks(
    x: Float[Array, "batch tokens kv_heads head_dim"], block_size: int, compress: Compress | None
) -> Float[Array, "batch blocks kv_heads head_dim"]:
    """Return the compressed key or value of each block."""
    blocks = split_into_blocks(x, block_size)
    if compress is None:
        return blocks.mean(axis=2).astype(x.dtype)
    require(callable(compress), "compress", "be a function of blocks or None", repr(compress))
    compressed = compress(blocks)
    expected = (*blocks.shape[:2], *blocks.shape[3:])
    axes = "batch, blocks, kv_heads, head_dim"
    require_shape("The result of compress", jnp.shape(compressed), expected, axes)
    return compressed.astype(x.dtype)


def select_nsa_blocks(
    q: Float[Array, "batch tokens q_heads head_dim"],
    keys: Float[Array, "batch blocks kv_heads head_dim"],
    *,
    block_size: int,
    num_selected: int,
    block_q: int = 1,
) -> BlockMask:
    """Select the blocks whose compressed keys receive most attention from the query heads of a kv head.

    Args:
        q: Queries.
        keys: Compressed key of each block.
        block_size: Static: number of keys per block.
        num_selected: Static: number of selected blocks per query, including its own and the first.
        block_q: Static: number of consecutive queries that share the selection of the first of them.

    Raises:
        ValueError: If q and keys do not match, or a size is out of range.
    """
    require_ints(1, block_size=block_size, num_selected=num_selected, block_q=block_q)
    _check_queries_and_keys(q, keys, block_size)
    positions = jnp.arange(0, q.shape[1], block_q)
    q = q[:, ::block_q]
    (batch, q_blocks, q_heads, head_dim), (blocks, kv_heads) = q.shape, keys.shape[1:3]
    grouped = q.reshape(batch, q_blocks, kv_heads, q_heads // kv_heads, head_dim).astype(jnp.float32)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, keys.astype(jnp.float32)) * head_dim**-0.5
    is_completed = positions[:, None] >= (jnp.arange(blocks)[None, :] + 1) * block_size - 1
    # Log-probabilities, because most probabilities of a peaked attention are 0 in f32, which would be ties.
    log_probs = jax.nn.log_softmax(jnp.where(is_completed, scores, -1e30), axis=-1)
    scores = jax.nn.logsumexp(log_probs, axis=2)
    scores = force_blocks(scores, block_q=block_q, block_kv=block_size, num_first=1)
    return BlockMask(blocks=top_k_blocks(scores, num_selected), block_q=block_q, block_kv=block_size)


def _check_queries_and_keys(q: Any, keys: Any, block_size: int) -> None:
    """Raise ValueError unless the keys are the compressed keys of the queries' sequences."""
    require_floats(q=q, keys=keys)
    for name, array, axes in (("q", q, "tokens, q_heads"), ("keys", keys, "blocks, kv_heads")):
        rule = f"have shape [batch, {axes}, head_dim]"
        require(array.ndim == 4, name, rule, tuple(array.shape))
    (batch, tokens, q_heads, head_dim), kv_heads = q.shape, keys.shape[2]
    expected = batch, -(-tokens // block_size), kv_heads, head_dim
    meaning = f"q's batch, blocks of {block_size} tokens, kv_heads, q's head_dim"
    require_shape("keys", keys.shape, expected, meaning)
    rule = f"be a multiple of the number of kv heads ({kv_heads})"
    require(kv_heads > 0 and q_heads % kv_heads == 0, "q's number of heads", rule, q_heads)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class CompletedBlocks(Mask):
    """A causal mask over compressed keys: key b stands for block b, which must end at or before the query.

    Attributes:
        size: Number of tokens per block.
    """

    size: int

    @override
    def visible(self, pairs: Pairs) -> Any:
        return pairs.key < quotient(pairs.query + 1, self.size)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        first, last = (quotient(query + 1, self.size) for query in (tiles.first_query, tiles.last_query))
        return Coverage(tiles.first_key < last, tiles.last_key < first)
