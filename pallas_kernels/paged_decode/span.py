"""The loop of a thread block over its span: the requests in the span, and the KV tiles of each.

A **span** is the contiguous range of KV tokens of the batch that one thread block processes. The **segment**
of a request is the part of the request that lies in one span. Spans and segments are counted in **units**: a
unit is one KV tile or, with fixed splits, one split. See `schedule`.
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
    """The part of a request that lies in one span. All fields are traced scalars.

    Attributes:
        row: Schedule row: index in the schedule, the queries and the results.
        request: Index of the request in the block table.
        request_head_tile: Index of the tile of query rows among all tiles of the request.
        kv_head: Index of the KV head.
        seq_len: Number of keys of the request.
        first_key: Position of the first key that any query of the request attends to.
        end_key: One past the position of the last key that any query of the request attends to.
        first_tile: Index of the segment's first KV tile: without lists, counted from position 0 of the
            request; with lists, counted along the list.
        num_tiles: Number of KV tiles of the segment.
        split_index: Index of the split output that the segment writes if it is not complete.
        num_units: Number of units of the segment; 0 if no part of the request lies in the span.
        is_complete: Whether the segment is the whole request.
        num_listed: Number of sparse blocks in the request's list; None without lists.
    """

    row: Scalar
    request: Scalar
    request_head_tile: Scalar
    kv_head: Scalar
    seq_len: Scalar
    first_key: Scalar
    end_key: Scalar
    first_tile: Scalar
    num_tiles: Scalar
    split_index: Scalar
    num_units: Scalar
    is_complete: Scalar
    num_listed: Scalar | None

    @property
    def is_nonempty(self) -> Scalar:
        """Whether a part of the request lies in this span."""
        return self.num_units > 0


class ScheduleRow(NamedTuple):
    """The values that a thread block reads for a row of the schedule.

    Attributes:
        end: One past the index of the row's last unit, counted over all rows.
        seq_len: Number of keys of the request.
        num_listed: Length of the row's list; None without lists.
    """

    end: Scalar
    seq_len: Scalar
    num_listed: Scalar | None


class SpanCursor(NamedTuple):
    """Position of the loop over a span.

    Attributes:
        unit: Index of the next unit, counted over all schedule rows.
        row: Schedule row of this unit.
        start: Index of the first unit of the row.
        current: Values of the row.
        step: Number of KV tiles visited so far.
        segment_index: Number of non-empty segments visited so far.
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
        head_tile: Index of the tile of query rows within each schedule row.
        seq_lens: Number of keys of each request, [reqs] in global memory.
        unit_ends: `DecodeSchedule.unit_ends`, [rows] in global memory.
        counts: Length of each row's list, [rows] in global memory; None without lists.
        spec: Static description of the call.
    """

    index: Scalar
    head_tile: Scalar
    seq_lens: Ref
    unit_ends: Ref
    counts: Ref
    spec: DecodeSpec

    def walk(self, visit: Callable[[Segment, Scalar, Scalar], None]) -> tuple[Scalar, Scalar]:
        """Call `visit` for each segment, and return the number of tiles and of non-empty segments.

        The loader and the consumer visit the same segments in the same order, so they need no messages.

        Args:
            visit: Function of (segment, number of tiles of the span before the segment, number of non-empty
                segments of the span before the segment).
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
            request, _ = self.spec.shape.row_request(first_row, self.head_tile)
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
        end, (request, _) = self.unit_ends[row], self.spec.shape.row_request(row, self.head_tile)
        return ScheduleRow(end, self.seq_lens[request], num_listed)

    def segment(self, cursor: SpanCursor, stop: Scalar) -> Segment:
        """Return the part of the cursor's row from the cursor's unit up to unit `stop`."""
        shape, score, sizes = self.spec.shape, self.spec.score, self.spec.sizes
        (end, seq_len, num_listed), row, unit, start = cursor.current, cursor.row, cursor.unit, cursor.start
        tiles_per_unit = sizes.keys_per_unit // sizes.tile_kv
        request, request_head_tile = shape.row_request(row, self.head_tile)
        first_key, end_key = score.request_key_range(seq_len, shape.query_len)
        # Units of the row in this span; with fixed splits a segment is one split.
        remaining = jnp.maximum(jnp.minimum(end, stop) - unit, 0)
        units = remaining if sizes.split_kv is None else jnp.minimum(remaining, 1)
        # Tiles of these units, without those that no query attends to.
        first_visible_tile = (
            lax.div(first_key, jnp.int32(sizes.tile_kv)) if num_listed is None else self.index * 0
        )
        end_position = end_key if num_listed is None else num_listed * (shape.list_block_size or 0)
        end_visible_tile = lax.div(end_position + (sizes.tile_kv - 1), jnp.int32(sizes.tile_kv))
        first_unit = lax.div(first_visible_tile, jnp.int32(tiles_per_unit)) + (unit - start)
        first = jnp.maximum(first_unit * tiles_per_unit, first_visible_tile)
        last = jnp.minimum((first_unit + units) * tiles_per_unit, end_visible_tile)
        split_index = row + self.index if sizes.split_kv is None else unit
        num_tiles = jnp.where(end_key > first_key, last - first, 0)
        is_complete = units == end - start
        return Segment(
            row=row,
            request=request,
            request_head_tile=request_head_tile,
            kv_head=lax.div(request_head_tile, jnp.int32(shape.row_tiles)),
            seq_len=seq_len,
            first_key=first_key,
            end_key=end_key,
            first_tile=first,
            num_tiles=num_tiles,
            split_index=split_index,
            num_units=units,
            is_complete=is_complete,
            num_listed=num_listed,
        )
