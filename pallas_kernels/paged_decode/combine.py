"""The combine kernel: it merges the split outputs of the requests that lie in more than one span."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.refs import DecodeOutputs, DecodeSplitOutputs
from pallas_kernels.paged_decode.sizes import DecodeSizes
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.ptx.layouts import BY_THREAD, THREADS
from pallas_kernels.ptx.span_search import find_span_start, span_units
from pallas_kernels.ptx.split_outputs import (
    CombineTile,
    load_per_query,
    load_split_outputs,
    num_thread_groups,
    store_combined,
)
from pallas_kernels.shared.softmax import finalize_softmax
from pallas_kernels.shared.types import Ref, Rows, Scalar
from pallas_kernels.support import NUM_SMS

f32 = jnp.float32
MAX_CTAS = 2 * NUM_SMS  # more thread blocks take longer to start than they save


class DecodeCombineRefs(NamedTuple):
    """Arrays that the kernel reads, and the output and log-sum-exp that it writes in place.

    Attributes:
        splits: Split outputs of the decode kernel, with O^T as [splits, head_tiles, padded_dim, tile_q].
        unit_ends: `DecodeSchedule.unit_ends`, [reqs].
        sinks: Attention sinks times log2(e), [head_tiles, tile_q]; None without sinks.
        out: Output [reqs, head_tiles, rows, head_dim], or [..., num_chunks, chunk_dim].
        lse: Log-sum-exp [reqs, head_tiles, tile_q].
    """

    splits: DecodeSplitOutputs
    unit_ends: Ref
    sinks: Ref
    out: Ref
    lse: Ref


class CombineCandidate(NamedTuple):
    """The request that a thread block examines. All fields are traced scalars.

    Attributes:
        row: Schedule row of the request.
        first: Index of the request's first split output.
        num_splits: Number of split outputs of the request.
        is_owned: Whether this thread block combines the request: it has several split outputs, and no other
            thread block combines them.
    """

    row: Scalar
    first: Scalar
    num_splits: Scalar
    is_owned: Scalar


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
    reqs, num_spans, head = unit_ends.shape[0], spec.num_spans, spec.shape.head
    # Only the request at the end of a span can be split. With fewer requests than spans, examine every
    # request.
    by_request = spec.sizes.split_kv is not None or reqs < num_spans
    candidates = reqs if by_request else num_spans
    tile = combine_tile(spec, candidates=candidates, expected_splits=num_spans // reqs + 2)
    kernel = plgpu.kernel(
        DecodeCombiner(spec=spec, tile=tile, by_request=by_request).body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output; nothing writes it
        grid=(candidates, spec.shape.head_tiles, head.padded_dim // tile.columns),
        grid_names=("candidate", "head_tile", "strip"),
        # There is no shared memory that barriers would have to guard.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode_combine",
        interpret=spec.interpret,
    )
    split_out = outputs.splits.out
    split_out = split_out.reshape(*split_out.shape[:2], head.padded_dim, spec.shape.tile_q)
    out_ref, lse_ref = jax.new_ref(outputs.out), jax.new_ref(outputs.lse)
    splits = outputs.splits._replace(out=split_out)
    kernel(DecodeCombineRefs(splits, unit_ends, sinks, out_ref, lse_ref))
    return jax.freeze(out_ref), jax.freeze(lse_ref)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCombiner:
    """Kernel body that combines the split outputs of a request, for some columns of a head.

    Attributes:
        spec: Static description of the call.
        tile: Static sizes.
        by_request: Whether there is a thread block for each request, instead of for the end of each span.
    """

    spec: DecodeSpec
    tile: CombineTile
    by_request: bool

    def body(self, refs: DecodeCombineRefs, unused_g: Ref) -> None:
        """Combine one request; this is the kernel body."""
        index, head_tile, strip = (lax.axis_index(name) for name in ("candidate", "head_tile", "strip"))
        candidate = self.candidate(refs.unit_ends, index)

        @pl.when(candidate.is_owned)
        def combine() -> None:
            tile, is_interpreted = self.tile, self.spec.is_interpreted
            accs, row_max, row_sum = self.sum_splits(refs.splits, candidate, head_tile, strip)
            # The sink joins here, once per request, and not in each split.
            _, request_head_tile = self.spec.shape.row_request(candidate.row, head_tile)
            sink = None
            if refs.sinks is not None:
                sink_ref = refs.sinks.at[request_head_tile]
                sink = load_per_query(sink_ref, tile=tile, is_interpreted=is_interpreted)
            factor, lse = finalize_softmax(row_max, row_sum, sink)
            out, lse_ref = refs.out.at[candidate.row, head_tile], refs.lse.at[candidate.row, head_tile]
            accs = [acc * factor for acc in accs]
            store_combined(out, lse_ref, accs, lse, strip, tile=tile, is_interpreted=is_interpreted)

    def candidate(self, unit_ends: Ref, index: Scalar) -> CombineCandidate:
        """Return request `index`, or the request that lies across the end of span `index`."""
        last, num_spans = unit_ends.shape[0] - 1, self.spec.num_spans
        if self.by_request:
            row, is_row, total = index, True, unit_ends[last]
            start, end = jnp.where(row > 0, unit_ends[jnp.maximum(row - 1, 0)], 0), unit_ends[row]
        else:
            next_span = find_span_start(
                unit_ends, unit_ends, index + 1, num_spans=num_spans, is_interpreted=self.spec.is_interpreted
            )
            row, is_row = jnp.minimum(next_span.row, last), next_span.row < last + 1
            start, end, total = next_span.start, next_span.end, next_span.total
        first, count, first_span = row_splits(row, start, end, span_units(total, num_spans), self.spec.sizes)
        is_owned = count > 1 if self.by_request else (count > 1) & (first_span == index) & is_row
        return CombineCandidate(row, first, count, is_owned)

    def sum_splits(
        self, refs: DecodeSplitOutputs, candidate: CombineCandidate, head_tile: Scalar, strip: Scalar
    ) -> tuple[list[Rows], Rows, Rows]:
        """Return the accumulators, the maximum and the sum of exponentials of each thread's query."""
        tile = self.tile

        def full(value: float) -> Rows:
            return plgpu.layout_cast(jnp.full((THREADS,), value, f32), BY_THREAD)

        def add(i: Scalar, carry: tuple[list[Rows], Rows, Rows]) -> tuple[list[Rows], Rows, Rows]:
            accs, row_max, row_sum = carry
            done = i * tile.splits_per_load
            # Issue all loads of a round before any use, so that their latencies overlap.
            indices = candidate.first + done, candidate.num_splits - done, head_tile, strip
            split_maxs, split_sums, split_outs = load_split_outputs(
                tuple(refs), *indices, tile=tile, is_interpreted=self.spec.is_interpreted
            )
            new_max = functools.reduce(jnp.maximum, split_maxs, row_max)
            finite_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)
            alpha = jnp.exp2(row_max - finite_max)
            accs, row_sum = [acc * alpha for acc in accs], row_sum * alpha
            for split_max, split_sum, split_out in zip(split_maxs, split_sums, split_outs, strict=True):
                split_alpha = jnp.exp2(split_max - finite_max)
                accs = [acc + out * split_alpha for acc, out in zip(accs, split_out, strict=True)]
                row_sum = row_sum + split_sum * split_alpha
            return accs, new_max, row_sum

        rounds = lax.div(candidate.num_splits + (tile.splits_per_load - 1), jnp.int32(tile.splits_per_load))
        return lax.fori_loop(
            0, rounds, add, ([full(0.0)] * tile.columns_per_thread, full(-jnp.inf), full(0.0))
        )


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


def combine_tile(spec: DecodeSpec, *, candidates: int, expected_splits: int) -> CombineTile:
    """Return the sizes of a thread block.

    If few requests are split, a thread block takes fewer columns, so that more thread blocks load the data.

    Args:
        spec: Static description of the call.
        candidates: Maximum number of requests with several split outputs.
        expected_splits: Expected number of split outputs of such a request.
    """
    shape, head, tile_q = spec.shape, spec.shape.head, spec.shape.tile_q
    groups = num_thread_groups(tile_q)
    widths, max_width = [64], 16 * groups
    if not head.is_padded:
        widths = [width for width in (32, 64, 128) if head.padded_dim % width == 0 and width <= max_width]

    def num_ctas(width: int) -> int:
        return candidates * shape.head_tiles * (head.padded_dim // width)

    def max_splits_per_load(width: int) -> int:
        return max(128 // (width // groups + 2), 1)  # loads that fit 128 registers

    columns = next((width for width in widths if num_ctas(width) <= MAX_CTAS), widths[-1])
    # With fixed splits this must not depend on the batch, or the bits of a request's result would.
    splits_per_load = min(4, max_splits_per_load(widths[-1]))
    if not spec.sizes.split_kv:
        splits_per_load = min(expected_splits, max_splits_per_load(columns))
    return CombineTile(
        tile_q=tile_q,
        rows=shape.rows,
        head_chunks=head,
        columns=columns,
        head_tiles=shape.head_tiles,
        splits_per_load=splits_per_load,
    )
