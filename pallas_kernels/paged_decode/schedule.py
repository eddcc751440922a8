"""Who computes what: the keys of all requests laid end to end and cut into equal spans, one a thread block.

A span may begin and end inside a request, so all thread blocks finish together however skewed the batch is,
and no request is cut more often than that takes. Every (request, span) that meet leave one partial result;
along the line of keys request + span grows with each such meeting, so that sum numbers them without a table.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from pallas_kernels.paged_decode.tiles import Tiles
from pallas_kernels.shared.score import Score


class BlockList(NamedTuple):
    """The sparse blocks that each request's kv heads visit; the group's query heads share them.

    Attributes:
        ids: Ascending; block i is keys `i * list_block_size` onward. What is past the end is harmless.
        counts: How many of the ids are live; the others are never used.
    """

    ids: Int32[Array, "reqs kv_heads max_listed"]
    counts: Int32[Array, "reqs kv_heads"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["reqs"])
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Work in units: `tile_kv` keys, or `split_kv` where splits are fixed. Shared by layers of one mask.

    Attributes:
        table: `unit_ends`, then `first_rows`: one array, so that one small kernel makes it.
        reqs: Requests.
    """

    table: Int32[Array, " reqs_and_starts"]
    reqs: int

    @property
    def unit_ends(self) -> Int32[Array, " reqs"]:
        """One past each request's last unit, when the requests' units are laid end to end."""
        return self.table[: self.reqs]

    @property
    def first_rows(self) -> Int32[Array, " starts"]:
        """The request in which each span begins, and one more span would; `reqs` past the end."""
        return self.table[self.reqs :]

    @property
    def slots(self) -> int:
        """Number of spans."""
        return self.table.shape[0] - self.reqs - 1

    def views(self, table_g: Any) -> tuple[Any, Any]:
        """`unit_ends` and `first_rows` in a kernel's reference to the table."""
        return table_g.at[pl.ds(0, self.reqs)], table_g.at[pl.ds(self.reqs, self.slots + 1)]


# Requests whose units are added up one by one, in one kernel of 0.9 us; of more XLA makes two.
ADDED_ONE_BY_ONE = 6


def make_schedule(
    seq_lens: Int32[Array, " reqs"],
    *,
    score: Score,
    tiles: Tiles,
    decode_query_len: int,
    slots: int,
    block_list: BlockList | None = None,
    list_block_size: int | None = None,
) -> Schedule:
    """Cuts a step's keys into `slots` equal spans. Traced: made once a step, on the device.

    With lists, "a request" of the schedule is a request's kv head.
    """
    unit = tiles.split_kv or tiles.tile_kv

    def units(low: Any, high: Any) -> Any:
        """A request that sees nothing has a unit too: whoever meets it writes its zeros."""
        units = lax.div(high + (unit - 1), jnp.full_like(high, unit)) - lax.div(low, jnp.full_like(low, unit))
        return jnp.maximum(units, 1)

    unlisted_units = lambda seq_lens: units(*score.row_range(seq_lens, decode_query_len))
    reqs = seq_lens.shape[0] if block_list is None else block_list.counts.size
    at = jnp.arange(reqs + slots + 1, dtype=jnp.int32)

    def entries(row: Any, end: Any, total: Any, at: Any) -> Any:
        """What a request adds to each entry of the table; no span starts below 0."""
        start = (at - reqs) * span_units(total, slots)
        return jnp.where(at == row, end, (end <= start).astype(jnp.int32))

    if reqs <= ADDED_ONE_BY_ONE and block_list is None:
        *_, total = ends_of = tuple(itertools.accumulate(unlisted_units(seq_lens[r]) for r in range(reqs)))
        parts = [entries(row, end, total, at) for row, end in enumerate(ends_of)]
        return Schedule(functools.reduce(jnp.add, parts), reqs)
    if block_list is None:
        per_row = unlisted_units(seq_lens)
    else:
        assert list_block_size is not None
        low, high = score.row_range(seq_lens, decode_query_len)
        listed = block_list.counts.reshape(-1) * list_block_size
        high = jnp.where(jnp.repeat(high > low, block_list.counts.shape[1]), listed, 0)
        per_row = units(jnp.zeros_like(high), high)
    rows = jnp.arange(reqs, dtype=jnp.int32)
    # Sums over a mask, not cumsum and searchsorted: XLA makes one small kernel of each.
    ends = jnp.where(rows[None, :] <= rows[:, None], per_row[None, :], 0).sum(axis=1)
    table = entries(rows[None, :], ends[None, :], ends[-1], at[:, None]).sum(axis=1)
    return Schedule(table.astype(jnp.int32), reqs)


def span_units(total: Array, slots: int) -> Array:
    """Units of a span; at least 1."""
    return jnp.maximum(lax.div(total + (slots - 1), jnp.int32(slots)), 1)


def num_partials(reqs: int, max_kv: int, *, tiles: Tiles, slots: int) -> int:
    """How many partial results there may be for each head."""
    if tiles.split_kv is None:
        return reqs + slots
    return reqs * (-(-max_kv // tiles.split_kv))
