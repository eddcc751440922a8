"""Adds up the partial results of the requests that more than one span of paged_decode met."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.merge_code import (
    BY_THREAD,
    THREADS,
    Share,
    groups_of,
    of_queries,
    partials,
    store,
)
from pallas_kernels.paged_decode.schedule import Schedule, span_units
from pallas_kernels.paged_decode.span_start import span_start
from pallas_kernels.paged_decode.tiles import NUM_SMS, Tiles
from pallas_kernels.paged_decode.walk import Shape
from pallas_kernels.shared.softmax import normalized

f32 = jnp.float32
MOST_THREAD_BLOCKS = 2 * NUM_SMS  # more of them take longer to start than they save


def merge_partials(
    results: tuple[Any, ...],
    sinks: Any,
    schedule: Schedule,
    *,
    shape: Shape,
    tiles: Tiles,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE of every request.

    Args:
        results: What decode_partials returned; output and LSE are written in place.
        sinks: One more score of each query, times log2(e): [head_tiles, tile_q] f32, or None.
        schedule: The one that the partial results were made by.
        shape: The call's static sizes.
        tiles: The kernel's static sizes.
        interpret: Interpret-mode parameters, or None for a GPU.
    """
    out, lse, o, top, total = results
    reqs, slots, n, cut = lse.shape[0], schedule.slots, shape.tile_q, shape.cut
    # Only a request at the end of a span may be cut; where requests are fewer than spans, look at each.
    by_request = tiles.split_kv is not None or reqs < slots
    candidates = reqs if by_request else slots
    share = _share(shape, candidates, slots // reqs + 2, tiles)
    how: Any = {"share": share, "is_interpreted": bool(interpret)}

    def body(  # type: ignore[no-untyped-def]
        o_g,  # [partials, head_tiles, padded_dim, tile_q]
        top_g,  # [partials, head_tiles, tile_q]
        total_g,
        ends_g,  # [reqs]: the schedule's unit_ends
        sinks_g,  # [head_tiles, tile_q] or None
        out_g,  # [reqs, head_tiles, rows, head_dim]
        lse_g,  # [reqs, head_tiles, tile_q]
        unused_g,
    ):
        nth, head_tile, part = (lax.axis_index(name) for name in ("candidate", "head_tile", "part"))
        if by_request:
            row, is_row, total_units = nth, True, ends_g[reqs - 1]
            start, end = jnp.where(row > 0, ends_g[jnp.maximum(row - 1, 0)], 0), ends_g[row]
        else:
            next_span = span_start(ends_g, ends_g, nth + 1, slots=slots, is_interpreted=bool(interpret))
            row, is_row = jnp.minimum(next_span.row, reqs - 1), next_span.row < reqs
            start, end, total_units = next_span.start, next_span.end, next_span.total
        first, count, first_span = _partials_of(row, start, end, span_units(total_units, slots), tiles)
        is_mine = count > 1 if by_request else (count > 1) & (first_span == nth) & is_row
        full = lambda value: plgpu.layout_cast(jnp.full((THREADS,), value, f32), BY_THREAD)

        def add(i: Any, carry: Any) -> Any:
            accs, top, total = carry
            done = i * share.at_once
            # All loads of a round before any use.
            tops, totals, outs = partials(
                (o_g, top_g, total_g), first + done, count - done, head_tile, part, **how
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

        @pl.when(is_mine)
        def merge() -> None:
            rounds = lax.div(count + (share.at_once - 1), jnp.int32(share.at_once))
            start = [full(0.0)] * share.each, full(-jnp.inf), full(0.0)
            accs, top, total = lax.fori_loop(0, rounds, add, start)
            _, heads = shape.request_of(row, head_tile)
            sink = None if sinks_g is None else of_queries(sinks_g.at[heads], **how)
            factor, natural_lse = normalized(top, total, sink)
            to = out_g.at[row, head_tile], lse_g.at[row, head_tile]
            store(*to, [acc * factor for acc in accs], natural_lse, part, **how)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output; nothing writes it
        grid=(candidates, shape.head_tiles, cut.padded_dim // share.columns),
        grid_names=("candidate", "head_tile", "part"),
        # There is no shared memory that barriers could guard.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode_merge",
        interpret=interpret,
    )
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(
        o.reshape(*o.shape[:2], cut.padded_dim, n), top, total, schedule.unit_ends, sinks, out_ref, lse_ref
    )
    return jax.freeze(out_ref), jax.freeze(lse_ref)


def _partials_of(row: Any, start: Any, end: Any, per_span: Any, tiles: Tiles) -> tuple[Any, Any, Any]:
    """First partial result of a request, how many it has, and its first span (0 where splits are fixed)."""
    if tiles.split_kv is not None:
        return start, end - start, 0
    first = lax.div(start, per_span)
    return row + first, lax.div(end - 1, per_span) - first + 1, first


def _share(shape: Shape, candidates: int, likely: int, tiles: Tiles) -> Share:
    """What a thread block merges: little where few have work, so that they share its bytes.

    Args:
        shape: The call's static sizes.
        candidates: Requests that may have partial results.
        likely: How many of them it has then.
        tiles: The kernel's static sizes.
    """
    cut, n = shape.cut, shape.tile_q
    widths, most = [64], 16 * groups_of(n)
    if not cut.is_padded:
        widths = [width for width in (32, 64, 128) if cut.padded_dim % width == 0 and width <= most]
    blocks = lambda width: candidates * shape.head_tiles * (cut.padded_dim // width)
    columns = next((width for width in widths if blocks(width) <= MOST_THREAD_BLOCKS), widths[-1])
    room = lambda width: max(128 // (width // groups_of(n) + 2), 1)  # 128 registers
    # Where splits are fixed it does not depend on the batch, or a request's bits would.
    at_once = min(4, room(widths[-1])) if tiles.split_kv else min(likely, room(columns))
    return Share(
        tile_q=n, rows=shape.rows, cut=cut, columns=columns, head_tiles=shape.head_tiles, at_once=at_once
    )
