"""Metadata of a following step, on the device: the next decode step, new blocks, a larger bucket."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata
from jattn.batch.slots import PAD_SLOT_ID, compute_slot_mapping
from jattn.pytree import replace
from pallas_kernels.checks import require, require_int32s, require_shape, require_type


def recompute_slot_mapping(metadata: BatchMetadata) -> Int32[Array, " tokens"]:
    """Compute the slot of every token from its position and its row's blocks; -1 for padding tokens."""
    rows = jnp.where(metadata.is_valid_token, metadata.token_rows, -1)
    slots = compute_slot_mapping(metadata.block_table, rows, metadata.positions, metadata.block_size)
    return jnp.asarray(slots)


def update_block_table(
    metadata: BatchMetadata, block_table: Int32[Array, "reqs max_blocks"]
) -> BatchMetadata:
    """Return the metadata with another block table and the slots that follow from it. Works inside jit.

    Args:
        metadata: Metadata of the step.
        block_table: Block ids of every row, padding rows included; any number of columns.

    Raises:
        ValueError: If the number of rows differs from the metadata's, or the table does not hold ints.

    Source: vLLM's update_block_table, for KV-cache groups that differ in their blocks only.
    """
    updated = replace(metadata, block_table=_check_block_table(metadata, block_table))
    return replace(updated, slot_mapping=recompute_slot_mapping(updated))


def advance(
    metadata: BatchMetadata,
    block_table: Int32[Array, "reqs max_blocks"] | None = None,
    *,
    num_accepted: Int[Array, " reqs"] | None = None,
    is_running: Bool[Array, " reqs"] | None = None,
) -> BatchMetadata:
    """Return the next decode step's metadata: every valid row decodes `decode_query_len` more tokens.

    Prefill rows become decode rows, so the result's bucket has `max_reqs` decode rows and no prefill region.
    A token past the end of the block table gets slot -1, so tables must be long enough. Works inside jit.

    Args:
        metadata: Metadata of the current step.
        block_table: Block ids of the next step, int32 [reqs, max_blocks]; None keeps the current table.
        num_accepted: Number of accepted tokens of this step per row (speculative decoding); None accepts all.
        is_running: Whether each row continues; a row that does not becomes padding. None continues all rows.

    Raises:
        ValueError: If an argument does not have one entry per row, or has the wrong dtype.
    """
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    bucket = metadata.bucket
    decode_len = bucket.decode_query_len
    for name, value, kind in (
        ("num_accepted", num_accepted, jnp.integer),
        ("is_running", is_running, jnp.bool_),
    ):
        if value is not None:
            _check_rows(name, value, (bucket.max_reqs,), kind)
    accepted = metadata.query_lens if num_accepted is None else num_accepted.astype(jnp.int32)
    is_valid = metadata.seq_lens > 0
    is_valid = is_valid if is_running is None else is_valid & is_running
    seq_lens = jnp.where(is_valid, metadata.num_computed_tokens + accepted + decode_len, 0)
    rows = jnp.arange(bucket.max_reqs + 1, dtype=jnp.int32)
    num_rows = jnp.max(jnp.where(is_valid, rows[1:], 0), initial=0)
    next_metadata = replace(
        metadata,
        query_start_loc=jnp.minimum(rows, num_rows) * decode_len,
        seq_lens=seq_lens,
        block_table=metadata.block_table
        if block_table is None
        else _check_block_table(metadata, block_table),
        slot_mapping=jnp.zeros(bucket.max_reqs * decode_len, jnp.int32),
        num_decodes=num_rows,
        num_prefills=jnp.zeros_like(metadata.num_prefills),
        bucket=Bucket(max_decodes=bucket.max_reqs, decode_query_len=decode_len, max_blocks=bucket.max_blocks),
    )
    return replace(next_metadata, slot_mapping=recompute_slot_mapping(next_metadata))


def _check_block_table(metadata: BatchMetadata, block_table: Any) -> Int32[Array, "reqs max_blocks"]:
    """Check a new block table for the metadata's rows."""
    columns = block_table.shape[1:] if getattr(block_table, "ndim", 0) == 2 else ("max_blocks",)
    _check_rows("block_table", block_table, (metadata.bucket.max_reqs, *columns), jnp.integer)
    return jnp.asarray(block_table, jnp.int32)


def _check_rows(name: str, value: Any, shape: tuple[Any, ...], kind: Any) -> None:
    """Check that an array has one entry per row and the right kind of dtype."""
    require(hasattr(value, "dtype") and hasattr(value, "shape"), name, "be an array", repr(value))
    require_shape(name, value.shape, shape, "one entry per row of the metadata")
    has_dtype = jnp.issubdtype(value.dtype, kind)
    require(has_dtype, name, "hold bools" if kind is jnp.bool_ else "hold ints", value.dtype)
    require_int32s(name, value)


def pad_to_bucket(metadata: BatchMetadata, bucket: Bucket) -> BatchMetadata:
    """Return the metadata padded to a larger bucket. Works inside jit.

    Pad arrays of tokens with `jattn.batch.transitions.pad_tokens`.

    Args:
        metadata: Metadata of the step.
        bucket: Larger bucket: no size is smaller than the metadata's, and decode_query_len is the same.

    Raises:
        ValueError: If a size of `bucket` is smaller, or its decode_query_len differs.
    """
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    old = metadata.bucket
    require(isinstance(bucket, Bucket), "bucket", "be a Bucket", repr(bucket))
    require(
        bucket.decode_query_len == old.decode_query_len,
        "bucket.decode_query_len",
        f"be the metadata's ({old.decode_query_len})",
        bucket.decode_query_len,
    )
    for size in ("max_decodes", "max_prefills", "max_prefill_tokens"):
        require(
            getattr(bucket, size) >= getattr(old, size),
            f"bucket.{size}",
            f"be at least {getattr(old, size)}",
            getattr(bucket, size),
        )
    max_blocks = metadata.block_table.shape[1]
    more_blocks = (bucket.max_blocks or max_blocks) - max_blocks
    require(more_blocks >= 0, "bucket.max_blocks", f"be at least {max_blocks}", bucket.max_blocks)

    def pad_rows(rows: Array) -> Array:
        return _pad_regions(rows, old.max_decodes, bucket.max_decodes, bucket.max_reqs, 0)

    num_decode_tokens = metadata.num_decodes * bucket.decode_query_len
    decode_starts = jnp.minimum(
        jnp.arange(bucket.max_decodes, dtype=jnp.int32) * bucket.decode_query_len, num_decode_tokens
    )
    prefill_starts = (
        metadata.query_start_loc[old.max_decodes :] - old.max_decode_tokens + bucket.max_decode_tokens
    )
    if not bucket.max_prefills:
        prefill_starts = num_decode_tokens[None]
    elif not old.max_prefills:
        prefill_starts = jnp.full(1, bucket.max_decode_tokens, jnp.int32)
    padding = (0, bucket.max_prefills + 1 - prefill_starts.shape[0])
    return replace(
        metadata,
        query_start_loc=jnp.concatenate([decode_starts, jnp.pad(prefill_starts, padding, mode="edge")]),
        seq_lens=pad_rows(metadata.seq_lens),
        block_table=jnp.pad(pad_rows(metadata.block_table), ((0, 0), (0, more_blocks))),
        slot_mapping=pad_tokens(metadata.slot_mapping, old, bucket, pad=PAD_SLOT_ID),
        bucket=bucket,
    )


def pad_tokens(tokens: Array, old: Bucket, new: Bucket, *, pad: int = 0) -> Array:
    """Pad an array [old.max_tokens, ...] to [new.max_tokens, ...], region by region.

    Raises:
        ValueError: If the array does not have `old.max_tokens` tokens.
    """
    got = f"shape {tokens.shape}"
    require(
        tokens.shape[:1] == (old.max_tokens,), "tokens", f"have the bucket's {old.max_tokens} tokens", got
    )
    return _pad_regions(tokens, old.max_decode_tokens, new.max_decode_tokens, new.max_tokens, pad)


def _pad_regions(array: Array, old_first: int, new_first: int, new_total: int, pad_value: int) -> Array:
    """Pad `[first region | second region]` to `[new_first | new_total - new_first]` entries of axis 0."""
    no_padding = ((0, 0),) * (array.ndim - 1)
    second = new_total - new_first - (array.shape[0] - old_first)
    first_padded = jnp.pad(
        array[:old_first], ((0, new_first - old_first), *no_padding), constant_values=pad_value
    )
    return jnp.concatenate(
        [first_padded, jnp.pad(array[old_first:], ((0, second), *no_padding), constant_values=pad_value)]
    )
