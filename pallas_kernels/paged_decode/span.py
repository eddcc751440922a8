"""A thread block's way over its span of the schedule: the requests in it, and what of each."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.ptx.span_search import SpanStart, find_span_start
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
    num_units: Scalar
    is_whole: Scalar  # nothing of it is in another span
    num_listed: Scalar | None  # sparse blocks of its list

    @property
    def is_live(self) -> Scalar:
        """Something of the request is in this span."""
        return self.num_units > 0


class ScheduleRow(NamedTuple):
    """What is read of a row of the schedule: its last unit's end, its keys, its list's length (or None)."""

    end: Scalar
    seq_len: Scalar
    num_listed: Scalar | None


class Position(NamedTuple):
    """How far a walk has come.

    Attributes:
        unit: The next unit.
        row: Of the schedule, that it lies in.
        start: The row's first unit.
        current: What was read of the row.
        step: Tiles so far.
        nth: Live segments so far.
    """

    unit: Scalar
    row: Scalar
    start: Scalar
    current: ScheduleRow
    step: Scalar
    nth: Scalar


@dataclasses.dataclass(frozen=True)
class Span:
    """A thread block's share of the schedule, for one tile of query rows.

    Attributes:
        number: Its number.
        head_tile: Tile of query rows of each row of the schedule.
        seq_lens: [reqs] in global memory.
        unit_ends: [rows] likewise: the schedule's.
        counts: [rows] likewise: lengths of lists, or None.
        spec: Static.
    """

    number: Scalar
    head_tile: Scalar
    seq_lens: Ref
    unit_ends: Ref
    counts: Ref
    spec: DecodeSpec

    def walk(self, visit: Callable[[Segment, Scalar, Scalar], None]) -> tuple[Scalar, Scalar]:
        """Calls `visit(segment, step, nth)` for each request; how many tiles and live segments there were.

        Loader and consumer walk alike, so that neither has to tell the other what comes next: a segment's
        first tile is `step` of the span, and it is the `nth` segment if it is live.
        """
        last_row = self.unit_ends.shape[0] - 1
        begin = self._begin()
        stop = jnp.minimum(begin.unit + begin.span, begin.total)
        zero = self.number * 0

        def visit_row(_: Scalar, at: Position) -> Position:
            following_row = jnp.minimum(at.row + 1, last_row)
            following = self._read(following_row)  # a request ahead: its latency passes during the visit
            segment = self.segment(at, stop)
            visit(segment, at.step, at.nth)
            step = at.step + jnp.where(segment.is_live, segment.num_tiles, 0)
            nth = at.nth + segment.is_live.astype(jnp.int32)
            unit = at.unit + segment.num_units
            goes_on = (unit >= at.current.end) & (following_row > at.row)
            pick = lambda new, old: jnp.where(goes_on, new, old)
            ahead = jax.tree.map(pick, following, at.current)
            row, start = pick(following_row, at.row), pick(at.current.end, at.start)
            return Position(unit, row, start, ahead, step, nth)

        first_row = jnp.minimum(begin.row, last_row)
        visits = jnp.minimum(begin.next_row, last_row) - first_row + 1  # known ahead: warps have no while
        if self.spec.sizes.split_kv is not None:
            visits = visits + jnp.maximum(stop - begin.unit, 0)
        first = ScheduleRow(begin.end, begin.value, None)
        if self.counts is not None:
            request, _ = self.spec.shape.request_of(first_row, self.head_tile)
            first = ScheduleRow(begin.end, self.seq_lens[request], begin.value)
        at = Position(begin.unit, first_row, begin.start, first, step=zero, nth=zero)
        at = lax.fori_loop(0, visits, visit_row, at)
        return at.step, at.nth

    def _begin(self) -> SpanStart:
        of_rows = self.seq_lens if self.counts is None else self.counts
        num_spans, is_interpreted = self.spec.num_spans, self.spec.is_interpreted
        return find_span_start(
            self.unit_ends, of_rows, self.number, num_spans=num_spans, is_interpreted=is_interpreted
        )

    def _read(self, row: Scalar) -> ScheduleRow:
        num_listed = None if self.counts is None else self.counts[row]
        end, (request, _) = self.unit_ends[row], self.spec.shape.request_of(row, self.head_tile)
        return ScheduleRow(end, self.seq_lens[request], num_listed)

    def segment(self, at: Position, stop: Scalar) -> Segment:
        """What of a row of the schedule lies in the units from where a walk stands to `stop`."""
        shape, score, sizes = self.spec.shape, self.spec.score, self.spec.sizes
        (end, seq_len, num_listed), row, unit, start = at.current, at.row, at.unit, at.start
        tiles_per_unit = sizes.unit // sizes.tile_kv
        request, heads = shape.request_of(row, self.head_tile)
        low, high = score.request_key_range(seq_len, shape.query_len)
        left = jnp.maximum(jnp.minimum(end, stop) - unit, 0)
        units = left if sizes.split_kv is None else jnp.minimum(left, 1)
        low_tile = lax.div(low, jnp.int32(sizes.tile_kv)) if num_listed is None else self.number * 0
        end_key = high if num_listed is None else num_listed * (shape.list_block_size or 0)
        high_tile = lax.div(end_key + (sizes.tile_kv - 1), jnp.int32(sizes.tile_kv))
        first_unit = lax.div(low_tile, jnp.int32(tiles_per_unit)) + (unit - start)
        first = jnp.maximum(first_unit * tiles_per_unit, low_tile)
        last = jnp.minimum((first_unit + units) * tiles_per_unit, high_tile)
        partial = row + self.number if sizes.split_kv is None else unit
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
