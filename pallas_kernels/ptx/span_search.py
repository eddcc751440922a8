"""Where a span of the schedule begins: the request, found by each warp for itself.

All requests' ends are loaded at once, a few by each lane, and compared: one round trip to memory, where a
table of first requests would be one more, and a second kernel to make it.
"""

import functools
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

MAX_ROWS_PER_WARP = 512  # rows; of more a lane would hold too many
WAYS = 16  # rows looked at together where they are narrowed down
BEYOND = 2**31 - 1


class SpanStart(NamedTuple):
    """Traced scalars."""

    total: Scalar  # units of all spans
    span: Scalar  # units of each
    unit: Scalar  # the span's first; may be past the last of all
    row: Scalar  # the row of the schedule that it lies in; the number of rows if in none, and so next_row
    next_row: Scalar  # that of the next span
    start: Scalar  # the row's first unit, or 0
    end: Scalar  # one past its last
    value: Scalar  # the row's of `values_g`


def span_units(total: Scalar, num_spans: int) -> Scalar:
    """Units of a span; at least 1."""
    return jnp.maximum(lax.div(total + (num_spans - 1), jnp.int32(num_spans)), 1)


def find_span_start(
    ends_g: Ref, values_g: Ref, number: Scalar, *, num_spans: int, is_interpreted: bool
) -> SpanStart:
    """Where span `number` begins.

    Args:
        ends_g: Schedule.unit_ends.
        values_g: [reqs] int32 from 0 up: something else of each row.
        number: The span's; may be `num_spans`.
        num_spans: Of the schedule.
        is_interpreted: Without lanes.
    """
    is_narrowed = is_interpreted or ends_g.shape[0] > MAX_ROWS_PER_WARP
    return search_by_warp(ends_g, values_g, number, num_spans=num_spans, is_interpreted=is_narrowed)


def search_k_ary(ends_g: Ref, values_g: Ref, number: Scalar, *, num_spans: int) -> SpanStart:
    """A few of all rows, then a few of those in between, and so on."""
    rows = ends_g.shape[0]
    total = ends_g[rows - 1]
    span = span_units(total, num_spans)

    def rows_before(unit: Scalar) -> Scalar:
        low, size = number * 0, rows  # the row is one of [low, low + size]
        while size:
            step = -(-size // WAYS)
            lasts = [low + (i * step - 1) for i in range(1, -(-size // step) + 1)]
            are_before = [(at < rows) & (ends_g[jnp.minimum(at, rows - 1)] <= unit) for at in lasts]
            low = low + step * sum(x.astype(jnp.int32) for x in are_before)
            size = step - 1
        return low

    unit = number * span
    row = rows_before(unit)
    start = jnp.where(row > 0, ends_g[jnp.maximum(row - 1, 0)], 0)
    at = jnp.minimum(row, rows - 1)
    return SpanStart(total, span, unit, row, rows_before(unit + span), start, ends_g[at], values_g[at])


@with_fallback(search_k_ary)
def search_by_warp(ends_g: Ref, values_g: Ref, number: Scalar, *, num_spans: int) -> SpanStart:
    """See span_start; for up to MAX_ROWS_PER_WARP rows."""
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, SCALAR)
    types = plgpu.RefType(), plgpu.RefType(), SCALAR
    run = plgpu.inline_mgpu(arg_types=types, return_type=(scalar,) * len(SpanStart._fields))
    return SpanStart(
        *run(functools.partial(_compared_at_once, num_spans=num_spans))(ends_g, values_g, number)
    )


def _compared_at_once(
    _ctx: mgpu.LaunchContext,
    ends_g: ir.Value,
    values_g: ir.Value,
    number: mgpu.FragmentedArray,
    *,
    num_spans: int,
) -> tuple[mgpu.FragmentedArray, ...]:
    """The same by the lanes of a warp."""
    rows = ir.MemRefType(ends_g.type).shape[0]
    lane, _ = lanes.lane_and_warp()
    # The last lanes load the last row once more.
    at = [arith.minsi(lanes.add(lane, first), lanes.const(rows - 1)) for first in range(0, rows, 32)]
    ends, values = ([lanes.loaded(ref, row) for row in at] for ref in (ends_g, values_g))
    total = lanes.shuffled(ends[-1], "idx", lanes.const(31))
    span = arith.divui(lanes.add(total, num_spans - 1), lanes.const(num_spans))
    span = arith.maxsi(span, lanes.const(1))
    unit = arith.muli(fragments.scalar(number), span)

    compared = lambda how, a, b: arith.cmpi(getattr(arith.CmpIPredicate, how), a, b)
    pick = lambda where, x, other: arith.select(where, x, lanes.const(other))
    most = functools.partial(functools.reduce, arith.maxsi)

    def rows_before(unit: ir.Value) -> ir.Value:
        """One past the last row that ends before a unit."""
        before = [
            pick(compared("sle", end, unit), lanes.add(row, 1), 0) for row, end in zip(at, ends, strict=True)
        ]
        return lanes.reduced(most(before), "max")

    start = lanes.reduced(most([pick(compared("sle", x, unit), x, 0) for x in ends]), "max")
    after = [pick(compared("sgt", x, unit), x, BEYOND) for x in ends]
    end = lanes.reduced(functools.reduce(arith.minsi, after), "min")
    found = [pick(compared("eq", x, end), value, 0) for x, value in zip(ends, values, strict=True)]
    value = lanes.reduced(most(found), "max")
    results = total, span, unit, rows_before(unit), rows_before(lanes.add(unit, span)), start, end, value
    return tuple(map(fragments.as_scalar, results))
