"""The combine kernel: it merges the split outputs of the requests that lie in more than one span."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.sizes import DecodeSizes
from pallas_kernels.paged_decode.span import count_units_per_span, find_span_start
from pallas_kernels.paged_decode.spec import DecodeOutputs, DecodeSpec
from pallas_kernels.ptx.stores import store_transposed
from pallas_kernels.shared.layouts import COLUMN
from pallas_kernels.shared.memory import PANEL, store_unoptimized
from pallas_kernels.shared.softmax import SplitOutputs, add_splits, finalize_softmax
from pallas_kernels.shared.types import Ref, Scalar


class DecodeCombineRefs(NamedTuple):
    """Arrays that the kernel reads, and the output and log-sum-exp that it writes in place.

    Attributes:
        splits: Split outputs of the decode kernel.
        unit_ends: `DecodeSchedule.unit_ends`, [schedule_rows].
        sinks: Attention sinks times log2(e), [head_tiles, tile_q]; None without sinks.
        out: Output [schedule_rows, head_tiles, rows, head_dim], or [..., num_chunks, chunk_dim].
        lse: Log-sum-exp [schedule_rows, head_tiles, tile_q].
    """

    splits: SplitOutputs
    unit_ends: Ref
    sinks: Ref
    out: Ref
    lse: Ref


def combine_splits(
    outputs: DecodeOutputs, sinks: jax.Array | None, unit_ends: jax.Array, spec: DecodeSpec
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp of every request.

    Args:
        outputs: Outputs of the decode kernel; its output and log-sum-exp are completed in place.
        sinks: Attention sinks times log2(e), f32 [head_tiles, tile_q]; None without sinks.
        unit_ends: `DecodeSchedule.unit_ends` of the schedule that the decode kernel used.
        spec: Static description of the call.
    """
    # Only the request at the end of a span can be split. With fewer requests than spans, examine every
    # request.
    by_request = spec.sizes.split_kv is not None or unit_ends.shape[0] < spec.num_spans
    candidates = unit_ends.shape[0] if by_request else spec.num_spans
    kernel = plgpu.kernel(
        functools.partial(combine_body, spec=spec, by_request=by_request),
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output; nothing writes it
        grid=(candidates, spec.head_tiles, spec.shape.head.padded_dim // PANEL),
        grid_names=("candidate", "head_tile", "strip"),
        # There is no shared memory that barriers would have to guard.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode_combine",
        interpret=spec.interpret,
    )
    out_ref, lse_ref = jax.new_ref(outputs.out), jax.new_ref(outputs.lse)
    kernel(DecodeCombineRefs(outputs.splits, unit_ends, sinks, out_ref, lse_ref))
    return jax.freeze(out_ref), jax.freeze(lse_ref)


def combine_body(refs: DecodeCombineRefs, unused_g: Ref, *, spec: DecodeSpec, by_request: bool) -> None:
    """Combine one request for one panel of a head, if this thread block is the one to do it.

    Args:
        refs: Arrays.
        unused_g: Output that nothing writes.
        spec: Static description of the call.
        by_request: Whether there is a thread block for each request, instead of for the end of each span.
    """
    index, head_tile, strip = (
        lax.axis_index("candidate"),
        lax.axis_index("head_tile"),
        lax.axis_index("strip"),
    )
    unit_ends, last, num_spans = refs.unit_ends, refs.unit_ends.shape[0] - 1, spec.num_spans
    # The candidate: request `index`, or the request that lies across the end of span `index`.
    if by_request:
        row, total_units = index, unit_ends[last]
        start, end = jnp.where(row > 0, unit_ends[jnp.maximum(row - 1, 0)], 0), unit_ends[row]
    else:
        next_span = find_span_start(unit_ends, index + 1, num_spans=num_spans)
        row, total_units = jnp.minimum(next_span.row, last), next_span.total_units
        start, end = next_span.row_start, next_span.row_end
    units_per_span = count_units_per_span(total_units, num_spans)
    first, count, first_span = row_splits(row, start, end, units_per_span, spec.sizes)
    is_owned = count > 1
    if not by_request:  # the thread block of the request's first span combines it
        is_owned = is_owned & (first_span == index) & (next_span.row < last + 1)

    @pl.when(is_owned)
    def _() -> None:
        head, columns = spec.shape.head, pl.ds(pl.multiple_of(strip * PANEL, PANEL), PANEL)
        # Chunks of a padded head are as wide as strips.
        part = (strip,) if head.is_padded else (0, columns)
        acc, row_max, row_sum = add_splits(
            refs.splits, first, count, head_tile, queries=(), strip=part, axis=1
        )
        # The sink joins here, once per request, and not in each split.
        sink = None
        if refs.sinks is not None:
            _, request_head_tile = spec.shape.row_request(row, head_tile)
            sink = plgpu.load(refs.sinks.at[request_head_tile], layout=COLUMN, optimized=False)
        factor, lse = finalize_softmax(row_max, row_sum, sink)
        pl.when(strip == 0)(functools.partial(store_unoptimized, refs.lse.at[row, head_tile], lse))
        out = refs.out.at[(row, head_tile, slice(None), strip if head.is_padded else columns)]
        acc = acc * lax.broadcast_in_dim(factor, acc.shape, [1])
        store_transposed(out, acc, is_interpreted=spec.is_interpreted)


def row_splits(
    row: Scalar, start: Scalar, end: Scalar, units_per_span: Scalar, sizes: DecodeSizes
) -> tuple[Scalar, Scalar, Scalar | int]:
    """Return the index of a row's first split output, its number of split outputs, and its first span.

    Args:
        row: Schedule row.
        start: Index of the row's first unit.
        end: One past the index of the row's last unit.
        units_per_span: Number of units per span.
        sizes: Sizes of the kernel. With fixed splits, the first span is returned as 0.
    """
    if sizes.split_kv is not None:
        return start, end - start, 0
    first = lax.div(start, units_per_span)
    return row + first, lax.div(end - 1, units_per_span) - first + 1, first
