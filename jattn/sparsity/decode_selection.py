"""Decode over the blocks that matter: bounds of each block's keys, kept up to date, and the best blocks.

One step, all in one jit: write_kv and write_key_bounds, select_blocks, attend(mask=).

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
from pallas_kernels import block_scores as kernels
from pallas_kernels import support
from pallas_kernels.checks import require, require_int, require_shape, require_type


@pytree
class KeyBounds:
    """Smallest and largest value that each element of a block's keys has: f32 or the keys' dtype.

    Attributes:
        low: Of every block of the cache; garbage where no key was written.
        high: As low.
    """

    low: Float[Array, "blocks kv_heads head_dim"]
    high: Float[Array, "blocks kv_heads head_dim"]

    @classmethod
    def create(cls, spec: CacheSpec) -> "KeyBounds":
        """Bounds for an empty cache."""
        zeros = lambda: jnp.zeros((spec.num_blocks, spec.num_kv_heads, spec.head_dim), spec.dtype)
        return cls(low=zeros(), high=zeros())  # two arrays: both are donated


@functools.partial(jax.jit, donate_argnums=0, static_argnames="block_size")
def write_key_bounds(
    bounds: KeyBounds,
    key: Float[Array, "kv_tokens kv_heads head_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    block_size: int,
) -> KeyBounds:
    """Widens the bounds of the blocks that a step writes. Call beside write_kv; the given bounds are donated.

    A block begins anew when its first slot is written, so blocks may be freed and used again.

    Args:
        bounds: What to write into.
        key: Keys of the step's tokens; may be padded longer than slot_mapping.
        slot_mapping: As write_kv's; slots < 0 are not written.
        block_size: Static: tokens of a cache block.

    Raises:
        ValueError: There are fewer keys than slots, or keys of other heads than the bounds.
    """
    require_type("bounds", bounds, KeyBounds, "KeyBounds.create makes them")
    require_array("slot_mapping", slot_mapping, "integer", {1: "[tokens]"})
    require_ints(1, block_size=block_size)
    num_blocks, num_tokens = bounds.low.shape[0], slot_mapping.shape[0]
    require_shape("key", key.shape, (key.shape[0], *bounds.low.shape[1:]), "tokens, the bounds' heads")
    rule = f"have at least as many tokens as slot_mapping ({num_tokens})"
    require(key.shape[0] >= num_tokens, "key", rule, key.shape[0])
    slot_mapping = slot_mapping.astype(jnp.int32)  # in 8 or 16 bits the cache's sizes wrap
    block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)
    begun = jnp.where(slot_mapping % block_size == 0, block, num_blocks)
    key = key[: block.shape[0]].astype(bounds.low.dtype)
    top = jnp.asarray(jnp.finfo(bounds.low.dtype).max, bounds.low.dtype)
    low = bounds.low.at[begun].set(top, mode="drop").at[block].min(key, mode="drop")
    high = bounds.high.at[begun].set(-top, mode="drop").at[block].max(key, mode="drop")
    return KeyBounds(low=low, high=high)


def block_scores(
    query: Float[Array, "reqs q_heads head_dim"],
    bounds: KeyBounds,
    block_table: Int32[Array, "reqs max_blocks"],
) -> Float[Array, "reqs kv_heads max_blocks"]:
    """No query head of a kv head has a larger product with a key of the block; unscaled, f32."""
    reqs, q_heads, head_dim = query.shape
    kv_heads = bounds.low.shape[1]
    q = query.reshape(reqs, kv_heads, q_heads // kv_heads, head_dim).astype(bounds.low.dtype)
    blocks = jnp.clip(block_table, 0, bounds.low.shape[0] - 1)
    # In f32: XLA for CPUs (jax 0.11.2) makes infinities of this product of bf16 inside jit.
    q, low, high = (x.astype(jnp.float32) for x in (q, bounds.low[blocks], bounds.high[blocks]))
    product = functools.partial(jnp.einsum, "rhgd,rbhd->rhgb")
    return (product(jnp.maximum(q, 0), high) + product(jnp.minimum(q, 0), low)).max(axis=2)


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
    """The blocks of each request and kv head with the largest scores, for one query of each request.

    Args:
        query: The decode region's queries.
        bounds: With the step's own keys in them.
        block_table: Of the decode region.
        seq_lens: Keys of each request; 0 marks a padding row.
        num_selected: Static: blocks of each kv head, the recent ones included; all where there are no more.
            What scores as the last of them is taken, too. XLA takes what scores NaN, so that it shows; the
            kernels may then take anything beside the recent blocks.
        block_size: Static: tokens of a cache block.
        num_recent: Static: so many of the last blocks are always among them.
        implementation: "mosaic_gpu" or "xla"; None = the best that this machine and these sizes allow.
        interpret: Static: plgpu.InterpretGPUParams to run the kernels on a CPU.

    Returns:
        A mask for `attend(mask=)` whose rows are the requests: of a step that has prefill rows too, attend to
        the decode region alone with it (`metadata.decode_region`).

    Raises:
        ValueError: num_selected is not between 1 and max_blocks, or another number is out of range, or the
            shapes disagree.
        NotImplementedError: The implementation asked for has no kernel for this; the message says why.
    """
    query, bounds, block_table, seq_lens = _checked(query, bounds, block_table, seq_lens)
    max_blocks = block_table.shape[1]
    _check_numbers(num_selected, max_blocks, block_size=block_size, num_recent=num_recent)
    reason = None if interpret else support.why_not_on(query, bounds, block_table)
    reason = reason or _why_not_select(bounds, num_q_heads=query.shape[1], max_blocks=max_blocks)
    use_kernel = support.should_use_kernel("select_blocks", implementation, reason)
    number = jnp.arange(max_blocks, dtype=jnp.int32)[None, :]
    num_blocks = (seq_lens + (block_size - 1)) // block_size
    is_recent = (number >= num_blocks[:, None] - num_recent)[:, None, :]
    is_live = (number < num_blocks[:, None])[:, None, :]
    if use_kernel:
        sizes = {"block_size": block_size, "interpret": interpret}
        scores = kernels.block_scores(query, bounds.low, bounds.high, block_table, seq_lens, **sizes)
        counts = {"num_selected": num_selected, "num_recent": num_recent}
        best = kernels.best_blocks(scores, seq_lens, block_size=block_size, **counts)
        chosen = is_live & (is_recent | (scores >= best.least[..., None]))
        lists = {"ids": best.ids, "counts": best.counts}
        return ListedBlocks(blocks=chosen[:, :, None, :], block_q=None, block_kv=block_size, **lists)
    scores = block_scores(query, bounds, block_table)
    scores = jnp.where(is_live, jnp.where(is_recent | jnp.isnan(scores), jnp.inf, scores), -jnp.inf)
    least = jnp.sort(scores, axis=-1)[..., max_blocks - num_selected, None]
    chosen = (scores >= least) & is_live
    return BlockMask(blocks=chosen[:, :, None, :], block_q=None, block_kv=block_size)


def _checked(
    query: Array, bounds: KeyBounds, block_table: Array, seq_lens: Array
) -> tuple[Array, KeyBounds, Array, Array]:
    """What chooses, without gradients, as a mask has none; in few bits lengths and blocks would wrap."""
    _check_shapes(query, bounds, block_table, seq_lens)
    query, bounds = jax.lax.stop_gradient((query, bounds))
    return query, bounds, block_table.astype(jnp.int32), seq_lens.astype(jnp.int32)


def _check_shapes(query: Array, bounds: KeyBounds, block_table: Array, seq_lens: Array) -> None:
    require_type("bounds", bounds, KeyBounds, "write_key_bounds keeps them")
    require(
        getattr(query, "ndim", None) == 3,
        "query",
        "be an array [reqs, q_heads, head_dim]",
        getattr(query, "shape", type(query).__name__),
    )
    require_array("block_table", block_table, "integer", {2: "[reqs, max_blocks]"})
    require_array("seq_lens", seq_lens, "integer", {1: "[reqs]"})
    (reqs, q_heads, _), kv_heads, max_blocks = query.shape, bounds.low.shape[1], block_table.shape[1]
    require(q_heads % kv_heads == 0, "query's heads", f"be a multiple of the bounds' ({kv_heads})", q_heads)
    require_shape("query", query.shape, (reqs, q_heads, bounds.low.shape[2]), "the bounds' head_dim")
    require(max_blocks > 0, "block_table", "have columns", block_table.shape)
    require_shape("block_table", block_table.shape, (reqs, max_blocks), "one row per request")
    require_shape("seq_lens", seq_lens.shape, (reqs,), "one per request")


def _check_numbers(num_selected: int, max_blocks: int, *, block_size: int, num_recent: int) -> None:
    require_ints(1, block_size=block_size)
    require_ints(0, num_recent=num_recent)
    require_int(num_selected=num_selected)
    rule = f"lie in [1, max_blocks ({max_blocks})]"
    require(1 <= num_selected <= max_blocks, "num_selected", rule, num_selected)


def _why_not_select(bounds: KeyBounds, *, num_q_heads: int, max_blocks: int) -> str | None:
    """Why there is no kernel for a selection on a GPU that has some; None if there is."""
    if max_blocks > kernels.MAX_LEN:
        return f"there is no kernel to choose among {max_blocks} blocks (at most {kernels.MAX_LEN})"
    _, kv_heads, head_dim = bounds.low.shape
    sizes = {"q_heads": num_q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return kernels.why_not_block_scores(dtype=bounds.low.dtype, **sizes)
