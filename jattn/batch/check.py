"""Consistency checks of batch metadata on the host, for errors that a device would not report."""

from typing import NamedTuple

import jax
import numpy as np

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata
from jattn.cache import CacheSpec, PackedKV
from pallas_kernels import architectures
from pallas_kernels.checks import require, require_shape, require_type


class _Rows(NamedTuple):
    """Number of keys, number of new tokens and index of the first new token, per row."""

    seq_lens: np.ndarray
    query_lens: np.ndarray
    starts: np.ndarray


class _Tokens(NamedTuple):
    """Row, position and slot of the tokens that are written to the cache."""

    rows: np.ndarray
    positions: np.ndarray
    slots: np.ndarray


def check_batch(metadata: BatchMetadata, cache_spec: CacheSpec | PackedKV | None) -> None:
    """Check a step's metadata on the host: for tests and debugging, not for every step of a server.

    Waits for the metadata's arrays. Checks that:

    - the blocks of every row belong to the cache and hold the row's keys;
    - every written token goes to the slot that its row's block table has for its position, no two tokens
      share a slot, and none is written to block 0, the null block that padding points to;
    - what a row writes into a shared block is context of the other rows, at the same position;
    - padding writes nothing, and the regions are as described in `BatchMetadata`.

    Tokens with a negative slot are not written; this is valid for cross attention and for layers that share
    another layer's cache. A row may read block 0, since sliding windows free blocks, so a block table padded
    with 0 instead of context blocks is not detected.

    Args:
        metadata: Metadata of an entire step, not of a region or of a part of a cascade.
        cache_spec: Spec of the cache, or the keys and values outside a cache. None if all keys are this
            step's tokens (`PagedAttention` without a cache), so that no row may have context.

    Raises:
        ValueError: If a check fails. The message names the array, the row and the value.
    """
    if not architectures.is_concrete(metadata):
        raise ValueError("metadata is traced. Call check_batch outside of jax.jit.")
    is_known = cache_spec is None or isinstance(cache_spec, CacheSpec | PackedKV)
    kind = type(cache_spec).__name__
    require(is_known, "cache_spec", "be a CacheSpec, a PackedKV or None", kind)
    require(isinstance(metadata, BatchMetadata), "metadata", "be a BatchMetadata", type(metadata).__name__)
    step = jax.device_get(metadata)
    _check_arrays(step)
    rows = _check_rows(step)
    if isinstance(cache_spec, CacheSpec):
        _check_blocks(step, rows, cache_spec)
        tokens = _check_tokens(step, rows)
        _check_slots_differ(tokens)
        _check_sharing(step, rows, tokens)
        return
    _check_nothing_is_written(step)
    if cache_spec is None:
        require_no_context(step)
    else:
        _check_keys_outside(rows, jax.device_get(cache_spec))


def require_no_context(metadata: BatchMetadata) -> None:
    """Check that no row has context, as without a cache all keys are new tokens; not if traced.

    Raises:
        ValueError: If a row has context: other rows' keys would be read in its place.
    """
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    if not architectures.is_concrete(metadata):
        return
    step = jax.device_get(metadata)
    seq_lens, query_lens = np.asarray(step.seq_lens), query_lens_on_host(step)
    for r in np.flatnonzero(seq_lens != query_lens)[:1]:
        raise ValueError(
            f"seq_lens[{r}]={seq_lens[r]} differs from the row's {query_lens[r]} new tokens, but there is no "
            "cache for earlier tokens. Pass a cache, or metadata whose seq_lens equal query_lens."
        )


def _check_arrays(step: BatchMetadata) -> None:
    """Check that shapes and dtypes match the bucket."""
    bucket: Bucket = step.bucket
    columns = step.block_table.shape[-1] if bucket.max_blocks is None else bucket.max_blocks
    shapes = {
        "seq_lens": (bucket.max_reqs,),
        "query_start_loc": (bucket.max_reqs + 1,),
        "block_table": (bucket.max_reqs, columns),
        "slot_mapping": (bucket.max_tokens,),
        "num_decodes": (),
        "num_prefills": (),
    }
    for name, shape in shapes.items():
        array = getattr(step, name)
        require_shape(name, array.shape, shape, f"as {bucket}")
        require(array.dtype == np.int32, name, "be int32", array.dtype)


def _check_rows(step: BatchMetadata) -> _Rows:
    """Check lengths and regions and return the rows."""
    bucket, lens, starts = step.bucket, np.asarray(step.seq_lens), np.asarray(step.query_start_loc)
    for r in np.flatnonzero(lens < 0)[:1]:
        require(False, f"seq_lens[{r}]", "be at least 0", lens[r])
    first, tokens = bucket.max_decodes, bucket.max_decode_tokens
    begin, prefill_begin, end = (int(starts[i]) for i in (0, first, -1))
    require(begin == 0, "query_start_loc[0]", "be 0", begin)
    require(bool((np.diff(starts) >= 0).all()), "query_start_loc", "be non-decreasing", starts.tolist())
    rule = f"be at most the bucket's {bucket.max_tokens} tokens"
    require(end <= bucket.max_tokens, f"query_start_loc[{bucket.max_reqs}]", rule, end)
    if bucket.max_prefills:
        rule = f"be {tokens}, the number of decode tokens of the bucket"
        require(prefill_begin == tokens, f"query_start_loc[{first}]", rule, prefill_begin)
    for name, live, limit in (
        ("decode", np.flatnonzero(lens[:first]), first),
        ("prefill", np.flatnonzero(lens[first:]), bucket.max_prefills),
    ):
        got, last = int(getattr(step, f"num_{name}s")), int(live[-1]) + 1 if live.size else 0
        require(got <= limit, f"num_{name}s", f"be at most the bucket's {limit}", got)
        require(got >= last, f"num_{name}s", f"be at least {last}, since {name} row {last - 1} has keys", got)
    row = np.arange(bucket.max_reqs)
    firsts = np.where(row < first, row * bucket.decode_query_len, starts[:-1])
    return _Rows(lens.astype(np.int64), query_lens_on_host(step), firsts)


def query_lens_on_host(step: BatchMetadata) -> np.ndarray:
    """Return `metadata.query_lens` computed by numpy, also for constants inside jit."""
    return np.where(np.asarray(step.seq_lens) > 0, row_lens_on_host(step), 0)


def row_lens_on_host(step: BatchMetadata) -> np.ndarray:
    """Return the number of tokens per row, including rows without keys, computed by numpy."""
    is_decode = np.arange(step.bucket.max_reqs) < step.bucket.max_decodes
    return np.where(is_decode, step.bucket.decode_query_len, np.diff(np.asarray(step.query_start_loc)))


def _check_blocks(step: BatchMetadata, rows: _Rows, cache_spec: CacheSpec) -> None:
    """Check that every row has blocks of the cache for all its keys."""
    size, table = cache_spec.block_size, np.asarray(step.block_table)
    require(
        step.block_size == size,
        "metadata.block_size",
        f"equal the cache's block_size ({size})",
        step.block_size,
    )
    capacity = table.shape[1] * size
    for r in np.flatnonzero(rows.seq_lens > capacity)[:1]:
        rule = f"be at most {capacity}, the {table.shape[1]} blocks of {size} tokens of a block_table row"
        require(False, f"seq_lens[{r}]", rule, rows.seq_lens[r])
    is_outside = (table < 0) | (table >= cache_spec.num_blocks)
    for r in np.flatnonzero((_is_used(rows, table, size) & is_outside).any(axis=1))[:1]:
        raise ValueError(
            f"block_table[{r}] contains ids outside [0, {cache_spec.num_blocks}), the blocks of the cache, "
            f"for the row's {rows.seq_lens[r]} tokens: {table[r].tolist()}. Pass ids of allocated blocks."
        )


def _is_used(rows: _Rows, table: np.ndarray, block_size: int) -> np.ndarray:
    """Return which entries of the block table hold keys, bool [reqs, max_blocks]."""
    return np.arange(table.shape[1]) * block_size < rows.seq_lens[:, None]


def _check_tokens(step: BatchMetadata, rows: _Rows) -> _Tokens:
    """Check the slots of the written tokens and return these tokens."""
    slots, size = np.asarray(step.slot_mapping), step.block_size
    row = np.repeat(np.arange(len(rows.seq_lens)), rows.query_lens)
    index = np.arange(len(row)) - np.repeat(np.cumsum(rows.query_lens) - rows.query_lens, rows.query_lens)
    token = rows.starts[row] + index
    is_padding = np.ones(len(slots), bool)
    is_padding[token] = False
    for t in np.flatnonzero(is_padding & (slots >= 0))[:1]:
        raise ValueError(f"slot_mapping[{t}]={slots[t]}, but token {t} is padding. Set its slot to -1.")
    is_written = slots[token] >= 0
    row, index, token = row[is_written], index[is_written], token[is_written]
    for r in row[rows.query_lens[row] > rows.seq_lens[row]][:1]:
        raise ValueError(
            f"seq_lens[{r}] is {rows.seq_lens[r]}, but row {r} has {rows.query_lens[r]} query tokens, which "
            "seq_lens includes."
        )
    position = rows.seq_lens[row] - rows.query_lens[row] + index
    block = np.asarray(step.block_table, np.int64)[row, position // size]
    expected = block * size + position % size
    for i in np.flatnonzero(slots[token] != expected)[:1]:
        rule = f"be {expected[i]} (position {position[i]} of row {row[i]}, in block {block[i]}) or negative"
        require(False, f"slot_mapping[{token[i]}]", rule, slots[token[i]])
    for i in np.flatnonzero(block == 0)[:1]:
        raise ValueError(
            f"slot_mapping[{token[i]}]={expected[i]} is in block 0, the null block, but row {row[i]} writes "
            f"position {position[i]} there. Give the row another block."
        )
    return _Tokens(row, position, expected)


def _check_slots_differ(tokens: _Tokens) -> None:
    order = np.argsort(tokens.slots, kind="stable")
    slots, rows = tokens.slots[order], tokens.rows[order]
    for i in np.flatnonzero(slots[1:] == slots[:-1])[:1]:
        raise ValueError(
            f"slot_mapping has slot {slots[i]} twice, for rows {rows[i]} and {rows[i + 1]}. "
            "Each token needs a separate slot."
        )


def _check_sharing(step: BatchMetadata, rows: _Rows, tokens: _Tokens) -> None:
    """Check that writes into a block shared by other rows are their context, at the same position."""
    size, table = step.block_size, np.asarray(step.block_table)
    row_of_entry, column_of_entry = np.nonzero(_is_used(rows, table, size))
    block_of_entry, written_blocks = table[row_of_entry, column_of_entry], tokens.slots // size
    blocks, num_rows_per_block = np.unique(block_of_entry, return_counts=True)
    context = rows.seq_lens - rows.query_lens
    for block in np.intersect1d(blocks[num_rows_per_block > 1], written_blocks):
        for i in np.flatnonzero(written_blocks == block):
            writer, position = tokens.rows[i], tokens.positions[i]
            has_block = block_of_entry == block
            rows_with_block, columns = row_of_entry[has_block], column_of_entry[has_block]
            for j in np.flatnonzero(columns != position // size)[:1]:
                raise ValueError(
                    f"block_table[{rows_with_block[j]}] has block {block} in column {columns[j]}, but row "
                    f"{writer} writes it as column {position // size}. Rows that share a block must have it "
                    "in the same column."
                )
            lacks_position = (rows_with_block != writer) & (context[rows_with_block] <= position)
            for row in rows_with_block[lacks_position][:1]:
                raise ValueError(
                    f"Row {writer} writes position {position} of block {block}, which row {row} also uses, "
                    f"but row {row} has only {context[row]} tokens of context. Give row {row} a separate "
                    "block."
                )


def _check_nothing_is_written(step: BatchMetadata) -> None:
    slots = np.asarray(step.slot_mapping)
    for t in np.flatnonzero(slots >= 0)[:1]:
        raise ValueError(f"slot_mapping[{t}]={slots[t]}, but there is no cache. Set all slots to -1.")


def _check_keys_outside(rows: _Rows, kv: PackedKV) -> None:
    """Check that every row's keys are within the packed keys."""
    require_shape(
        "kv_start_loc", kv.kv_start_loc.shape, rows.seq_lens.shape, "one entry per row of the metadata"
    )
    kv.check_rows(rows.seq_lens)
    kv.check_is_aligned(rows.starts, rows.query_lens, rows.seq_lens)
