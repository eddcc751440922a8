"""Sparsity patterns to compare: masks that are fixed, or computed from a layer's queries and keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import jattn
from jattn import masks
from jattn.masks import Mask

# (queries [tokens, q_heads, head_dim], keys [tokens, kv_heads, head_dim], layer spec) -> mask
type Pattern = Callable[[Array, Array, jattn.AttentionSpec], Mask]


def fixed(mask: Mask) -> Pattern:
    """Return a pattern that uses the same mask for all queries and keys."""
    return lambda query, key, spec: mask


def pooled(mass: float, block_size: int = 32) -> Pattern:
    """Return a pattern of the blocks with a share `mass` of the attention, from mean queries and keys."""

    def choose(query: Array, key: Array, spec: jattn.AttentionSpec) -> Mask:
        tokens = query.shape[0]
        metadata = jattn.build_batch_metadata([tokens], [tokens], None)
        packed = jattn.PackedKV(k=key, v=key, kv_start_loc=jnp.zeros(1, jnp.int32))
        return jattn.sparsity.select_prefill_blocks(
            query, packed, metadata, spec, mass=mass, block_size=block_size, num_recent=3
        )

    return choose


def vertical_slash(num_columns: int, num_slashes: int, last: int = 64) -> Pattern:
    """Return a pattern of the columns and diagonals that the last queries attend to most (MInference)."""

    def choose(query: Array, key: Array, spec: jattn.AttentionSpec) -> Mask:
        tokens = query.shape[0]
        k = jnp.repeat(key, spec.q_heads_per_kv_head, axis=1)
        p = probabilities(query[-last:], k, spec.softmax_scale)  # [q_heads, last, tokens]
        distance = jnp.arange(tokens - last, tokens)[:, None] - jnp.arange(tokens)[None, :]
        by_distance = jnp.zeros((p.shape[0], tokens)).at[:, jnp.maximum(distance, 0)].add(p)
        _, columns = jax.lax.top_k(p.sum(axis=1), num_columns)
        _, slashes = jax.lax.top_k(by_distance, num_slashes)
        return masks.VerticalSlash.from_indices(columns, slashes, tokens)

    return choose


def probabilities(
    query: Float[Array, "queries q_heads head_dim"], key: Float[Array, "keys q_heads head_dim"], scale: float
) -> Float[Array, "q_heads queries keys"]:
    """Return the causal attention probabilities of the last queries."""
    s = jnp.einsum("qhd,khd->hqk", query, key, preferred_element_type=jnp.float32) * scale
    queries, keys = s.shape[1:]
    return jax.nn.softmax(jnp.where(jnp.tri(queries, keys, keys - queries, dtype=bool), s, -jnp.inf), axis=-1)


PATTERNS: dict[str, Pattern] = {
    "dense": fixed(masks.Causal()),
    "window 512": fixed(masks.Window(left=511)),
    "window 128": fixed(masks.Window(left=127)),
    "first 16 + window 128": fixed(masks.Sinks(16) | masks.Window(left=127)),
    "heads 0, 2 dense, others 16 + 128": fixed(masks.streaming_heads((0, 2), num_first=16, num_recent=128)),
    "local-strided 32, 4 + 1/4": fixed(masks.LocalStrided(block_size=32, local_blocks=4, vert_stride=4)),
    "local-strided 32, 4 + 1/8": fixed(masks.LocalStrided(block_size=32, local_blocks=4, vert_stride=8)),
    "BigBird 32": fixed(masks.BigBird(block_size=32, local_blocks=4, global_blocks=1, random_blocks=6)),
    "dilated 128 x 8 + window 64": fixed(masks.Dilated(128, 8) | masks.Window(left=63)),
    "vertical-slash 64 + 128": vertical_slash(64, 128),
    "pooled blocks, mass 0.95": pooled(0.95),
    "pooled blocks, mass 0.8": pooled(0.8),
    "pooled blocks, mass 0.5": pooled(0.5),
}
