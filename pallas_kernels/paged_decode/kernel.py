"""The decode kernel: S^T = K Q^T, softmax along the keys, O^T = V^T P^T, over one span of the work.

Keys are the tensor core's M and queries its N (swap-AB), so that a group of 4 query heads costs 8 columns,
not 64 rows. One warp loads, one TMA copy a block and chunk; one warpgroup computes. Thread blocks walk over
their span of requests: a request that lies in one span is finished here; of others remain partial results,
which merge.py adds up.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.schedule import Schedule, num_partials, span_units
from pallas_kernels.paged_decode.tiles import Tiles
from pallas_kernels.shared.head_dims import HeadCut
from pallas_kernels.shared.score import Score

LOG2E = math.log2(math.e)
W = plgpu.Layout.WGMMA
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static about a call besides the tiles.

    Attributes:
        kv_heads: Key/value heads.
        row_tiles: Tiles that one kv head's query rows are cut into.
        rows: Live query rows of a tile: decode token major, then query head; the last tile may hold fewer.
        group: Query heads of a kv head.
        query_len: Queries of a request.
        block_size: Tokens of a cache block.
        is_hnd: Blocks are [kv_heads, block_size, head_dim].
        cut: The cut of head_dim.
        tile_q: `rows` rounded up for the tensor core.
    """

    kv_heads: int
    row_tiles: int
    rows: int
    group: int
    query_len: int
    block_size: int
    is_hnd: bool
    cut: HeadCut
    tile_q: int

    @property
    def head_tiles(self) -> int:
        """Tiles of query rows of a request."""
        return self.kv_heads * self.row_tiles


@dataclasses.dataclass(frozen=True)
class Segment:
    """The part of one span that lies in one request; traced scalars."""

    row: Any
    seq_len: Any
    low: Any  # first key that some query sees
    high: Any  # one past the last
    first_tile: Any
    num_tiles: Any
    partial: Any  # where a partial result goes
    num_units: Any  # 0: nothing of the request is in this span
    is_whole: Any  # nothing of it is in another span


def walk(refs: Any, tiles: Tiles, shape: Shape, score: Score, slot: Any, visit: Callable) -> Any:
    """Calls `state = visit(segment, state)` for each request of a span; `state` starts as two zeros."""
    len_g, ends_g, first_g = refs
    reqs, slots = ends_g.shape[0], first_g.shape[0] - 1
    total = ends_g[reqs - 1]
    per_span = span_units(total, slots)
    stop = jnp.minimum((slot + 1) * per_span, total)
    tiles_per_unit = (tiles.split_kv or tiles.tile_kv) // tiles.tile_kv
    zero = slot * 0

    def visit_row(_: Any, carry: Any) -> Any:
        unit, row, *state = carry
        seq_len, end = len_g[row], ends_g[row]
        start = jnp.where(row > 0, ends_g[jnp.maximum(row - 1, 0)], 0)
        low, high = score.row_range(seq_len, shape.query_len)
        left = jnp.maximum(jnp.minimum(end, stop) - unit, 0)
        units = left if tiles.split_kv is None else jnp.minimum(left, 1)
        low_tile = lax.div(low, jnp.int32(tiles.tile_kv))
        high_tile = lax.div(high + (tiles.tile_kv - 1), jnp.int32(tiles.tile_kv))
        first_unit = lax.div(low_tile, jnp.int32(tiles_per_unit)) + (unit - start)
        first = jnp.maximum(first_unit * tiles_per_unit, low_tile)
        last = jnp.minimum((first_unit + units) * tiles_per_unit, high_tile)
        partial = row + slot if tiles.split_kv is None else unit
        num_tiles = jnp.where(high > low, last - first, 0)
        is_whole = units == end - start
        segment = Segment(row, seq_len, low, high, first, num_tiles, partial, units, is_whole)
        state = visit(segment, state)
        next_row = jnp.where(unit + units >= end, jnp.minimum(row + 1, reqs - 1), row)
        return unit + units, next_row, *state

    first_row, next_first_row = (jnp.minimum(first_g[slot + i], reqs - 1) for i in (0, 1))
    start = slot * per_span
    visits = next_first_row - first_row + 1  # a count known ahead: warps have no while
    if tiles.split_kv is not None:
        visits = visits + jnp.maximum(stop - start, 0)
    return lax.fori_loop(0, visits, visit_row, (start, first_row, zero, zero))[2:]


def make_loader(refs: Any, tiles: Tiles, shape: Shape, kv_head: Any) -> Callable:
    """The function that fills one stage of shared memory from the cache's blocks."""
    k_g, v_g, table_g, k_s, v_s, k_full, v_full, k_free, v_free = refs
    tile, size, cut = tiles.tile_kv, shape.block_size, shape.cut
    blocks_per_tile, rows = max(tile // size, 1), min(tile, size)

    def window(cache_g: Any, block: Any, part: Any, chunk: int) -> Any:
        """Keys of one kv head: a block, or the part of a block that a tile is."""
        tokens = pl.ds(0, rows)
        at = (block, kv_head, part, tokens) if shape.is_hnd else (block, part, tokens, kv_head)
        return cache_g.at[(*at, chunk, pl.ds(0, cut.width)) if cut.is_padded else at]

    def load(segment: Segment, tile_index: Any, step: Any) -> None:
        stage = lax.rem(step, jnp.int32(tiles.stages))
        first_key = (segment.first_tile + tile_index) * tile
        # Every id before the first wait, so that their latencies overlap. What a query cannot see may have no
        # block: the nearest that one can see stands in, and the softmax and the values mask it.
        low = lax.div(segment.low, jnp.int32(size))
        high = lax.div(segment.high - 1, jnp.int32(size))
        column = lax.div(first_key, jnp.int32(size))
        ids = [table_g[segment.row, jnp.clip(column + j, low, high)] for j in range(blocks_per_tile)]
        part = lax.div(lax.rem(first_key, jnp.int32(size)), jnp.int32(rows))
        for cache_g, smem, full, free in ((k_g, k_s, k_full, k_free), (v_g, v_s, v_full, v_free)):
            pl.when(step >= tiles.stages)(functools.partial(plgpu.barrier_wait, free.at[stage]))
            for j, block in enumerate(ids):
                for chunk in range(cut.chunks):
                    to = smem.at[stage, chunk, pl.ds(j * rows, rows)]
                    plgpu.copy_gmem_to_smem(window(cache_g, block, part, chunk), to, full.at[stage])

    return load


def attention_step(
    refs: Any, tiles: Tiles, shape: Shape, score: Score, *, dtype: Any, is_interpreted: bool
) -> Callable:
    """The function that takes one tile of keys into the online softmax."""
    k_s, v_s, p_s, k_full, v_full, k_free, v_free = refs
    tile, cut = tiles.tile_kv, shape.cut
    s_shape = (tile, shape.tile_q)
    column = functools.partial(lax.broadcast_in_dim, broadcast_dimensions=[1])  # one value a query
    keys = plgpu.broadcasted_iota(jnp.int32, s_shape, 0, layout=W)

    def query_positions(segment: Segment, first_row: Any) -> Any:
        """Positions of the queries: a scalar where all rows are one token."""
        if shape.query_len == 1:
            return segment.seq_len - 1
        rows = plgpu.broadcasted_iota(jnp.int32, s_shape, 1, layout=W) + first_row
        return lax.div(rows, jnp.full_like(rows, shape.group)) + (segment.seq_len - shape.query_len)

    def scores(stage: Any, q: Any) -> Any:
        def product(acc: Any) -> Any:
            for chunk in range(cut.chunks):
                plgpu.wgmma(acc, k_s.at[stage, chunk], q.at[chunk].T)
            return acc[...]

        s = pl.run_scoped(product, plgpu.ACC(s_shape, f32))
        if score.soft_cap is None:
            return s * (score.scale * LOG2E)
        return jnp.tanh(s * (score.scale / score.soft_cap)) * (score.soft_cap * LOG2E)

    def biased(s: Any, slopes: Any, position: Any, first_key: Any) -> Any:
        back = (position - (keys + first_key)).astype(f32)
        if score.sqrt_alibi:
            back = jnp.sqrt(jnp.maximum(back, 0.0))
        return s - column(slopes, s_shape) * back

    def masked(s: Any, segment: Segment, position: Any, first_key: Any) -> Any:
        """-inf where a query does not see a key. Skipped where every query sees every key of the tile."""
        seen_by_all, _ = score.key_range(segment.seq_len - 1, segment.seq_len)
        _, until = score.key_range(segment.seq_len - shape.query_len, segment.seq_len)
        is_edge = (first_key < seen_by_all) | (first_key + tile > until)

        def mask() -> Any:
            at = keys + first_key
            low, high = score.key_range(position, segment.seq_len)
            return jnp.where((at >= low) & (at < high), s, -jnp.inf)

        return lax.cond(is_edge, mask, lambda: s)

    def clear_unseen_values(stage: Any, segment: Segment, first_key: Any) -> None:
        """Zeros for values that no query sees: a probability of 0 does not hide a NaN."""

        @pl.when((first_key < segment.low) | (first_key + tile > segment.high))
        def _() -> None:
            at = plgpu.broadcasted_iota(jnp.int32, (tile, 64), 0, layout=W) + first_key
            for chunk in range(cut.chunks):
                for start in range(0, cut.width, 64):
                    part = v_s.at[stage, chunk, :, pl.ds(start, 64)]
                    v = plgpu.load(part, layout=W, optimized=False)
                    part[...] = jnp.where((at >= segment.low) & (at < segment.high), v, jnp.zeros_like(v))
            plgpu.commit_smem()

    def add_values(acc: Any, stage: Any, chunk: int) -> Any:
        def product(ref: Any) -> Any:
            plgpu.wgmma(ref, v_s.at[stage, chunk].T, p_s.T)
            return ref[...]

        if is_interpreted:  # it has no run_state of an accumulator
            return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, f32))
        return pl.run_state(lambda ref: plgpu.wgmma(ref, v_s.at[stage, chunk].T, p_s.T))(plgpu.ACC.init(acc))

    def step(segment: Segment, q: Any, slopes: Any, first_row: Any, tile_index: Any, carry: Any) -> Any:
        accs, top, total, count = carry
        stage = lax.rem(count, jnp.int32(tiles.stages))
        first_key = (segment.first_tile + tile_index) * tile
        plgpu.barrier_wait(k_full.at[stage])
        s = scores(stage, q)
        plgpu.barrier_arrive(k_free.at[stage])
        position = query_positions(segment, first_row)
        if slopes is not None:
            s = biased(s, slopes, position, first_key)
        s = masked(s, segment, position, first_key)
        new_top = jnp.maximum(top, s.max(axis=0))
        # With one query a tile always has a key that it sees; with several some may see none yet.
        base = new_top if shape.query_len == 1 else jnp.where(new_top == -jnp.inf, 0.0, new_top)
        shrink = jnp.exp2(top - base)
        p = jnp.exp2(s - column(base, s_shape))
        total = total * column(shrink, s_shape) + p  # summed over the keys at the end, once
        p_s.T[...] = plgpu.layout_cast(p.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.barrier_wait(v_full.at[stage])
        clear_unseen_values(stage, segment, first_key)
        accs = tuple(add_values(acc * column(shrink, acc.shape), stage, c) for c, acc in enumerate(accs))
        plgpu.barrier_arrive(v_free.at[stage])
        return accs, new_top, total, count + 1

    return step


def decode_partials(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    slopes: Any,
    sinks: Any,
    schedule: Schedule,
    *,
    shape: Shape,
    score: Score,
    tiles: Tiles,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Attention of the requests that lie in one span, and partial results of the others.

    Args:
        query: [reqs, head_tiles, rows, head_dim], or [..., chunks, chunk] where the head is cut.
        k_cache: [blocks, parts, block_size / parts, kv_heads, head_dim], head_dim cut likewise: blocks larger
            than a tile are cut into parts. HND: [blocks, kv_heads, parts, block_size / parts, head_dim].
        v_cache: As k_cache.
        block_table: Blocks of each request.
        seq_lens: Keys of each request.
        slopes: ALiBi slopes times log2(e), [head_tiles, tile_q] f32, or None.
        sinks: One more score of each query, times log2(e), likewise.
        schedule: Who computes what.
        shape: The call's static sizes.
        score: The layer.
        tiles: The kernel's static sizes.
        interpret: Interpret-mode parameters, or None for a GPU.

    Returns:
        Output, as query; LSE [reqs, head_tiles, tile_q] f32; then partial results, all f32: O^T [partials,
        head_tiles, chunks, width, tile_q], the largest score (times log2(e)) and the sum of exponentials of
        each query, [partials, head_tiles, tile_q]. What belongs to no request and span is not written.
    """
    cut, stages, n, dtype = shape.cut, tiles.stages, shape.tile_q, query.dtype
    slots = schedule.slots
    max_kv = block_table.shape[1] * shape.block_size
    partials = num_partials(query.shape[0], max_kv, tiles=tiles, slots=slots)

    def body(  # type: ignore[no-untyped-def]
        q_g,  # [reqs, head_tiles, rows, head_dim]
        k_g,  # [blocks, parts, block_size / parts, kv_heads, head_dim] or [blocks, kv_heads, parts, ...]
        v_g,
        table_g,  # [reqs, max_blocks]
        len_g,  # [reqs]
        ends_g,  # [reqs]
        first_g,  # [slots + 1]
        slopes_g,  # [head_tiles, tile_q] or None
        sinks_g,  # [head_tiles, tile_q] or None
        out_g,  # [reqs, head_tiles, rows, head_dim]
        lse_g,  # [reqs, head_tiles, tile_q]
        o_g,  # [partials, head_tiles, chunks, width, tile_q]
        top_g,  # [partials, head_tiles, tile_q]
        total_g,
        q_s,  # [2, chunks, tile_q, width] in SMEM
        k_s,  # [stages, chunks, tile_kv, width] in SMEM
        v_s,
        p_s,  # [tile_q, tile_kv] in SMEM
        q_full,
        q_free,
        k_full,
        v_full,
        k_free,
        v_free,
    ):
        slot, head_tile = lax.axis_index("slot"), lax.axis_index("head_tile")
        kv_head = lax.div(head_tile, jnp.int32(shape.row_tiles))
        walk_span = functools.partial(walk, (len_g, ends_g, first_g), tiles, shape, score, slot)

        def load_span() -> None:
            cache_refs = (k_g, v_g, table_g, k_s, v_s, k_full, v_full, k_free, v_free)
            load = make_loader(cache_refs, tiles, shape, kv_head)

            def load_query(segment: Segment, nth: Any) -> None:
                buffer = lax.rem(nth, jnp.int32(2))
                pl.when(nth >= 2)(functools.partial(plgpu.barrier_wait, q_free.at[buffer]))
                for chunk in range(cut.chunks):
                    # Rows past the last load as zeros, and so do columns past the end of a chunk.
                    source = q_g.at[segment.row, head_tile, pl.ds(0, n)]
                    if cut.is_padded:
                        source = q_g.at[segment.row, head_tile, pl.ds(0, n), chunk, pl.ds(0, cut.width)]
                    plgpu.copy_gmem_to_smem(source, q_s.at[buffer, chunk], q_full.at[buffer])

            def visit(segment: Segment, state: Any) -> Any:
                step, nth = state
                is_live = segment.num_units > 0
                pl.when(is_live)(lambda: load_query(segment, nth))
                num_tiles = jnp.where(is_live, segment.num_tiles, 0)
                pl.loop(0, num_tiles)(lambda i: load(segment, i, step + i))
                return step + num_tiles, nth + is_live.astype(jnp.int32)

            steps, queries = walk_span(visit)
            # Interpret mode insists that every completion is awaited; to the hardware it is all one.

            @pl.loop(jnp.maximum(steps - stages, 0), steps)
            def _(i: Any) -> None:
                plgpu.barrier_wait(k_free.at[lax.rem(i, jnp.int32(stages))])
                plgpu.barrier_wait(v_free.at[lax.rem(i, jnp.int32(stages))])

            @pl.loop(jnp.maximum(queries - 2, 0), queries)
            def _(i: Any) -> None:
                plgpu.barrier_wait(q_free.at[lax.rem(i, jnp.int32(2))])

        def compute_span() -> None:
            refs = (k_s, v_s, p_s, k_full, v_full, k_free, v_free)
            step = attention_step(refs, tiles, shape, score, dtype=dtype, is_interpreted=bool(interpret))
            slopes_r = None
            if slopes_g is not None:
                slopes_r = plgpu.load(slopes_g.at[head_tile], layout=W.reduce(0), optimized=False)
            first_row = lax.rem(head_tile, jnp.int32(shape.row_tiles)) * n
            zeros = lambda *size: plgpu.layout_cast(jnp.zeros(size, f32), W)
            row = lambda value: plgpu.layout_cast(jnp.full((n,), value, f32), W.reduce(0))

            def attend(segment: Segment, count: Any, nth: Any) -> Any:
                buffer = lax.rem(nth, jnp.int32(2))
                plgpu.barrier_wait(q_full.at[buffer])
                start = (
                    tuple(zeros(cut.width, n) for _ in range(cut.chunks)),
                    row(-jnp.inf),
                    zeros(tiles.tile_kv, n),
                    count,
                )
                one = functools.partial(step, segment, q_s.at[buffer], slopes_r, first_row)
                accs, top, total, _ = lax.fori_loop(0, segment.num_tiles, one, start)
                total = total.sum(axis=0)
                pl.when(segment.is_whole)(lambda: store_whole(segment, accs, top, total, buffer))
                pl.when(jnp.logical_not(segment.is_whole))(lambda: store_partial(segment, accs, top, total))
                plgpu.barrier_arrive(q_free.at[buffer])

            def store_partial(segment: Segment, accs: Any, top: Any, total: Any) -> None:
                for chunk, acc in enumerate(accs):
                    o_g[segment.partial, head_tile, chunk] = acc
                top_g[segment.partial, head_tile] = top
                total_g[segment.partial, head_tile] = total

            def store_whole(segment: Segment, accs: Any, top: Any, total: Any, buffer: Any) -> None:
                sink = None
                if sinks_g is not None:
                    sink = plgpu.load(sinks_g.at[head_tile], layout=W.reduce(0), optimized=False)
                    sink = sink + jnp.where(segment.seq_len > 0, 0.0, -jnp.inf)
                factor, lse_g[segment.row, head_tile] = normalized(top, total, sink)
                for chunk, acc in enumerate(accs):
                    # The queries are done with: their place takes the output.
                    out_s = q_s.at[buffer, chunk]
                    acc = acc * lax.broadcast_in_dim(factor, acc.shape, [1])
                    out_s.T[...] = plgpu.layout_cast(acc.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                for chunk in range(cut.chunks):
                    # TMA drops the rows past the last and the columns past the end of a chunk.
                    to = out_g.at[segment.row, head_tile, pl.ds(0, n)]
                    if cut.is_padded:
                        to = out_g.at[segment.row, head_tile, pl.ds(0, n), chunk, pl.ds(0, cut.width)]
                    plgpu.copy_smem_to_gmem(q_s.at[buffer, chunk], to)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def visit(segment: Segment, state: Any) -> Any:
                count, nth = state
                is_live = segment.num_units > 0
                pl.when(is_live)(lambda: attend(segment, count, nth))
                return count + jnp.where(is_live, segment.num_tiles, 0), nth + is_live.astype(jnp.int32)

            walk_span(visit)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                pl.when(warp == 0)(load_span)

        pl.when(lax.axis_index("warpgroup") == 0)(compute_span)

    copies = max(tiles.tile_kv // shape.block_size, 1) * cut.chunks
    swizzled = functools.partial(swizzled_smem, dtype=dtype)
    per_query = jax.ShapeDtypeStruct((partials, shape.head_tiles, n), f32)
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, dtype),
            jax.ShapeDtypeStruct((query.shape[0], shape.head_tiles, n), f32),
            jax.ShapeDtypeStruct((partials, shape.head_tiles, cut.chunks, cut.width, n), f32),
            per_query,
            per_query,
        ),
        scratch_types=[
            swizzled((2, cut.chunks, n, cut.width)),
            swizzled((stages, cut.chunks, tiles.tile_kv, cut.width)),
            swizzled((stages, cut.chunks, tiles.tile_kv, cut.width)),
            swizzled((n, tiles.tile_kv)),
            plgpu.Barrier(num_arrivals=cut.chunks, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(slots, shape.head_tiles),
        grid_names=("slot", "head_tile"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode",
        interpret=interpret,
    )
    return kernel(query, k_cache, v_cache, block_table, seq_lens, *schedule, slopes, sinks)


def normalized(top: Any, total: Any, sink: Any) -> tuple[Any, Any]:
    """What each query's accumulator is multiplied by, and its natural log-sum-exp, once a sink has joined."""
    base = top if sink is None else jnp.maximum(top, sink)
    finite = jnp.where(base == -jnp.inf, 0.0, base)
    shrink = jnp.exp2(top - finite)
    total = total * shrink
    if sink is not None:
        total = total + jnp.exp2(sink - finite)
    factor = shrink / jnp.where(total == 0.0, 1.0, total)
    return factor, (finite + jnp.log2(total)) * math.log(2)


def swizzled_smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that TMA fills and the tensor core reads: rows of 64 elements, 128-byte swizzle."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)
