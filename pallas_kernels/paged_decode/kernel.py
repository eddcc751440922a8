"""The decode kernel: S^T = K Q^T, softmax along the keys, O^T = V^T P^T, over one span of the work.

Keys are the tensor core's M and queries its N (swap-AB), so that a group of 4 query heads costs 8 columns,
not 64 rows. One warp loads, one TMA copy a block and chunk; one warpgroup computes, together or each warp for
itself. Thread blocks walk over
their span of requests: a request that lies in one span is finished here; of others remain partial results,
which merge.py adds up.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.loader import Stream, copies_per_stage, make_loader, prefetch_blocks
from pallas_kernels.paged_decode.schedule import Schedule, num_partials
from pallas_kernels.paged_decode.stages import Stages
from pallas_kernels.paged_decode.step import W, attention_step, f32
from pallas_kernels.paged_decode.tiles import Tiles
from pallas_kernels.paged_decode.walk import Segment, Shape, entries_of, walk
from pallas_kernels.paged_decode.warpgroup import Warpgroup
from pallas_kernels.paged_decode.warps import Warps, merge_smem
from pallas_kernels.shared.dequant import swizzled_smem
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import normalized
from pallas_kernels.shared.store import store_transposed, store_unoptimized
from pallas_kernels.shared.tma import padded_slice


def decode_partials(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    k_scale: Any,
    v_scale: Any,
    slopes: Any,
    sinks: Any,
    schedule: Schedule,
    block_list: Any,
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
        k_scale: f32: [1] or [kv_heads], or a scale per token and head [blocks, kv_heads, parts, block_size /
            parts]; or None.
        v_scale: As k_scale, or a scale per channel [kv_heads, chunks, width].
        slopes: ALiBi slopes times log2(e), [head_tiles, tile_q] f32, or None.
        sinks: One more score of each query, times log2(e), likewise.
        schedule: Who computes what.
        block_list: Ids [reqs * kv_heads, max_listed] and their counts [reqs * kv_heads], or (None, None).
            With lists, `reqs` of the query and the results are reqs * kv_heads (Shape.listed).
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
    has_k_scales, has_v_scales = (scale is not None and scale.ndim == 4 for scale in (k_scale, v_scale))
    slots = schedule.slots
    ids, counts = block_list
    max_kv = block_table.shape[1] * shape.block_size if ids is None else ids.shape[1] * (shape.listed or 0)
    partials = num_partials(query.shape[0], max_kv, tiles=tiles, slots=slots)

    def body(  # type: ignore[no-untyped-def]
        q_g,  # [reqs, head_tiles, rows, head_dim]
        k_g,  # [blocks, parts, block_size / parts, kv_heads, head_dim] or [blocks, kv_heads, parts, ...]
        v_g,
        table_g,  # [reqs, max_blocks]
        len_g,  # [reqs]
        k_scale_g,  # [1], [kv_heads], [blocks, kv_heads, parts, block_size / parts] or None
        v_scale_g,  # the same or [kv_heads, chunks, width]
        ends_g,  # [reqs]: the schedule's unit_ends
        slopes_g,  # [head_tiles, tile_q] or None
        sinks_g,  # [head_tiles, tile_q] or None
        ids_g,  # [reqs, max_listed] or None
        counts_g,  # [reqs] or None
        out_g,  # [reqs, head_tiles, rows, head_dim]
        lse_g,  # [reqs, head_tiles, tile_q]
        o_g,  # [partials, head_tiles, chunks, width, tile_q]
        top_g,  # [partials, head_tiles, tile_q]
        total_g,
        q_s,  # [2, chunks, tile_q, width] in SMEM
        k_s,  # [stages, chunks, tile_kv, width] in SMEM
        v_s,
        k_scale_s,  # [stages, tile_kv] in SMEM or None
        v_scale_s,
        wide_s,  # [chunks, tile_kv, width] in SMEM or None
        p_s,  # [tile_q, tile_kv] in SMEM or None
        merge_s,  # [warps, head_dim + 2, tile_q] in SMEM or None
        q_full,
        q_free,
        k_full,
        v_full,
        k_free,
        v_free,
    ):
        slot, head_tile = lax.axis_index("slot"), lax.axis_index("head_tile")
        rows = padded_slice(n, shape.rows, slot * 0)
        columns = padded_slice(cut.width, cut.chunk, slot * 0)
        span_refs = len_g, ends_g, counts_g

        def walk_span(visit: Callable) -> Any:
            how: Any = {"slots": slots, "is_interpreted": bool(interpret)}
            return walk(span_refs, tiles, shape, score, slot, head_tile, visit, **how)

        def of_head(scale_g: Any, segment: Segment) -> Any:
            return scale_g[segment.kv_head if scale_g.shape[0] > 1 else 0]

        def load_span() -> None:
            keys = Stream(k_g, k_scale_g if has_k_scales else None, k_s, k_scale_s, k_full, k_free)
            values = Stream(v_g, v_scale_g if has_v_scales else None, v_s, v_scale_s, v_full, v_free)
            load = make_loader((keys, values), table_g, ids_g, tiles, shape)
            if not interpret:
                prefetch_blocks(table_g, slot, slots)

            def load_query(segment: Segment, nth: Any) -> None:
                buffer = lax.rem(nth, jnp.int32(2))
                pl.when(nth >= 2)(functools.partial(plgpu.barrier_wait, q_free.at[buffer]))
                for chunk in range(cut.chunks):
                    # Rows past the last load as zeros, and so do columns past the end of a chunk.
                    source = q_g.at[segment.row, head_tile, rows]
                    if cut.is_padded:
                        source = q_g.at[segment.row, head_tile, rows, chunk, columns]
                    plgpu.copy_gmem_to_smem(source, q_s.at[buffer, chunk], q_full.at[buffer])

            def visit(segment: Segment, state: Any) -> Any:
                step, nth = state
                is_live = segment.num_units > 0
                num_tiles = jnp.where(is_live, segment.num_tiles, 0)
                load(segment, num_tiles, step, lambda: pl.when(is_live)(lambda: load_query(segment, nth)))
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
            barriers = k_full, v_full, k_free, v_free
            refs = Stages(k_s, v_s, k_scale_s, v_scale_s, wide_s, p_s, merge_s, *barriers)
            how = {"dtype": dtype, "is_interpreted": bool(interpret)}
            products = Warps(refs, shape, **how) if tiles.by_warp else Warpgroup(refs, tiles, shape, **how)
            step = attention_step(refs, ids_g, tiles, shape, score, products)
            first_row = lax.rem(head_tile, jnp.int32(shape.row_tiles)) * n

            def attend(segment: Segment, count: Any, nth: Any) -> Any:
                buffer = lax.rem(nth, jnp.int32(2))
                slopes_r, k_factor, v_factor = None, 1.0, None
                if slopes_g is not None:
                    slopes_r = plgpu.load(slopes_g.at[segment.heads], layout=W.reduce(0), optimized=False)
                if k_scale_g is not None and not has_k_scales:
                    k_factor = of_head(k_scale_g, segment)
                if v_scale_g is not None and v_scale_g.ndim == 1:
                    v_factor = of_head(v_scale_g, segment)  # its latency passes beside the first keys'
                plgpu.barrier_wait(q_full.at[buffer])
                start = *products.start(), entries_of(segment, 0, ids_g, tiles.tile_kv, shape), count
                query = products.query(q_s.at[buffer])
                one = functools.partial(step, segment, query, k_factor, slopes_r, first_row)
                state = lax.fori_loop(0, segment.num_tiles, one, start)
                accs, top, total = products.merged(*state[:3])
                accs = tuple(scaled(acc, chunk, segment, v_factor) for chunk, acc in enumerate(accs))
                pl.when(segment.is_whole)(lambda: store_whole(segment, accs, top, total))
                pl.when(jnp.logical_not(segment.is_whole))(lambda: store_partial(segment, accs, top, total))
                plgpu.barrier_arrive(q_free.at[buffer])

            def scaled(acc: Any, chunk: int, segment: Segment, v_factor: Any) -> Any:
                """The values' static scale, on their sum."""
                if v_scale_g is None or has_v_scales:
                    return acc
                if v_factor is not None:
                    return acc * v_factor
                channels = plgpu.load(
                    v_scale_g.at[segment.kv_head, chunk], layout=W.reduce(1), optimized=False
                )
                return acc * lax.broadcast_in_dim(channels, acc.shape, [0])

            def store_partial(segment: Segment, accs: Any, top: Any, total: Any) -> None:
                for chunk, acc in enumerate(accs):
                    o_g[segment.partial, head_tile, chunk] = acc
                store_unoptimized(top_g.at[segment.partial, head_tile], top)
                store_unoptimized(total_g.at[segment.partial, head_tile], total)

            def store_whole(segment: Segment, accs: Any, top: Any, total: Any) -> None:
                sink = None
                if sinks_g is not None:
                    sink = plgpu.load(sinks_g.at[segment.heads], layout=W.reduce(0), optimized=False)
                    sink = sink + jnp.where(segment.seq_len > 0, 0.0, -jnp.inf)
                factor, lse = normalized(top, total, sink)
                store_unoptimized(lse_g.at[segment.row, head_tile], lse)
                for chunk, acc in enumerate(accs):
                    to = out_g.at[(segment.row, head_tile, slice(None), *((chunk,) if cut.is_padded else ()))]
                    acc = acc * lax.broadcast_in_dim(factor, acc.shape, [1])
                    store_transposed(to, acc, is_interpreted=bool(interpret))

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

    copies = functools.partial(copies_per_stage, tiles, shape)
    stage = cut.chunks, tiles.tile_kv, cut.width
    # Interpret mode takes no operand from registers, so widened keys pass through shared memory there.
    is_widened = v_cache.dtype != dtype or (bool(interpret) and k_cache.dtype != dtype)
    scale_smem = plgpu.SMEM((stages, tiles.tile_kv), f32)
    together = cut.width if tiles.by_warp else 64
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
            swizzled_smem((2, cut.chunks, n, cut.width), dtype),
            swizzled_smem((stages, *stage), k_cache.dtype, width=together),
            swizzled_smem((stages, *stage), v_cache.dtype, width=together),
            scale_smem if has_k_scales else None,
            scale_smem if has_v_scales else None,
            swizzled_smem(stage, dtype) if is_widened and not tiles.by_warp else None,
            None if tiles.by_warp else swizzled_smem((n, tiles.tile_kv), dtype),
            merge_smem(shape) if tiles.by_warp else None,
            plgpu.Barrier(num_arrivals=cut.chunks, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=copies(has_token_scale=has_k_scales), num_barriers=stages),
            plgpu.Barrier(num_arrivals=copies(has_token_scale=has_v_scales), num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(slots, shape.head_tiles),
        grid_names=("slot", "head_tile"),
        num_threads=2,
        thread_name="warpgroup",
        # Warps share nothing but merge_s, whose barriers stand in warp_code.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=tiles.by_warp),
        kernel_name="paged_decode",
        interpret=interpret,
    )
    return kernel(
        query,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        k_scale,
        v_scale,
        schedule.unit_ends,
        slopes,
        sinks,
        ids,
        counts,
    )
