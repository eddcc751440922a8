"""The loop of a thread block over its span: the requests in the span, and the KV tiles of each.

The **segment** of a request is the part of the request that lies in one span. Spans and segments are counted
in units; `schedule` defines both. The keys of a tile have consecutive positions, or are runs that a request's
list of sparse blocks selects.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.shared import tile_rows
from pallas_kernels.shared.layouts import ROW, WGMMA
from pallas_kernels.shared.types import Ref, Rows, Scalar, Tile

NO_KEY = 1 << 30  # a key position beyond the end of every request
SEARCH_WAYS = 16  # number of rows that one step of the k-ary search compares


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
        is_nonempty: Whether the segment has units.
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
    is_nonempty: Scalar
    is_complete: Scalar
    num_listed: Scalar | None


class SpanStart(NamedTuple):
    """Start of a span and the schedule row that contains it, as traced scalars.

    Attributes:
        total_units: Number of units of all spans together.
        units_per_span: Number of units of each span.
        unit: First unit of this span; may lie beyond the last unit.
        row: Row of the schedule that contains `unit`; the number of rows if none does.
        next_row: Row that contains the first unit of the next span; the number of rows if none does.
        row_start: First unit of `row`; 0 for the first row.
        row_end: One past the last unit of `row`.
    """

    total_units: Scalar
    units_per_span: Scalar
    unit: Scalar
    row: Scalar
    next_row: Scalar
    row_start: Scalar
    row_end: Scalar


def count_units_per_span(total_units: Scalar, num_spans: int) -> Scalar:
    """Return the number of units of a span, at least 1."""
    return jnp.maximum(lax.div(total_units + (num_spans - 1), jnp.int32(num_spans)), 1)


def find_span_start(ends_g: Ref, span_index: Scalar, *, num_spans: int) -> SpanStart:
    """Return where a span begins, by comparing SEARCH_WAYS rows of the schedule per step.

    Args:
        ends_g: One past the last unit of each row of the schedule, int32 [schedule_rows].
        span_index: Index of the span, 0 to `num_spans`.
        num_spans: Number of spans of the schedule.
    """
    rows = ends_g.shape[0]
    total_units = ends_g[rows - 1]
    units_per_span = count_units_per_span(total_units, num_spans)

    def count_rows_before(unit: Scalar) -> Scalar:
        first_row, size = span_index * 0, rows  # the row is one of [first_row, first_row + size]
        while size:
            step = -(-size // SEARCH_WAYS)
            last_rows = [first_row + (i * step - 1) for i in range(1, -(-size // step) + 1)]
            are_before = [(row < rows) & (ends_g[jnp.minimum(row, rows - 1)] <= unit) for row in last_rows]
            num_before: Scalar | int = 0
            for is_before in are_before:
                num_before = num_before + is_before.astype(jnp.int32)
            first_row = first_row + step * num_before
            size = step - 1
        return first_row

    unit = span_index * units_per_span
    row = count_rows_before(unit)
    row_start = jnp.where(row > 0, ends_g[jnp.maximum(row - 1, 0)], 0)
    row_end = ends_g[jnp.minimum(row, rows - 1)]
    next_row = count_rows_before(unit + units_per_span)
    return SpanStart(total_units, units_per_span, unit, row, next_row, row_start, row_end)


class ScheduleRow(NamedTuple):
    """A row of the schedule, with the values that a thread block reads for it.

    Attributes:
        number: Index of the row.
        start: Index of the row's first unit, counted over all rows.
        end: One past the index of the row's last unit.
        seq_len: Number of keys of the request.
        num_listed: Length of the row's list; None without lists.
    """

    number: Scalar
    start: Scalar
    end: Scalar
    seq_len: Scalar
    num_listed: Scalar | None


class SpanCursor(NamedTuple):
    """Position of a loop over a span.

    Attributes:
        unit: Index of the next unit, counted over all schedule rows.
        row: Schedule row of this unit.
        step: Number of KV tiles of the span before this unit.
        segment_index: Number of non-empty segments of the span before this unit; selects the query buffer.
    """

    unit: Scalar
    row: ScheduleRow
    step: Scalar
    segment_index: Scalar


class SpanLoop(NamedTuple):
    """The loop over the segments of a span; see `Span.loop`.

    Attributes:
        num_segments: Number of iterations.
        first: Position of the first iteration.
        stop: One past the last unit of the span.
    """

    num_segments: Scalar
    first: SpanCursor
    stop: Scalar


@dataclasses.dataclass(frozen=True)
class Span:
    """The span of a thread block, for one tile of query rows.

    The loader and the consumer loop over the same segments in the same order, so they need no messages::

        def visit(_, cursor):
            # Read one row ahead, so that the latency passes during the segment.
            next_row = span.read_row(cursor.row.number + 1, start=cursor.row.end)
            segment = span.segment(cursor, loop.stop)
            ...
            return span.advance(cursor, segment, next_row)

        loop = span.loop()
        jax.lax.fori_loop(0, loop.num_segments, visit, loop.first)

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

    def loop(self) -> SpanLoop:
        """Return the loop over the segments; its length is known, since a warp has no while loop."""
        last_row, zero = self.unit_ends.shape[0] - 1, self.index * 0
        begin = find_span_start(self.unit_ends, self.index, num_spans=self.spec.num_spans)
        stop = jnp.minimum(begin.unit + begin.units_per_span, begin.total_units)
        row = self.read_row(begin.row, begin.row_start)
        num_segments = jnp.minimum(begin.next_row, last_row) - row.number + 1
        if self.spec.sizes.split_kv is not None:
            num_segments = num_segments + jnp.maximum(stop - begin.unit, 0)
        return SpanLoop(num_segments, SpanCursor(begin.unit, row, step=zero, segment_index=zero), stop)

    def read_row(self, number: Scalar, start: Scalar) -> ScheduleRow:
        """Read a row of the schedule, or the last row if there is no such row.

        Args:
            number: Index of the row.
            start: Index of the row's first unit.
        """
        number = jnp.minimum(number, self.unit_ends.shape[0] - 1)
        num_listed = None if self.counts is None else self.counts[number]
        end, (request, _) = self.unit_ends[number], self.spec.shape.row_request(number, self.head_tile)
        return ScheduleRow(number, start, end, self.seq_lens[request], num_listed)

    def advance(self, cursor: SpanCursor, segment: Segment, next_row: ScheduleRow) -> SpanCursor:
        """Return the position after a segment; the row changes only if the span goes beyond its end."""
        step = cursor.step + jnp.where(segment.is_nonempty, segment.num_tiles, 0)
        segment_index = cursor.segment_index + segment.is_nonempty.astype(jnp.int32)
        unit = cursor.unit + segment.num_units
        advances = (unit >= cursor.row.end) & (next_row.number > cursor.row.number)
        row = jax.tree.map(functools.partial(jnp.where, advances), next_row, cursor.row)
        return SpanCursor(unit, row, step, segment_index)

    def segment(self, cursor: SpanCursor, stop: Scalar) -> Segment:
        """Return the part of the cursor's row from the cursor's unit up to unit `stop`."""
        shape, score, sizes = self.spec.shape, self.spec.score, self.spec.sizes
        (row, start, end, seq_len, num_listed), unit = cursor.row, cursor.unit
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
            is_nonempty=units > 0,
            is_complete=is_complete,
            num_listed=num_listed,
        )


@dataclasses.dataclass(frozen=True)
class TileKeys:
    """Positions of a tile's keys in their request, as runs of consecutive positions or as a list.

    Attributes:
        run_starts: Position of the first key of each run, in ascending order; of listed keys, the first and
            the last position.
        head_bits: One number per run, whose bit g says whether query head g of the group visits the run.
            Empty if all query heads visit all runs.
        run_length: Static number of keys per run.
        load_listed: Function that loads the position of each row's key, if keys are listed one by one; else
            None.
    """

    run_starts: tuple[Scalar, ...]
    head_bits: tuple[Scalar, ...]
    run_length: int
    load_listed: Callable[[], Rows] | None = None

    def row_positions(self, rows: Tile) -> Tile:
        """Return the key position of each of the given rows of the tile."""
        if self.load_listed is not None:
            return lax.broadcast_in_dim(self.load_listed(), rows.shape, [0])
        return rows + tile_rows.run_offsets(rows, self.run_starts, self.run_length)

    def tile_positions(self, shape: tuple[int, ...]) -> Tile:
        """Return the key position of each element of a tile [keys, ...], in the WGMMA layout."""
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        return self.row_positions(rows)

    def row_head_bits(self, rows: Tile) -> Tile:
        """Return, for each of the given rows of the tile, the head bits of its run."""
        return tile_rows.select_run(rows, self.head_bits, self.run_length)

    def positions(self, num_keys: int) -> Rows:
        """Return the key position of each row of the tile."""
        if self.load_listed is not None:
            return self.load_listed()
        return self.row_positions(plgpu.broadcasted_iota(jnp.int32, (num_keys,), 0, layout=ROW))

    def where_visible(self, x: Tile, segment: Segment, fill: float) -> Tile:
        """Return `x`, which has one row per key, with `fill` in the rows of keys that no query attends to."""
        return tile_rows.where_visible(
            x, self.tile_positions(x.shape), segment.first_key, segment.end_key, fill
        )

    def has_masked_out(self, segment: Segment) -> Scalar:
        """Return whether the tile has keys that no query of the request attends to."""
        return self.has_key_outside(segment.first_key, segment.end_key)

    def has_key_outside(self, first_key: Scalar, end_key: Scalar) -> Scalar:
        """Return whether any key position of the tile is outside of [first_key, end_key)."""
        return (self.run_starts[0] < first_key) | (self.run_starts[-1] + self.run_length > end_key)


def read_entries(
    segment: Segment, tile_index: Scalar | int, ids: Ref, spec: DecodeSpec
) -> tuple[Scalar, ...]:
    """Return the list entries of a tile or, without lists, the position of the tile's first key.

    Lists are in global memory. Callers read the entries at least one tile before they call `get_tile_keys`,
    which hides the latency of the loads.

    Args:
        segment: Segment of the tile.
        tile_index: Index of the tile in the segment; may exceed the number of tiles.
        ids: Lists of sparse blocks, [reqs * kv_heads, max_listed]; unused without lists.
        spec: Static description of the call.
    """
    if segment.num_listed is None:
        return ((segment.first_tile + tile_index) * spec.sizes.tile_kv,)
    last = jnp.maximum(segment.num_listed - 1, 0)
    if spec.shape.list_block_size == 1:
        first = (segment.first_tile + tile_index) * spec.sizes.tile_kv
        ends = first, first + (spec.sizes.tile_kv - 1)
        return tuple(ids[segment.row, jnp.minimum(index, last)] for index in ends)
    positions, _ = _list_positions(segment, tile_index, spec)
    return tuple(ids[segment.row, jnp.minimum(position, last)] for position in positions)


def get_tile_keys(
    segment: Segment, tile_index: Scalar, entries: tuple[Scalar, ...], ids: Ref, spec: DecodeSpec
) -> TileKeys:
    """Return the key positions of a tile of a segment.

    Args:
        segment: Segment of the tile.
        tile_index: Index of the tile in the segment.
        entries: Result of `read_entries` for the tile.
        ids: Lists of sparse blocks, as in `read_entries`.
        spec: Static description of the call.
    """
    shape, num_listed = spec.shape, segment.num_listed
    if num_listed is None:
        return TileKeys(entries, (), spec.run_length)
    if shape.list_block_size == 1:
        first, size = (segment.first_tile + tile_index) * spec.sizes.tile_kv, spec.sizes.tile_kv
        layout = ROW

        def load_listed() -> Rows:
            position = plgpu.load(ids.at[segment.row, pl.ds(first, size)], layout=layout, optimized=False)
            index = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) + first
            return jnp.where(index < num_listed, position, NO_KEY)

        last = jnp.where(first + size <= num_listed, entries[1], NO_KEY)
        return TileKeys((entries[0], last), (), 1, load_listed)
    positions, offset = _list_positions(segment, tile_index, spec)
    run_starts, head_bits = [], []
    for position, entry in zip(positions, entries, strict=True):
        if shape.lists_have_head_bits:
            head_bits.append(lax.shift_right_logical(entry, jnp.int32(QUERY_BLOCK_SHIFT)))
            entry = entry & ((1 << QUERY_BLOCK_SHIFT) - 1)
        is_valid = position < num_listed
        run_starts.append(jnp.where(is_valid, entry * (shape.list_block_size or 0) + offset, NO_KEY))
    return TileKeys(tuple(run_starts), tuple(head_bits), spec.run_length)


def _list_positions(
    segment: Segment, tile_index: Scalar | int, spec: DecodeSpec
) -> tuple[list[Scalar], Scalar]:
    """Return the indices in the list of a tile's sparse blocks, and the offset of the tile in each block."""
    size, tile_kv, run_length = spec.shape.list_block_size, spec.sizes.tile_kv, spec.run_length
    assert size is not None
    tile = segment.first_tile + tile_index
    tiles_per_block, blocks_per_tile = max(size // tile_kv, 1), tile_kv // run_length
    block = lax.div(tile, jnp.int32(tiles_per_block))
    offset = lax.rem(tile, jnp.int32(tiles_per_block)) * run_length
    return [block * blocks_per_tile + i for i in range(blocks_per_tile)], offset
