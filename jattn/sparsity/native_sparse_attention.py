"""Native sparse attention: compressed keys, the blocks that they point at, and a window, mixed by gates."""

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
    """Three causal attentions, each times its gate: to blocks as one key each, to the best of them, nearby.

    Documents packed into one text attend to each other: make them texts of a batch.
    Gradients reach `compress` and the gates; through these, choices are trained.

    Args:
        q: Queries [batch, tokens, q_heads, head_dim], or of one text without the batch.
        k: Keys, likewise.
        v: Values, likewise.
        gates: [batch, tokens, q_heads, 3]: of compressed, selected and window, as a sigmoid makes them.
        block_size: Static: keys of a block.
        num_selected: Static: blocks that a query sees whole, its own and the first among them. All query
            heads of a kv head choose together, by the attention that they pay to the compressed ones.
        window: Static: keys that the window has, the query's own among them.
        block_q: Static: so many neighbours see what the first of them selects; the kernels take 8 and more,
            in training 16.
        compress: What makes one key, or value, of each block: of [batch, blocks, block_size, kv_heads,
            head_dim] it returns [batch, blocks, kv_heads, head_dim]; None = the mean.
        implementation: As in `attend`.

    Raises:
        ValueError: Shapes disagree, what `compress` returns among them, or a size is out of range.

    Source: Native Sparse Attention (DeepSeek).
    """
    has_batch = getattr(q, "ndim", None) == 4
    q, k, v = as_batch(q, k, v)
    require(hasattr(gates, "shape"), "gates", "be an array", type(gates).__name__)
    gates = gates if has_batch else gates[None]
    require_shape("gates", gates.shape, (*q.shape[:3], 3), "batch, tokens, q_heads, one of each")
    sizes = {"block_size": block_size, "num_selected": num_selected, "block_q": block_q}
    require_ints(1, **sizes, window=window)
    keys, values = (_compressed(x, block_size, compress) for x in (k, v))
    how: dict[str, Any] = {"implementation": implementation}
    compressed = attention(q, keys, values, mask=CompletedBlocks(block_size), **how)
    mask = select_nsa_blocks(q, keys, **sizes)
    selected = attention(q, k, v, causal=True, mask=mask, **how)
    nearby = attention(q, k, v, causal=True, window=(window - 1, 0), **how)
    parts = (compressed, selected, nearby)
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    gated = (gates[..., n, None].astype(wide) * x.astype(wide) for n, x in enumerate(parts))
    out = sum(gated, jnp.zeros((), wide)).astype(q.dtype)
    return out if has_batch else out[0]


def _compressed(
    x: Float[Array, "batch tokens kv_heads head_dim"], block_size: int, compress: Compress | None
) -> Float[Array, "batch blocks kv_heads head_dim"]:
    """One key, or value, of each block."""
    blocks = split_into_blocks(x, block_size)
    if compress is None:
        return blocks.mean(axis=2).astype(x.dtype)
    require(callable(compress), "compress", "be a function of blocks, or None", repr(compress))
    made = compress(blocks)
    want = (*blocks.shape[:2], *blocks.shape[3:])
    require_shape("compress's result", jnp.shape(made), want, "batch, blocks, kv_heads, head_dim")
    return made.astype(x.dtype)


def select_nsa_blocks(
    q: Float[Array, "batch tokens q_heads head_dim"],
    keys: Float[Array, "batch blocks kv_heads head_dim"],
    *,
    block_size: int,
    num_selected: int,
    block_q: int = 1,
) -> BlockMask:
    """The blocks to whose compressed keys the heads of a kv head pay most attention.

    Args:
        q: Queries.
        keys: A compressed key for each block.
        block_size: As `nsa`'s.
        num_selected: As `nsa`'s.
        block_q: As `nsa`'s.

    Raises:
        ValueError: q and keys do not belong together, or a size is out of range.
    """
    require_ints(1, block_size=block_size, num_selected=num_selected, block_q=block_q)
    _check_choosers(q, keys, block_size)
    places = jnp.arange(0, q.shape[1], block_q)
    q = q[:, ::block_q]
    (batch, choosers, q_heads, head_dim), (blocks, kv_heads) = q.shape, keys.shape[1:3]
    grouped = q.reshape(batch, choosers, kv_heads, q_heads // kv_heads, head_dim).astype(jnp.float32)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, keys.astype(jnp.float32)) * head_dim**-0.5
    has_ended = places[:, None] >= (jnp.arange(blocks)[None, :] + 1) * block_size - 1
    # Logarithms of shares: of a peaked attention most shares are 0 in f32, and equals are chosen together.
    shares = jax.nn.log_softmax(jnp.where(has_ended, scores, -1e30), axis=-1)
    chosen = force_blocks(jax.nn.logsumexp(shares, axis=2), block_q=block_q, block_kv=block_size, num_first=1)
    return BlockMask(blocks=top_k_blocks(chosen, num_selected), block_q=block_q, block_kv=block_size)


def _check_choosers(q: Any, keys: Any, block_size: int) -> None:
    """Raises ValueError unless there are compressed keys of these queries' texts."""
    require_floats(q=q, keys=keys)
    for name, array, axes in (("q", q, "tokens, q_heads"), ("keys", keys, "blocks, kv_heads")):
        rule = f"have shape [batch, {axes}, head_dim]"
        require(array.ndim == 4, name, rule, tuple(array.shape))
    (batch, tokens, q_heads, head_dim), kv_heads = q.shape, keys.shape[2]
    want = batch, -(-tokens // block_size), kv_heads, head_dim
    require_shape("keys", keys.shape, want, f"q's batch, blocks of {block_size} tokens, heads, q's head_dim")
    rule = f"be a multiple of keys' ({kv_heads})"
    require(kv_heads > 0 and q_heads % kv_heads == 0, "q's heads", rule, q_heads)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class CompletedBlocks(Mask):
    """Key b stands for positions `b * size` onward of the queries' text: those that end up to a query."""

    size: int

    @override
    def visible(self, pairs: Pairs) -> Any:
        return pairs.key < quotient(pairs.query + 1, self.size)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        ended = lambda query: quotient(query + 1, self.size)
        return Coverage(tiles.first_key < ended(tiles.last_query), tiles.last_key < ended(tiles.first_query))
