"""vLLM's cache helpers: writes to the packed layout of paged_attention, slot mappings, block tables."""

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
    """Write keys and values into vLLM's packed cache arrays and return the updated arrays.

    Args:
        key: Keys of the new tokens.
        value: Values of the new tokens.
        key_cache: Key cache, with 16 bytes of a head per pack (`x` elements). Donated.
        value_cache: Value cache. Donated.
        slot_mapping: Slot of each token; a negative slot is not written.
        k_scale: Scale of quantized keys: a number, an array of one element, or one scale per kv head.
        v_scale: Scale of quantized values, like `k_scale`.

    Raises:
        ValueError: If a scale is a string (vLLM's argument `kv_cache_dtype`), or the arrays do not match.

    Source: vLLM `reshape_and_cache`, whose argument `kv_cache_dtype` is replaced by the dtype of the arrays.
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        rule = "be a number or None (kv_cache_dtype is not an argument: the dtypes of the caches define it)"
        require(not isinstance(scale, str), name, rule, repr(scale))
    scales = (None if scale is None else jnp.asarray(scale, jnp.float32) for scale in (k_scale, v_scale))
    k, v = (scale.reshape(()) if scale is not None and scale.size == 1 else scale for scale in scales)
    cache = PagedCache(k=key_cache, v=value_cache, k_scale=k, v_scale=v, layout="packed")
    cache = write_kv(cache, key, value, slot_mapping)
    return jnp.asarray(cache.k), jnp.asarray(cache.v)


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """Return the first position of a request that V0 writes to the cache.

    V0 skips the tokens of a prompt that lie before the last sliding window.

    Args:
        is_prompt: Whether the request is a prompt. Otherwise all positions are written.
        query_len: Number of new tokens.
        context_len: Number of cached tokens. Not read; part of vLLM's signature.
        sliding_window: Number of tokens that a query attends to, including itself; None = no window.

    Source: vLLM V0 `compute_slot_mapping_start_idx`.
    """
    if not is_prompt or sliding_window is None:
        return 0
    query_len, window_size = python_ints(query_len=query_len, sliding_window=sliding_window)
    return max(0, query_len - window_size)


def fill_slot_mapping_tail(slot_mapping: IntVector, num_actual_tokens: IntLike) -> Int32[AnyArray, " tokens"]:
    """Return a copy of `slot_mapping` with -1 from index `num_actual_tokens` on.

    Source: vLLM `CommonAttentionMetadata.__post_init__`, which writes in place.
    """
    xp, slots, num_tokens = with_namespace(slot_mapping=slot_mapping, num_actual_tokens=num_actual_tokens)
    return xp.where(xp.arange(slots.shape[0], dtype=np.int32) < num_tokens, slots, PAD_SLOT_ID)


def physical_to_logical_mapping(
    block_table: IntTable, seq_lens: IntVector, block_size: int, total_blocks: int
) -> Int32[AnyArray, "reqs total_blocks"]:
    """Return, for each request, the column of the block table in which each block id occurs.

    Args:
        block_table: Block ids of each request; entries past its length are ignored. Host or traced.
        seq_lens: Number of tokens of each request.
        block_size: Number of tokens per block.
        total_blocks: Number of blocks in the cache.

    Returns:
        The column, or -1 for blocks that the request does not use and for block 0, the null block. For a
        block that occurs in several columns, the last of them.

    Raises:
        ValueError: If a size is not a positive int, or `seq_lens` does not have one entry per request.

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
    mapping = xp.full((num_reqs, total_blocks), -1, dtype=np.int32)
    # Unused entries are written to the null block as -1.
    blocks, columns = xp.where(is_used, table, 0), xp.where(is_used, logical, -1)
    if xp is np:
        np.maximum.at(mapping, (rows, blocks), columns)
        return mapping
    return mapping.at[rows, blocks].max(columns)
