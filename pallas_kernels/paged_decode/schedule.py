"""The stream-K schedule of decode: which thread block processes which keys.

A **unit** is the smallest part of the work that the schedule assigns: one KV tile of one schedule row or,
with fixed splits, one split. A **schedule row** is a request or, with lists of sparse blocks, one KV head of
a request. The units of all rows are numbered consecutively, and divided into spans of equally many units. A
**span** is the contiguous range of KV tokens of the batch that one thread block processes. It may begin and
end inside a request. So all thread blocks finish at the same time even if the lengths of the requests differ.

A request that lies in several spans has one split output per span. `row + span` is the index of a split
output: it grows by one from each segment of the batch to the next, so no table of indices is needed.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels.paged_decode.sizes import DecodeSizes
from pallas_kernels.ptx.cumulative_units import cumulative_units
from pallas_kernels.shared.score import Score, ScoreMask

# Up to this many rows XLA sums the units in one kernel, over pairs of rows; for more it would store the
# pairs.
MAX_PAIRWISE_ROWS = 256


class BlockList(NamedTuple):
    """The sparse blocks that each KV head of each request visits.

    Attributes:
        ids: Block indices in ascending order; block i holds keys `i * list_block_size` onward. Indices past
            the request's end are harmless. With `lists_have_head_bits`, the bits from QUERY_BLOCK_SHIFT on
            are the query heads of the group that visit the block.
        counts: Number of valid ids of each list; ids after them are never used.
    """

    ids: Int32[Array, "reqs kv_heads max_listed"]
    counts: Int32[Array, "reqs kv_heads"]


@dataclasses.dataclass(frozen=True)
class DecodeScheduleKey:
    """Static sizes that a schedule was built for. A call with other sizes cannot use the schedule.

    Attributes:
        keys_per_unit: `DecodeSizes.keys_per_unit`.
        mask: `Score.mask`; None with lists, which select the keys.
        decode_query_len: Query tokens per request; None with lists.
        list_block_size: Keys per listed block; None without lists.
        kv_heads: Number of KV heads, each of which has one list per request; None without lists.
    """

    keys_per_unit: int
    mask: ScoreMask | None
    decode_query_len: int | None
    list_block_size: int | None
    kv_heads: int | None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["unit_ends"], meta_fields=["num_spans", "built_for"]
)
@dataclasses.dataclass(frozen=True)
class DecodeSchedule:
    """The units of each row of a step. Layers with the same mask can share it.

    Attributes:
        unit_ends: One past the index of each row's last unit, where units are counted over all rows.
        num_spans: Static number of spans. A thread block searches `unit_ends` for the first row of its span
            (span.find_span_start).
        built_for: Static sizes that the schedule was built for.
    """

    unit_ends: Int32[Array, " schedule_rows"]
    num_spans: int
    built_for: DecodeScheduleKey


def schedule_key(
    score: Score, sizes: DecodeSizes, decode_query_len: int, list_block_size: int | None, kv_heads: int | None
) -> DecodeScheduleKey:
    """Return the static sizes that the schedule of a call must be built for."""
    if list_block_size is not None:
        return DecodeScheduleKey(sizes.keys_per_unit, None, None, list_block_size, kv_heads)
    return DecodeScheduleKey(sizes.keys_per_unit, score.mask, decode_query_len, None, None)


def make_schedule(
    seq_lens: Int32[Array, " reqs"],
    *,
    score: Score,
    sizes: DecodeSizes,
    kv_heads: int,
    group: int,
    decode_query_len: int,
    block_list: BlockList | None = None,
    list_block_size: int | None = None,
    max_kv: int | None = None,
) -> DecodeSchedule:
    """Return the schedule of a step, which all layers with the same mask can share.

    The function is traced, so the schedule is computed on the device once per step.

    Args:
        seq_lens: Number of keys of each request.
        score: Score function of the layers.
        sizes: Sizes of the kernel.
        kv_heads: Number of KV heads.
        group: Query heads per KV head.
        decode_query_len: Query tokens per request.
        block_list: Sparse blocks to visit, or None for all keys. With lists, a row of the schedule is one KV
            head of a request.
        list_block_size: Keys per sparse block; None without lists.
        max_kv: Maximum number of keys of a request; limits the number of thread blocks. None = no maximum.
    """
    rows = seq_lens.shape[0] if block_list is None else block_list.counts.size
    row_tiles, _ = sizes.row_tiles(group * decode_query_len)
    num_spans = max(sizes.ctas // (row_tiles if block_list is not None else kv_heads * row_tiles), 1)
    if max_kv is not None:
        num_spans = min(num_spans, rows * -(-max_kv // sizes.keys_per_unit))
    list_heads = None if block_list is None else block_list.counts.shape[1]
    built_for = schedule_key(score, sizes, decode_query_len, list_block_size, list_heads)

    # Count the units of each row, and sum them up.
    unit = sizes.keys_per_unit
    if block_list is not None:
        assert list_block_size is not None
        counts = block_list.counts.reshape(-1)
        if counts.size > MAX_PAIRWISE_ROWS:
            unit_ends = cumulative_units.by_platform(counts, listed=list_block_size, unit=unit)
            return DecodeSchedule(unit_ends, num_spans, built_for)
        units = lax.div(counts * list_block_size + (unit - 1), jnp.full_like(counts, unit))
    else:
        first_key, end_key = score.request_key_range(seq_lens, decode_query_len)
        keys_per_unit = jnp.full_like(end_key, unit)
        units = lax.div(end_key + (unit - 1), keys_per_unit) - lax.div(first_key, keys_per_unit)
    # A row without visible keys has one unit, too, so that the thread block of its span writes its zeros.
    units = jnp.maximum(units, 1)
    if units.size <= MAX_PAIRWISE_ROWS:
        index = jnp.arange(units.size, dtype=jnp.int32)
        unit_ends = jnp.where(index[None, :] <= index[:, None], units[None, :], 0).sum(axis=1)
    else:
        unit_ends = jnp.cumsum(units)
    return DecodeSchedule(unit_ends.astype(jnp.int32), num_spans, built_for)
