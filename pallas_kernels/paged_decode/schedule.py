"""Who computes what: the keys of all requests laid end to end and cut into equal spans, one a thread block.

A span may begin and end inside a request, so all thread blocks finish together however skewed the batch is,
and no request is cut more often than that takes. Every (request, span) that meet leave one partial result;
along the line of keys request + span grows with each such meeting, so that sum numbers them without a table.
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
from pallas_kernels.shared.score import Score


class BlockList(NamedTuple):
    """The sparse blocks that each request's kv heads visit.

    Attributes:
        ids: Ascending; block i is keys `i * list_block_size` onward. What is past the end is harmless. If the
            call says so, the bits from QUERY_BLOCK_SHIFT on are the query heads of the group that see it.
        counts: How many of the ids are live; the others are never used.
    """

    ids: Int32[Array, "reqs kv_heads max_listed"]
    counts: Int32[Array, "reqs kv_heads"]


@dataclasses.dataclass(frozen=True)
class DecodeScheduleKey:
    """The static part of what a schedule is made for; it serves no other call.

    Attributes:
        unit: Keys of a unit: `tile_kv`, or `split_kv` where splits are fixed.
        mask: Score.mask; None with lists, which say what is visited.
        decode_query_len: Queries of a request; None with lists.
        list_block_size: Keys of a listed block; None without lists.
        kv_heads: Which have lists of their own; None without.
    """

    unit: int
    mask: tuple[bool, tuple[int | None, int | None], int | None] | None
    decode_query_len: int | None
    list_block_size: int | None
    kv_heads: int | None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["unit_ends"], meta_fields=["num_spans", "built_for"]
)
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Work in units of equally many keys, shared by layers of one mask.

    Attributes:
        unit_ends: One past each request's last unit, when the requests' units are laid end to end.
        num_spans: Of a step. Whoever works on one finds its first request by itself (span_start).
        built_for: Static.
    """

    unit_ends: Int32[Array, " reqs"]
    num_spans: int
    built_for: DecodeScheduleKey


MASKED = 256  # requests whose units XLA adds up in one kernel, by a mask; of more it would write out the mask


def make_schedule(
    seq_lens: Int32[Array, " reqs"],
    *,
    score: Score,
    sizes: DecodeSizes,
    decode_query_len: int,
    num_spans: int,
    block_list: BlockList | None = None,
    list_block_size: int | None = None,
) -> Schedule:
    """Cuts a step's keys into `num_spans` equal spans. Traced: made once a step, on the device.

    With lists, "a request" of the schedule is a request's kv head.
    """
    kv_heads = None if block_list is None else block_list.counts.shape[1]
    unit, built_for = sizes.unit, made_for_call(score, sizes, decode_query_len, list_block_size, kv_heads)
    divided = lambda x: lax.div(x, jnp.full_like(x, unit))
    if block_list is not None:
        assert list_block_size is not None
        counts = block_list.counts.reshape(-1)
        if counts.size > MASKED:
            ends = cumulative_units.by_platform(counts, listed=list_block_size, unit=unit)
            return Schedule(ends, num_spans, built_for)
        units = divided(counts * list_block_size + (unit - 1))
    else:
        low, high = score.request_key_range(seq_lens, decode_query_len)
        units = divided(high + (unit - 1)) - divided(low)
    # A request that sees nothing has a unit too: whoever meets it writes its zeros.
    units = jnp.maximum(units, 1)
    if units.size <= MASKED:
        rows = jnp.arange(units.size, dtype=jnp.int32)
        ends = jnp.where(rows[None, :] <= rows[:, None], units[None, :], 0).sum(axis=1)
    else:
        ends = jnp.cumsum(units)
    return Schedule(ends.astype(jnp.int32), num_spans, built_for)


def made_for_call(
    score: Score, sizes: DecodeSizes, decode_query_len: int, list_block_size: int | None, kv_heads: int | None
) -> DecodeScheduleKey:
    """What the schedule of a call has to be made for."""
    if list_block_size is not None:
        return DecodeScheduleKey(sizes.unit, None, None, list_block_size, kv_heads)
    return DecodeScheduleKey(sizes.unit, score.mask, decode_query_len, None, None)


def schedule_for(
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
) -> Schedule:
    """The schedule that paged_decode makes for itself: make it once for all layers of a step.

    `max_kv`, the most keys that a request can have, spares thread blocks that could never have a unit.
    """
    rows = seq_lens.shape[0] if block_list is None else block_list.counts.size
    num_spans = sizes.num_spans(1 if block_list is not None else kv_heads, group * decode_query_len)
    if max_kv is not None:
        num_spans = min(num_spans, rows * -(-max_kv // (sizes.unit)))
    return make_schedule(
        seq_lens,
        score=score,
        sizes=sizes,
        decode_query_len=decode_query_len,
        num_spans=num_spans,
        block_list=block_list,
        list_block_size=list_block_size,
    )


def num_partials(reqs: int, max_kv: int, *, sizes: DecodeSizes, num_spans: int) -> int:
    """How many partial results there may be for each head."""
    if sizes.split_kv is None:
        return reqs + num_spans
    return reqs * (-(-max_kv // sizes.split_kv))
