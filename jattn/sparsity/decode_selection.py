"""Block selection for decoding: per-block bounds of the cached keys, and the blocks with the best scores.

A decode step calls, inside one jit: write_kv, write_key_bounds, select_blocks, and attend(mask=).

Source: Quest.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jattn.cache import CacheSpec
from jattn.masks import BlockMask, ListedBlocks
from jattn.masks.checks import require_array, require_ints
from jattn.pytree import pytree
from pallas_kernels import architectures, support
from pallas_kernels import block_scores as kernels
from pallas_kernels.checks import require, require_int, require_shape, require_type


@pytree
class KeyBounds:
    """Elementwise minimum and maximum of the keys of each cache block, in f32 or the keys' dtype.

    Attributes:
        min_key: Minimum of each block's keys; arbitrary for blocks without keys.
        max_key: Maximum of each block's keys; arbitrary for blocks without keys.
    """

    min_key: Float[Array, "blocks kv_heads head_dim"]
    max_key: Float[Array, "blocks kv_heads head_dim"]

    @classmethod
    def create(cls, spec: CacheSpec) -> "KeyBounds":
        """Return bounds for an empty cache."""
        shape = (spec.num_blocks, spec.num_kv_heads, spec.head_dim)
        # Two arrays, because both are donated.
        return cls(min_key=jnp.zeros(shape, spec.dtype), max_key=jnp.zeros(shape, spec.dtype))


@functools.partial(jax.jit, donate_argnums=0, static_argnames="block_size")
def write_key_bounds(
    bounds: KeyBounds,
    key: Float[Array, "kv_tokens kv_heads head_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    block_size: int,
) -> KeyBounds:
    """Update the bounds of the cache blocks that a step writes. Call it next to write_kv; donates `bounds`.

    Writing the first slot of a block resets its bounds, so blocks may be freed and reused.

    Args:
        bounds: Bounds to update.
        key: Keys of the step's tokens; may have more (padding) tokens than slot_mapping.
        slot_mapping: Cache slot of each token; negative slots are not written.
        block_size: Static: number of tokens per cache block.

    Raises:
        ValueError: If there are fewer keys than slots, or the heads of the keys and the bounds differ.
    """
    require_type("bounds", bounds, KeyBounds, "see KeyBounds.create")
    meaning = "tokens, and the bounds' kv_heads and head_dim"
    check_step_keys("key", key, slot_mapping, bounds.min_key.shape[1:], meaning)
    require_ints(1, block_size=block_size)
    num_blocks = bounds.min_key.shape[0]
    slot_mapping = slot_mapping.astype(jnp.int32)  # The cache's sizes may not fit 8 or 16 bits.
    block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)
    new_block = jnp.where(slot_mapping % block_size == 0, block, num_blocks)
    key = key[: block.shape[0]].astype(bounds.min_key.dtype)
    max_value = jnp.asarray(jnp.finfo(bounds.min_key.dtype).max, bounds.min_key.dtype)
    min_key = bounds.min_key.at[new_block].set(max_value, mode="drop").at[block].min(key, mode="drop")
    max_key = bounds.max_key.at[new_block].set(-max_value, mode="drop").at[block].max(key, mode="drop")
    return KeyBounds(min_key=min_key, max_key=max_key)


def check_step_keys(
    name: str, keys: Array, slot_mapping: Array, key_shape: tuple[int, ...], meaning: str
) -> None:
    """Raise ValueError unless there is a key of this shape for each slot.

    Args:
        name: Argument name of the keys.
        keys: Keys of a step's tokens; may have more (padding) tokens than slot_mapping.
        slot_mapping: Cache slot of each token.
        key_shape: Shape of the key of a token.
        meaning: Names of the axes of the keys, for the error.
    """
    require_array("slot_mapping", slot_mapping, "integer", {1: "[tokens]"})
    (num_tokens,), num_keys = slot_mapping.shape, keys.shape[0]
    require_shape(name, keys.shape, (num_keys, *key_shape), meaning)
    rule = f"have at least as many tokens as slot_mapping ({num_tokens})"
    require(num_keys >= num_tokens, name, rule, num_keys)


def block_scores(
    query: Float[Array, "reqs q_heads head_dim"],
    bounds: KeyBounds,
    block_table: Int32[Array, "reqs max_blocks"],
) -> Float[Array, "reqs kv_heads max_blocks"]:
    """Return an upper bound of the unscaled score of any query head with any key of each block, in f32."""
    reqs, q_heads, head_dim = query.shape
    kv_heads = bounds.min_key.shape[1]
    q = query.reshape(reqs, kv_heads, q_heads // kv_heads, head_dim).astype(bounds.min_key.dtype)
    blocks = jnp.clip(block_table, 0, bounds.min_key.shape[0] - 1)
    # f32, because XLA:CPU (jax 0.11.2) returns infinities for this bf16 product inside jit.
    q, min_key, max_key = (x.astype(jnp.float32) for x in (q, bounds.min_key[blocks], bounds.max_key[blocks]))
    dot = functools.partial(jnp.einsum, "rhgd,rbhd->rhgb")
    return (dot(jnp.maximum(q, 0), max_key) + dot(jnp.minimum(q, 0), min_key)).max(axis=2)


def select_blocks(
    query: Float[Array, "reqs q_heads head_dim"],
    bounds: KeyBounds,
    block_table: Int[Array, "reqs max_blocks"],
    seq_lens: Int[Array, " reqs"],
    *,
    num_selected: int,
    block_size: int,
    num_recent: int = 1,
    implementation: str | None = None,
    interpret: Any = None,
) -> BlockMask:
    """Select the blocks with the largest scores for each request and kv head, with one query per request.

    Args:
        query: Queries of the decode region.
        bounds: Key bounds, including the keys of the current step.
        block_table: Block table of the decode region.
        seq_lens: Number of keys of each request; 0 marks a padding row.
        num_selected: Static: number of blocks per kv head, including the recent ones. Blocks that tie with
            the last one are selected too. XLA also selects blocks that score NaN, so that NaN propagates; the
            kernels may then select any blocks in addition to the recent ones.
        block_size: Static: number of tokens per cache block.
        num_recent: Static: number of most recent blocks that are always selected.
        implementation: "mosaic_gpu" or "xla"; None = the best one that supports these sizes on this machine.
        interpret: Static: plgpu.InterpretGPUParams to run the kernels on a CPU.

    Returns:
        A mask for `attend(mask=)` with one row per decode request. If the step also has prefill rows, attend
        to the decode region only (`metadata.decode_region`).

    Raises:
        ValueError: If num_selected is not between 1 and max_blocks, another number is out of range, or the
            shapes do not match.
        NotImplementedError: If the requested implementation does not support these arguments.
    """
    query, bounds, block_table, seq_lens = _check_arguments(query, bounds, block_table, seq_lens)
    max_blocks = block_table.shape[1]
    _check_numbers(num_selected, max_blocks, block_size=block_size, num_recent=num_recent)
    reason = None if interpret else support.why_not_kernel_on("block_scores", query, bounds, block_table)
    reason = reason or _why_not_select(bounds, num_q_heads=query.shape[1], max_blocks=max_blocks)
    use_kernel = support.should_use_kernel("select_blocks", implementation, reason)
    block = jnp.arange(max_blocks, dtype=jnp.int32)[None, :]
    num_blocks = (seq_lens + (block_size - 1)) // block_size
    is_recent = (block >= num_blocks[:, None] - num_recent)[:, None, :]
    is_valid = (block < num_blocks[:, None])[:, None, :]
    if use_kernel:
        scores = kernels.block_scores(
            query,
            bounds.min_key,
            bounds.max_key,
            block_table,
            seq_lens,
            block_size=block_size,
            interpret=interpret,
        )
        best = kernels.select_top_blocks(
            scores, seq_lens, block_size=block_size, num_selected=num_selected, num_recent=num_recent
        )
        selected = is_valid & (is_recent | (scores >= best.threshold[..., None]))
        return ListedBlocks(
            blocks=selected[:, :, None, :],
            block_q=None,
            block_kv=block_size,
            ids=best.ids,
            counts=best.counts,
        )
    scores = block_scores(query, bounds, block_table)
    scores = jnp.where(is_valid, jnp.where(is_recent | jnp.isnan(scores), jnp.inf, scores), -jnp.inf)
    threshold = jnp.sort(scores, axis=-1)[..., max_blocks - num_selected, None]
    selected = (scores >= threshold) & is_valid
    return BlockMask(blocks=selected[:, :, None, :], block_q=None, block_kv=block_size)


def _check_arguments(
    query: Array, bounds: KeyBounds, block_table: Array, seq_lens: Array
) -> tuple[Array, KeyBounds, Array, Array]:
    """Return the checked arguments without gradients, with int32 lengths and blocks."""
    _check_shapes(query, bounds, block_table, seq_lens)
    query, bounds = jax.lax.stop_gradient((query, bounds))
    return query, bounds, block_table.astype(jnp.int32), seq_lens.astype(jnp.int32)


def _check_shapes(query: Array, bounds: KeyBounds, block_table: Array, seq_lens: Array) -> None:
    require_type("bounds", bounds, KeyBounds, "see KeyBounds.create and write_key_bounds")
    require(
        getattr(query, "ndim", None) == 3,
        "query",
        "be an array [reqs, q_heads, head_dim]",
        getattr(query, "shape", type(query).__name__),
    )
    require_array("block_table", block_table, "integer", {2: "[reqs, max_blocks]"})
    require_array("seq_lens", seq_lens, "integer", {1: "[reqs]"})
    (reqs, q_heads, _), kv_heads, max_blocks = query.shape, bounds.min_key.shape[1], block_table.shape[1]
    rule = f"be a multiple of the bounds' number of kv heads ({kv_heads})"
    require(q_heads % kv_heads == 0, "query's number of heads", rule, q_heads)
    require_shape("query", query.shape, (reqs, q_heads, bounds.min_key.shape[2]), "the bounds' head_dim")
    require(max_blocks > 0, "block_table", "have at least one column", f"shape {block_table.shape}")
    require_shape("block_table", block_table.shape, (reqs, max_blocks), "one row per request")
    require_shape("seq_lens", seq_lens.shape, (reqs,), "one per request")


def _check_numbers(num_selected: int, max_blocks: int, *, block_size: int, num_recent: int) -> None:
    require_ints(1, block_size=block_size)
    require_ints(0, num_recent=num_recent)
    require_int(num_selected=num_selected)
    rule = f"lie in [1, max_blocks ({max_blocks})]"
    require(1 <= num_selected <= max_blocks, "num_selected", rule, num_selected)


def _why_not_select(bounds: KeyBounds, *, num_q_heads: int, max_blocks: int) -> str | None:
    """Return why the kernels do not support a selection; None if they do."""
    if max_blocks > kernels.MAX_LEN:
        return f"the kernels select among at most {kernels.MAX_LEN} blocks, got {max_blocks}"
    _, kv_heads, head_dim = bounds.min_key.shape
    return kernels.why_not_block_scores(
        dtype=bounds.min_key.dtype,
        q_heads=num_q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        gpu=architectures.kernel_architecture(bounds),
    )
