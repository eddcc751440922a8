"""Adds up the partial results of the requests that more than one span of paged_decode met."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.refs import Outputs, Partials
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
MOST_THREAD_BLOCKS = 2 * NUM_SMS  # more of them take longer to start than they save


class MergeRefs(NamedTuple):
    """What the kernel reads, and the output and LSE that it writes in place.

    Attributes:
        partials: The decode kernel's, O^T as [partials, head_tiles, padded_dim, tile_q].
        unit_ends: [reqs]: the schedule's.
        sinks: [head_tiles, tile_q] or None.
        out: [reqs, head_tiles, rows, head_dim], or [..., chunks, chunk].
        lse: [reqs, head_tiles, tile_q].
    """

    partials: Partials
    unit_ends: Ref
    sinks: Ref
    out: Ref
    lse: Ref


class Candidate(NamedTuple):
    """The request that a thread block looks at; traced scalars.

    Attributes:
        row: Of the schedule.
        first: Its first partial result.
        num_partials: How many it has.
        is_mine: It has several, and no other thread block merges them.
    """

    row: Scalar
    first: Scalar
    num_partials: Scalar
    is_mine: Scalar


def merge_partials(
    outputs: Outputs, sinks: jax.Array | None, unit_ends: jax.Array, spec: DecodeSpec
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE of every request.

    Args:
        outputs: What decode_partials returned; output and LSE are written in place.
        sinks: One more score of each query, times log2(e): [head_tiles, tile_q] f32, or None.
        unit_ends: Of the schedule that the partial results were made by.
        spec: Static.
    """
    reqs, num_spans, cut = unit_ends.shape[0], spec.num_spans, spec.shape.cut
    # Only a request at the end of a span may be cut; where requests are fewer than spans, look at each.
    by_request = spec.sizes.split_kv is not None or reqs < num_spans
    candidates = reqs if by_request else num_spans
    share = share_of(spec, candidates=candidates, likely=num_spans // reqs + 2)
    kernel = plgpu.kernel(
        Merger(spec=spec, share=share, by_request=by_request).body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output; nothing writes it
        grid=(candidates, spec.shape.head_tiles, cut.padded_dim // share.columns),
        grid_names=("candidate", "head_tile", "strip"),
        # There is no shared memory that barriers could guard.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode_merge",
        interpret=spec.interpret,
    )
    whole = outputs.partials.out
    whole = whole.reshape(*whole.shape[:2], cut.padded_dim, spec.shape.tile_q)
    out_ref, lse_ref = jax.new_ref(outputs.out), jax.new_ref(outputs.lse)
    kernel(MergeRefs(outputs.partials._replace(out=whole), unit_ends, sinks, out_ref, lse_ref))
    return jax.freeze(out_ref), jax.freeze(lse_ref)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merger:
    """What a thread block does: a request's partial results, some columns of a head.

    Attributes:
        spec: Static.
        share: Sizes.
        by_request: A thread block for each request, not for each span's last.
    """

    spec: DecodeSpec
    share: CombineTile
    by_request: bool

    def body(self, refs: MergeRefs, unused_g: Ref) -> None:
        """The kernel."""
        nth, head_tile, strip = (lax.axis_index(name) for name in ("candidate", "head_tile", "strip"))
        candidate = self.candidate(refs.unit_ends, nth)

        @pl.when(candidate.is_mine)
        def merge() -> None:
            share, is_interpreted = self.share, self.spec.is_interpreted
            accs, top, total = self.summed(refs.partials, candidate, head_tile, strip)
            _, heads = self.spec.shape.request_of(candidate.row, head_tile)
            sink = (
                None
                if refs.sinks is None
                else load_per_query(refs.sinks.at[heads], tile=share, is_interpreted=is_interpreted)
            )
            factor, lse = finalize_softmax(top, total, sink)
            to = refs.out.at[candidate.row, head_tile], refs.lse.at[candidate.row, head_tile]
            accs = [acc * factor for acc in accs]
            store_combined(*to, accs, lse, strip, tile=share, is_interpreted=is_interpreted)

    def candidate(self, unit_ends: Ref, nth: Scalar) -> Candidate:
        """The `nth` request, or the one that lies across the end of span `nth`."""
        last, num_spans = unit_ends.shape[0] - 1, self.spec.num_spans
        if self.by_request:
            row, is_row, total = nth, True, unit_ends[last]
            start, end = jnp.where(row > 0, unit_ends[jnp.maximum(row - 1, 0)], 0), unit_ends[row]
        else:
            next_span = find_span_start(
                unit_ends, unit_ends, nth + 1, num_spans=num_spans, is_interpreted=self.spec.is_interpreted
            )
            row, is_row = jnp.minimum(next_span.row, last), next_span.row < last + 1
            start, end, total = next_span.start, next_span.end, next_span.total
        first, count, first_span = partials_of(row, start, end, span_units(total, num_spans), self.spec.sizes)
        is_mine = count > 1 if self.by_request else (count > 1) & (first_span == nth) & is_row
        return Candidate(row, first, count, is_mine)

    def summed(
        self, refs: Partials, candidate: Candidate, head_tile: Scalar, strip: Scalar
    ) -> tuple[list[Rows], Rows, Rows]:
        """Accumulators, largest score and sum of the exponentials of a request, each thread its own."""
        share, full = self.share, lambda x: plgpu.layout_cast(jnp.full((THREADS,), x, f32), BY_THREAD)

        def add(i: Scalar, carry: tuple[list[Rows], Rows, Rows]) -> tuple[list[Rows], Rows, Rows]:
            accs, top, total = carry
            done = i * share.splits_per_load
            # All loads of a round before any use.
            place = candidate.first + done, candidate.num_partials - done, head_tile, strip
            tops, totals, outs = load_split_outputs(
                tuple(refs), *place, tile=share, is_interpreted=self.spec.is_interpreted
            )
            new_top = functools.reduce(jnp.maximum, tops, top)
            finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            shrink = jnp.exp2(top - finite)
            accs, total = [acc * shrink for acc in accs], total * shrink
            for t, l, out in zip(tops, totals, outs, strict=True):
                weight = jnp.exp2(t - finite)
                accs = [acc + o * weight for acc, o in zip(accs, out, strict=True)]
                total = total + l * weight
            return accs, new_top, total

        rounds = lax.div(
            candidate.num_partials + (share.splits_per_load - 1), jnp.int32(share.splits_per_load)
        )
        return lax.fori_loop(
            0, rounds, add, ([full(0.0)] * share.columns_per_thread, full(-jnp.inf), full(0.0))
        )


def partials_of(
    row: Scalar, start: Scalar, end: Scalar, per_span: Scalar, sizes: DecodeSizes
) -> tuple[Scalar, Scalar, Scalar | int]:
    """First partial result of a request, how many it has, and its first span (0 where splits are fixed)."""
    if sizes.split_kv is not None:
        return start, end - start, 0
    first = lax.div(start, per_span)
    return row + first, lax.div(end - 1, per_span) - first + 1, first


def share_of(spec: DecodeSpec, *, candidates: int, likely: int) -> CombineTile:
    """What a thread block merges: little where few have work, so that they share its bytes.

    Args:
        spec: Static.
        candidates: Requests that may have partial results.
        likely: How many of them it has then.
    """
    shape, cut, n = spec.shape, spec.shape.cut, spec.shape.tile_q
    widths, most = [64], 16 * num_thread_groups(n)
    if not cut.is_padded:
        widths = [width for width in (32, 64, 128) if cut.padded_dim % width == 0 and width <= most]
    blocks = lambda width: candidates * shape.head_tiles * (cut.padded_dim // width)
    columns = next((width for width in widths if blocks(width) <= MOST_THREAD_BLOCKS), widths[-1])
    room = lambda width: max(128 // (width // num_thread_groups(n) + 2), 1)  # 128 registers
    # Where splits are fixed it does not depend on the batch, or a request's bits would.
    at_once = min(4, room(widths[-1])) if spec.sizes.split_kv else min(likely, room(columns))
    return CombineTile(
        tile_q=n,
        rows=shape.rows,
        head_chunks=cut,
        columns=columns,
        head_tiles=shape.head_tiles,
        splits_per_load=at_once,
    )
