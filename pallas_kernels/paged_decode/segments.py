"""A thread block's way over its span of the schedule: the requests in it, and what of each."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_decode.span_start import SpanStart, span_start
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.shared.types import Ref, Scalar


@dataclasses.dataclass(frozen=True)
class Segment:
    """The part of one span that lies in one request; traced scalars."""

    row: Scalar  # of the schedule, the queries and the results
    request: Scalar  # of the block table
    heads: Scalar  # tile of query rows in the request
    kv_head: Scalar
    seq_len: Scalar
    low: Scalar  # first key that some query sees
    high: Scalar  # one past the last
    first_tile: Scalar
    num_tiles: Scalar
    partial: Scalar  # where a partial result goes
    num_units: Scalar  # 0: nothing of the request is in this span
    is_whole: Scalar  # nothing of it is in another span
    num_listed: Scalar | None  # sparse blocks of its list


class ScheduleRow(NamedTuple):
    """What is read of a row of the schedule: its last unit's end, its keys, its list's length (or None)."""

    end: Scalar
    seq_len: Scalar
    num_listed: Scalar | None


@dataclasses.dataclass(frozen=True)
class Span:
    """A thread block's share of the schedule, for one tile of query rows.

    Attributes:
        slot: Its number.
        head_tile: Tile of query rows of each row of the schedule.
        seq_lens: [reqs] in global memory.
        unit_ends: [rows] likewise: the schedule's.
        counts: [rows] likewise: lengths of lists, or None.
        spec: Static.
    """

    slot: Scalar
    head_tile: Scalar
    seq_lens: Ref
    unit_ends: Ref
    counts: Ref
    spec: DecodeSpec

    def walk(self, visit: Callable[[Segment, Any], Any]) -> Any:
        """Calls `state = visit(segment, state)` for each request; `state` starts as two zeros.

        Loader and consumer walk alike, so that neither has to tell the other what comes next.
        """
        last_row = self.unit_ends.shape[0] - 1
        begin = self._begin()
        stop = jnp.minimum(begin.unit + begin.span, begin.total)
        zero = self.slot * 0

        def visit_row(_: Scalar, carry: Any) -> Any:
            unit, row, start, current, state = carry
            following_row = jnp.minimum(row + 1, last_row)
            following = self._read(following_row)  # a request ahead: its latency passes during the visit
            segment = self._segment(row, current, start=start, unit=unit, stop=stop)
            state = visit(segment, state)
            unit = unit + segment.num_units
            goes_on = (unit >= current.end) & (following_row > row)
            pick = lambda new, old: jnp.where(goes_on, new, old)
            ahead = jax.tree.map(pick, following, current)
            return unit, pick(following_row, row), pick(current.end, start), ahead, state

        first_row = jnp.minimum(begin.row, last_row)
        visits = jnp.minimum(begin.next_row, last_row) - first_row + 1  # known ahead: warps have no while
        if self.spec.tiles.split_kv is not None:
            visits = visits + jnp.maximum(stop - begin.unit, 0)
        first = ScheduleRow(begin.end, begin.value, None)
        if self.counts is not None:
            request, _ = self.spec.shape.request_of(first_row, self.head_tile)
            first = ScheduleRow(begin.end, self.seq_lens[request], begin.value)
        carry = begin.unit, first_row, begin.start, first, (zero, zero)
        return lax.fori_loop(0, visits, visit_row, carry)[-1]

    def _begin(self) -> SpanStart:
        of_rows = self.seq_lens if self.counts is None else self.counts
        slots, is_interpreted = self.spec.slots, self.spec.is_interpreted
        return span_start(self.unit_ends, of_rows, self.slot, slots=slots, is_interpreted=is_interpreted)

    def _read(self, row: Scalar) -> ScheduleRow:
        num_listed = None if self.counts is None else self.counts[row]
        end, (request, _) = self.unit_ends[row], self.spec.shape.request_of(row, self.head_tile)
        return ScheduleRow(end, self.seq_lens[request], num_listed)

    def _segment(
        self, row: Scalar, of_row: ScheduleRow, *, start: Scalar, unit: Scalar, stop: Scalar
    ) -> Segment:
        """What of a row of the schedule, whose units begin at `start`, lies in units [unit, stop)."""
        shape, score, tiles = self.spec.shape, self.spec.score, self.spec.tiles
        end, seq_len, num_listed = of_row
        tiles_per_unit = tiles.unit // tiles.tile_kv
        request, heads = shape.request_of(row, self.head_tile)
        low, high = score.row_range(seq_len, shape.query_len)
        left = jnp.maximum(jnp.minimum(end, stop) - unit, 0)
        units = left if tiles.split_kv is None else jnp.minimum(left, 1)
        low_tile = lax.div(low, jnp.int32(tiles.tile_kv)) if num_listed is None else self.slot * 0
        end_key = high if num_listed is None else num_listed * (shape.list_block_size or 0)
        high_tile = lax.div(end_key + (tiles.tile_kv - 1), jnp.int32(tiles.tile_kv))
        first_unit = lax.div(low_tile, jnp.int32(tiles_per_unit)) + (unit - start)
        first = jnp.maximum(first_unit * tiles_per_unit, low_tile)
        last = jnp.minimum((first_unit + units) * tiles_per_unit, high_tile)
        partial = row + self.slot if tiles.split_kv is None else unit
        num_tiles = jnp.where(high > low, last - first, 0)
        is_whole = units == end - start
        return Segment(
            row=row,
            request=request,
            heads=heads,
            kv_head=lax.div(heads, jnp.int32(shape.row_tiles)),
            seq_len=seq_len,
            low=low,
            high=high,
            first_tile=first,
            num_tiles=num_tiles,
            partial=partial,
            num_units=units,
            is_whole=is_whole,
            num_listed=num_listed,
        )
