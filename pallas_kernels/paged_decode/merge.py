"""Adds up the partial results of the requests that more than one span of paged_decode met."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.schedule import Schedule, span_units
from pallas_kernels.paged_decode.step import normalized
from pallas_kernels.paged_decode.tiles import Tiles
from pallas_kernels.paged_decode.walk import Shape
from pallas_kernels.shared.dequant import swizzled_smem
from pallas_kernels.shared.store import store_unoptimized
from pallas_kernels.shared.tma import padded_slice

W = plgpu.Layout.WGMMA
f32 = jnp.float32
PART = 64  # elements of head_dim that a thread block merges


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
    at_once = _loads_at_once(reqs, slots, n, tiles)
    # Only a request at the end of a span may be cut; where requests are fewer than spans, look at each.
    by_request = tiles.split_kv is not None or reqs < slots
    candidates = reqs if by_request else slots

    def body(  # type: ignore[no-untyped-def]
        o_g,  # [partials, head_tiles, padded_dim, tile_q]
        top_g,  # [partials, head_tiles, tile_q]
        total_g,
        spans_g,  # [reqs + slots + 1]: the schedule's table
        sinks_g,  # [head_tiles, tile_q] or None
        out_g,  # [reqs, head_tiles, rows, head_dim]
        lse_g,  # [reqs, head_tiles, tile_q]
        unused_g,
        out_s,  # [tile_q, PART] in SMEM
    ):
        ends_g, first_g = schedule.views(spans_g)
        nth, head_tile, part = (lax.axis_index(name) for name in ("candidate", "head_tile", "part"))
        row = nth if by_request else jnp.minimum(first_g[nth + 1], reqs - 1)
        first, count, first_span = _partials_of(row, ends_g, slots, tiles)
        is_mine = count > 1 if by_request else (count > 1) & (first_span == nth)
        vector = lambda ref: plgpu.load(ref, layout=W.reduce(0), optimized=False)
        column = lambda x: lax.broadcast_in_dim(x, (PART, n), [1])
        full = lambda value: plgpu.layout_cast(jnp.full((n,), value, f32), W.reduce(0))

        def add(i: Any, carry: Any) -> Any:
            acc, top, total = carry
            # All loads of a round before any use. Rounds end in copies of the last partial, which count 0.
            nth = [i * at_once + j for j in range(at_once)]
            index = [first + jnp.minimum(j, count - 1) for j in nth]
            tops = [vector(top_g.at[p, head_tile]) for p in index]
            totals = [vector(total_g.at[p, head_tile]) for p in index]
            rows = pl.ds(part * PART, PART)
            outs = [plgpu.load(o_g.at[p, head_tile, rows], layout=W, optimized=False) for p in index]
            tops = [t + jnp.where(j < count, 0.0, -jnp.inf) for j, t in zip(nth, tops, strict=True)]
            new_top = top
            for t in tops:
                new_top = jnp.maximum(new_top, t)
            finite = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            shrink = jnp.exp2(top - finite)
            acc, total = acc * column(shrink), total * shrink
            for t, l, o in zip(tops, totals, outs, strict=True):
                weight = jnp.exp2(t - finite)
                acc, total = acc + o * column(weight), total + l * weight
            return acc, new_top, total

        @pl.when(is_mine)
        def merge() -> None:
            zeros = plgpu.layout_cast(jnp.zeros((PART, n), f32), W)
            rounds = lax.div(count + (at_once - 1), jnp.int32(at_once))
            acc, top, total = lax.fori_loop(0, rounds, add, (zeros, full(-jnp.inf), full(0.0)))
            _, heads = shape.request_of(row, head_tile)
            sink = None if sinks_g is None else vector(sinks_g.at[heads])
            factor, natural_lse = normalized(top, total, sink)

            @pl.when(part == 0)
            def store_lse() -> None:
                store_unoptimized(lse_g.at[row, head_tile], natural_lse)

            acc = (acc * column(factor)).astype(out_s.dtype)
            out_s.T[...] = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            # TMA drops the rows past the last and the columns past the end of a chunk.
            rows = padded_slice(n, shape.rows, row * 0)
            to = out_g.at[row, head_tile, rows, pl.ds(pl.multiple_of(part * PART, PART), PART)]
            if cut.is_padded:
                to = out_g.at[row, head_tile, rows, part, padded_slice(PART, cut.chunk, row * 0)]
            plgpu.copy_smem_to_gmem(out_s, to)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output; nothing writes it
        scratch_types=[swizzled_smem((n, PART), out.dtype)],
        grid=(candidates, shape.head_tiles, cut.padded_dim // PART),
        grid_names=("candidate", "head_tile", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_merge",
        interpret=interpret,
    )
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(o.reshape(*o.shape[:2], cut.padded_dim, n), top, total, schedule.table, sinks, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)


def _partials_of(row: Any, ends_g: Any, slots: int, tiles: Tiles) -> tuple[Any, Any, Any]:
    """First partial result of a request, how many it has, and its first span (0 where splits are fixed)."""
    end = ends_g[row]
    start = jnp.where(row > 0, ends_g[jnp.maximum(row - 1, 0)], 0)
    if tiles.split_kv is not None:
        return start, end - start, 0
    per_span = span_units(ends_g[ends_g.shape[0] - 1], slots)
    first = lax.div(start, per_span)
    return row + first, lax.div(end - 1, per_span) - first + 1, first


def _loads_at_once(reqs: int, slots: int, tile_q: int, tiles: Tiles) -> int:
    """Partial results loaded together: as many as a request is likely to have, and registers to hold them.

    Where splits are fixed it does not depend on the batch, or its bits would.
    """
    likely = 4 if tiles.split_kv else slots // reqs + 2
    room = max(128 // tile_q, 1)  # 64 registers
    return max(min(1 << (likely - 1).bit_length(), room, 16), 1)
