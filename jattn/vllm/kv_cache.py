"""The cache as vLLM's paged_attention ops take it: two arrays, keys packed by 16 bytes."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, Shaped

from jattn.batch.int_arrays import (
    AnyArray,
    IntLike,
    IntTable,
    IntVector,
    as_block_table,
    python_ints,
    with_namespace,
)
from jattn.batch.slots import PAD_SLOT_ID
from jattn.cache import PagedCache, write_kv
from pallas_kernels.checks import require, require_positive


def reshape_and_cache(
    key: Float[Array, "kv_tokens kv_heads head_dim"],
    value: Float[Array, "kv_tokens kv_heads head_dim"],
    key_cache: Shaped[Array, "blocks kv_heads packs block_size x"],
    value_cache: Shaped[Array, "blocks kv_heads head_dim block_size"],
    slot_mapping: Int[Array, " tokens"],
    k_scale: Float[Array, "..."] | float | None = None,
    v_scale: Float[Array, "..."] | float | None = None,
) -> tuple[Array, Array]:
    """write_kv over vLLM's packed arrays: returns them written; those given are donated.

    A scale is a number, an array of one as vLLM's layers have it, or one for each kv head.

    Source: vLLM `reshape_and_cache`; the cache's dtype says what kv_cache_dtype said there.
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        rule = "be a number or None (there is no kv_cache_dtype: the caches' own dtypes say it)"
        require(not isinstance(scale, str), name, rule, repr(scale))
    scales = (None if scale is None else jnp.asarray(scale, jnp.float32) for scale in (k_scale, v_scale))
    k, v = (scale.reshape(()) if scale is not None and scale.size == 1 else scale for scale in scales)
    cache = PagedCache(k=key_cache, v=value_cache, k_scale=k, v_scale=v, layout="packed")
    cache = write_kv(cache, key, value, slot_mapping)
    return jnp.asarray(cache.k), jnp.asarray(cache.v)


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """First position of a request that V0 wrote: it skipped what a prompt's window will not see again.

    Args:
        is_prompt: False: everything is written.
        query_len: New tokens.
        context_len: Not read; V0 has it.
        sliding_window: Tokens that a query sees, itself included; None = all.

    Source: vLLM V0 `compute_slot_mapping_start_idx`.
    """
    if not is_prompt or sliding_window is None:
        return 0
    new, seen = python_ints(query_len=query_len, sliding_window=sliding_window)
    return max(0, new - seen)


def fill_slot_mapping_tail(slot_mapping: IntVector, num_actual_tokens: IntLike) -> Int32[AnyArray, " tokens"]:
    """`slot_mapping` with -1 from `num_actual_tokens` on, as a new array.

    Source: vLLM `CommonAttentionMetadata.__post_init__`, which writes in place.
    """
    xp, slots, num_tokens = with_namespace(slot_mapping=slot_mapping, num_actual_tokens=num_actual_tokens)
    return xp.where(xp.arange(slots.shape[0], dtype=np.int32) < num_tokens, slots, PAD_SLOT_ID)


def physical_to_logical_mapping(
    block_table: IntTable, seq_lens: IntVector, block_size: int, total_blocks: int
) -> Int32[AnyArray, "reqs total_blocks"]:
    """Which of a request's blocks each block of the pool is: the block table turned round.

    Args:
        block_table: Blocks of each request; entries past its length are ignored. Host or traced.
        seq_lens: Tokens of each request.
        block_size: Tokens of a block.
        total_blocks: Blocks of the pool.

    Returns:
        -1 for blocks that the request does not use, and for block 0, the null block. A block that stands at
        several places has the last of them.

    Source: vLLM V1 FlexAttention `physical_to_logical_mapping`.
    """
    block_size, total_blocks = python_ints(block_size=block_size, total_blocks=total_blocks)
    require_positive(block_size=block_size, total_blocks=total_blocks)
    xp, table, lens = with_namespace(
        block_table=as_block_table("block_table", block_table), seq_lens=seq_lens
    )
    num_reqs, num_columns = table.shape
    require(lens.shape == (num_reqs,), "seq_lens", f"have one entry per request ({num_reqs})", lens.shape)
    logical = xp.broadcast_to(xp.arange(num_columns, dtype=np.int32)[None, :], table.shape)
    is_used = (logical * block_size < lens[:, None]) & (table > 0) & (table < total_blocks)
    rows = xp.broadcast_to(xp.arange(num_reqs, dtype=np.int32)[:, None], table.shape)
    unused = xp.full((num_reqs, total_blocks), -1, dtype=np.int32)
    # Unused entries go to the null block, which stays -1.
    blocks, places = xp.where(is_used, table, 0), xp.where(is_used, logical, -1)
    if xp is np:
        np.maximum.at(unused, (rows, blocks), places)
        return unused
    return unused.at[rows, blocks].max(places)
