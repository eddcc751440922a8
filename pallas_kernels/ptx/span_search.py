"""Finds the schedule row in which a span of the decode schedule begins, by a search that each warp performs.

The warp loads the ends of all schedule rows at once, a few per lane, and compares them: one round trip to
memory. A table of the first row of each span would need another round trip, and a second kernel to build it.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import SCALAR
from pallas_kernels.shared.types import Ref, Scalar

MAX_ROWS_PER_WARP = 512  # with more schedule rows, a lane would hold too many of them
SEARCH_WAYS = 16  # number of rows that one step of the k-ary search compares
INT32_MAX = 2**31 - 1


class SpanStart(NamedTuple):
    """Unit and schedule row in which a span begins.

    Attributes:
        total: Number of units of all spans together.
        span: Number of units of each span.
        unit: First unit of this span; may lie beyond the last unit.
        row: Row of the schedule that contains `unit`; the number of rows if none does.
        next_row: Row that contains the first unit of the next span; the number of rows if none does.
        start: First unit of `row`; 0 for the first row.
        end: One past the last unit of `row`.
        value: Element of `values_g` of `row`.
    """

    total: Scalar
    span: Scalar
    unit: Scalar
    row: Scalar
    next_row: Scalar
    start: Scalar
    end: Scalar
    value: Scalar


def span_units(total: Scalar, num_spans: int) -> Scalar:
    """Return the number of units of a span; 1 if there are fewer units than spans."""
    return jnp.maximum(lax.div(total + (num_spans - 1), jnp.int32(num_spans)), 1)


def find_span_start(
    ends_g: Ref, values_g: Ref, span_index: Scalar, *, num_spans: int, is_interpreted: bool
) -> SpanStart:
    """Return the unit and the schedule row in which a span begins.

    Args:
        ends_g: One past the last unit of each row of the schedule, int32 [reqs].
        values_g: A value of each row, int32 [reqs], not negative.
        span_index: Index of the span, 0 to `num_spans`.
        num_spans: Number of spans of the schedule.
        is_interpreted: Whether the kernel runs in interpret mode.
    """
    uses_fallback = is_interpreted or ends_g.shape[0] > MAX_ROWS_PER_WARP
    return search_by_warp(ends_g, values_g, span_index, num_spans=num_spans, is_interpreted=uses_fallback)


def search_k_ary(ends_g: Ref, values_g: Ref, span_index: Scalar, *, num_spans: int) -> SpanStart:
    """Implement `find_span_start` by comparing SEARCH_WAYS schedule rows per step."""
    rows = ends_g.shape[0]
    total = ends_g[rows - 1]
    span = span_units(total, num_spans)

    def count_rows_before(unit: Scalar) -> Scalar:
        first_row, size = span_index * 0, rows  # the row is one of [first_row, first_row + size]
        while size:
            step = -(-size // SEARCH_WAYS)
            last_rows = [first_row + (i * step - 1) for i in range(1, -(-size // step) + 1)]
            are_before = [(row < rows) & (ends_g[jnp.minimum(row, rows - 1)] <= unit) for row in last_rows]
            first_row = first_row + step * sum(x.astype(jnp.int32) for x in are_before)
            size = step - 1
        return first_row

    unit = span_index * span
    row = count_rows_before(unit)
    start = jnp.where(row > 0, ends_g[jnp.maximum(row - 1, 0)], 0)
    clipped = jnp.minimum(row, rows - 1)
    next_row = count_rows_before(unit + span)
    return SpanStart(total, span, unit, row, next_row, start, ends_g[clipped], values_g[clipped])


@with_fallback(search_k_ary)
def search_by_warp(ends_g: Ref, values_g: Ref, span_index: Scalar, *, num_spans: int) -> SpanStart:
    """Implement `find_span_start` for up to MAX_ROWS_PER_WARP schedule rows."""
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, SCALAR)
    types = plgpu.RefType(), plgpu.RefType(), SCALAR
    run = plgpu.inline_mgpu(arg_types=types, return_type=(scalar,) * len(SpanStart._fields))
    return SpanStart(
        *run(functools.partial(_search_by_lanes, num_spans=num_spans))(ends_g, values_g, span_index)
    )


def _search_by_lanes(
    _ctx: mgpu.LaunchContext,
    ends_g: ir.Value,
    values_g: ir.Value,
    span_index: mgpu.FragmentedArray,
    *,
    num_spans: int,
) -> tuple[mgpu.FragmentedArray, ...]:
    num_schedule_rows = ir.MemRefType(ends_g.type).shape[0]
    lane, _ = lanes.lane_and_warp()
    # Load all rows at once: lane i has rows i, i + 32, ...; lanes past the end load the last row again.
    rows = [
        arith.minsi(lanes.add(lane, first), lanes.const(num_schedule_rows - 1))
        for first in range(0, num_schedule_rows, 32)
    ]
    ends, values = ([lanes.load(ref, row) for row in rows] for ref in (ends_g, values_g))
    # Lane 31 has the last row's end, the total number of units.
    total = lanes.shuffle(ends[-1], "idx", lanes.const(31))
    span = arith.divui(lanes.add(total, num_spans - 1), lanes.const(num_spans))
    span = arith.maxsi(span, lanes.const(1))
    unit = arith.muli(fragments.scalar(span_index), span)

    def compare(predicate: str, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.cmpi(getattr(arith.CmpIPredicate, predicate), a, b)

    def select(condition: ir.Value, x: ir.Value, otherwise: int) -> ir.Value:
        return arith.select(condition, x, lanes.const(otherwise))

    def maximum(terms: Sequence[ir.Value]) -> ir.Value:
        return functools.reduce(arith.maxsi, terms)

    def count_rows_before(unit: ir.Value) -> ir.Value:
        """Return the number of schedule rows that end before a unit."""
        before = [
            select(compare("sle", end, unit), lanes.add(row, 1), 0)
            for row, end in zip(rows, ends, strict=True)
        ]
        return lanes.warp_reduce(maximum(before), "max")

    # The row starts at the largest end that is not beyond the unit, and ends at the smallest end beyond it.
    start = lanes.warp_reduce(maximum([select(compare("sle", x, unit), x, 0) for x in ends]), "max")
    after = [select(compare("sgt", x, unit), x, INT32_MAX) for x in ends]
    end = lanes.warp_reduce(functools.reduce(arith.minsi, after), "min")
    # Ends differ between rows, so the row's end identifies its value.
    row_values = [select(compare("eq", x, end), value, 0) for x, value in zip(ends, values, strict=True)]
    value = lanes.warp_reduce(maximum(row_values), "max")
    row, next_row = count_rows_before(unit), count_rows_before(lanes.add(unit, span))
    return tuple(map(fragments.as_scalar, (total, span, unit, row, next_row, start, end, value)))
