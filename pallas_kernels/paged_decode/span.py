"""The walk of a thread block over its span: the requests that lie in it, and which tiles of each.

A span is the contiguous range of KV tokens of the batch that one thread block processes; see `schedule`. The
**segment** of a request is the part of the request that lies in one span.
"""

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
    """The part of a request that lies in one span; traced scalars.

    Attributes:
        row: Row of the schedule, of the queries and of the results.
        request: Row of the block table.
        request_head_tile: Tile of query rows in the request.
        kv_head: KV head.
        seq_len: Keys of the request.
        low: First key that some query of the request attends to.
        high: One past the last.
        first_tile: First tile of the segment, counted from the request's key 0, or in its list.
        num_tiles: Tiles of the segment.
        split_index: Index of the segment's split output.
        num_units: Units of the segment.
        is_complete: Whether no other span has a part of the request.
        num_listed: Sparse blocks in the request's list; None without lists.
    """

    row: Scalar
    request: Scalar
    request_head_tile: Scalar
    kv_head: Scalar
    seq_len: Scalar
    low: Scalar
    high: Scalar
    first_tile: Scalar
    num_tiles: Scalar
    split_index: Scalar
    num_units: Scalar
    is_complete: Scalar
    num_listed: Scalar | None

    @property
    def is_nonempty(self) -> Scalar:
        """Return whether a part of the request lies in this span."""
        return self.num_units > 0


class ScheduleRow(NamedTuple):
    """The values that a thread block reads for a row of the schedule.

    Attributes:
        end: One past the row's last unit.
        seq_len: Keys of the request.
        num_listed: Length of the row's list; None without lists.
    """

    end: Scalar
    seq_len: Scalar
    num_listed: Scalar | None


class SpanCursor(NamedTuple):
    """State of a walk over a span.

    Attributes:
        unit: Next unit.
        row: Row of the schedule that the unit lies in.
        start: First unit of the row.
        current: Values that were read for the row.
        step: Tiles walked over so far.
        segment_index: Non-empty segments walked over so far.
    """

    unit: Scalar
    row: Scalar
    start: Scalar
    current: ScheduleRow
    step: Scalar
    segment_index: Scalar


@dataclasses.dataclass(frozen=True)
class Span:
    """The span of a thread block, for one tile of query rows.

    Attributes:
        index: Index of the span.
        head_tile: Tile of query rows of each row of the schedule.
        seq_lens: Keys of each request, [reqs] in global memory.
        unit_ends: Schedule, [rows] in global memory.
        counts: Lengths of the lists, [rows] in global memory; None without lists.
        spec: Static description of the call.
    """

    index: Scalar
    head_tile: Scalar
    seq_lens: Ref
    unit_ends: Ref
    counts: Ref
    spec: DecodeSpec

    def walk(self, visit: Callable[[Segment, Scalar, Scalar], None]) -> tuple[Scalar, Scalar]:
        """Call `visit` for each segment, and return the numbers of tiles and of non-empty segments.

        Loader and consumer walk alike, so neither has to tell the other what comes next.

        Args:
            visit: Function of the segment, the index of its first tile in the span, and its index among the
                non-empty segments.
        """
        last_row = self.unit_ends.shape[0] - 1
        begin = self._begin()
        stop = jnp.minimum(begin.unit + begin.span, begin.total)
        zero = self.index * 0

        def visit_row(_: Scalar, cursor: SpanCursor) -> SpanCursor:
            # Read the next row now, one row ahead, so that the latency passes during the visit.
            next_row = jnp.minimum(cursor.row + 1, last_row)
            next_read = self._read(next_row)
            segment = self.segment(cursor, stop)
            visit(segment, cursor.step, cursor.segment_index)
            # Advance to the next row only if the span goes beyond the end of this one.
            step = cursor.step + jnp.where(segment.is_nonempty, segment.num_tiles, 0)
            segment_index = cursor.segment_index + segment.is_nonempty.astype(jnp.int32)
            unit = cursor.unit + segment.num_units
            advances = (unit >= cursor.current.end) & (next_row > cursor.row)

            def select(new: Scalar, old: Scalar) -> Scalar:
                return jnp.where(advances, new, old)

            current = jax.tree.map(select, next_read, cursor.current)
            row, start = select(next_row, cursor.row), select(cursor.current.end, cursor.start)
            return SpanCursor(unit, row, start, current, step, segment_index)

        # The number of visits is computed ahead, because a warp of the loader cannot run a while loop.
        first_row = jnp.minimum(begin.row, last_row)
        visits = jnp.minimum(begin.next_row, last_row) - first_row + 1
        if self.spec.sizes.split_kv is not None:
            visits = visits + jnp.maximum(stop - begin.unit, 0)
        first = ScheduleRow(begin.end, begin.value, None)
        if self.counts is not None:
            request, _ = self.spec.shape.request_of(first_row, self.head_tile)
            first = ScheduleRow(begin.end, self.seq_lens[request], begin.value)
        cursor = SpanCursor(begin.unit, first_row, begin.start, first, step=zero, segment_index=zero)
        cursor = lax.fori_loop(0, visits, visit_row, cursor)
        return cursor.step, cursor.segment_index

    def _begin(self) -> SpanStart:
        row_values = self.seq_lens if self.counts is None else self.counts
        num_spans, is_interpreted = self.spec.num_spans, self.spec.is_interpreted
        return find_span_start(
            self.unit_ends, row_values, self.index, num_spans=num_spans, is_interpreted=is_interpreted
        )

    def _read(self, row: Scalar) -> ScheduleRow:
        num_listed = None if self.counts is None else self.counts[row]
        end, (request, _) = self.unit_ends[row], self.spec.shape.request_of(row, self.head_tile)
        return ScheduleRow(end, self.seq_lens[request], num_listed)

    def segment(self, cursor: SpanCursor, stop: Scalar) -> Segment:
        """Return the part of the cursor's row that lies between the cursor and unit `stop`."""
        shape, score, sizes = self.spec.shape, self.spec.score, self.spec.sizes
        (end, seq_len, num_listed), row, unit, start = cursor.current, cursor.row, cursor.unit, cursor.start
        tiles_per_unit = sizes.unit // sizes.tile_kv
        request, request_head_tile = shape.request_of(row, self.head_tile)
        low, high = score.request_key_range(seq_len, shape.query_len)
        # Units of the row in this span; with fixed splits a segment is one split.
        remaining = jnp.maximum(jnp.minimum(end, stop) - unit, 0)
        units = remaining if sizes.split_kv is None else jnp.minimum(remaining, 1)
        # Tiles of these units, without those that no query attends to.
        low_tile = lax.div(low, jnp.int32(sizes.tile_kv)) if num_listed is None else self.index * 0
        end_key = high if num_listed is None else num_listed * (shape.list_block_size or 0)
        high_tile = lax.div(end_key + (sizes.tile_kv - 1), jnp.int32(sizes.tile_kv))
        first_unit = lax.div(low_tile, jnp.int32(tiles_per_unit)) + (unit - start)
        first = jnp.maximum(first_unit * tiles_per_unit, low_tile)
        last = jnp.minimum((first_unit + units) * tiles_per_unit, high_tile)
        split_index = row + self.index if sizes.split_kv is None else unit
        num_tiles = jnp.where(high > low, last - first, 0)
        is_complete = units == end - start
        return Segment(
            row=row,
            request=request,
            request_head_tile=request_head_tile,
            kv_head=lax.div(request_head_tile, jnp.int32(shape.row_tiles)),
            seq_len=seq_len,
            low=low,
            high=high,
            first_tile=first,
            num_tiles=num_tiles,
            split_index=split_index,
            num_units=units,
            is_complete=is_complete,
            num_listed=num_listed,
        )
