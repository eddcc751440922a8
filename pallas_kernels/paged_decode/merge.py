"""Adds up the partial results that the spans of paged_decode left, and lets the sinks join."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.kernel import Shape, swizzled_smem
from pallas_kernels.paged_decode.schedule import Schedule, span_units
from pallas_kernels.paged_decode.tiles import Tiles

W = plgpu.Layout.WGMMA
f32 = jnp.float32
PART = 64  # elements of head_dim that a thread block merges


def merge_partials(
    partials: tuple[Any, Any, Any],
    seq_lens: Any,
    sinks: Any,
    schedule: Schedule,
    *,
    shape: Shape,
    tiles: Tiles,
    dtype: Any,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Output [reqs, head_tiles, rows, head_dim], cut as the query's, and LSE [reqs, head_tiles, tile_q].

    Args:
        partials: What decode_partials returned.
        seq_lens: Keys of each request; a request without any comes out as 0 and -inf.
        sinks: One more score of each query, times log2(e): [head_tiles, tile_q] f32, or None.
        schedule: The one that the partial results were made by.
        shape: The call's static sizes.
        tiles: The kernel's static sizes.
        dtype: Of the output.
        interpret: Interpret-mode parameters, or None for a GPU.
    """
    reqs, slots, n, cut = seq_lens.shape[0], schedule.slots, shape.tile_q, shape.cut
    parts = cut.padded_dim // PART
    at_once = _loads_at_once(reqs, slots, n, tiles)

    def body(  # type: ignore[no-untyped-def]
        o_g,  # [partials, head_tiles, padded_dim, tile_q]
        top_g,  # [partials, head_tiles, tile_q]
        total_g,
        len_g,  # [reqs]
        ends_g,  # [reqs]
        sinks_g,  # [head_tiles, tile_q] or None
        out_g,  # [reqs, head_tiles, rows, head_dim]
        lse_g,  # [reqs, head_tiles, tile_q]
        out_s,  # [tile_q, PART] in SMEM
    ):
        row, head_tile, part = (lax.axis_index(name) for name in ("req", "head_tile", "part"))
        first, count = _partials_of(row, ends_g, slots, tiles)
        vector = lambda ref: plgpu.load(ref, layout=W.reduce(0), optimized=False)
        column = lambda x: lax.broadcast_in_dim(x, (PART, n), [1])
        full = lambda value: plgpu.layout_cast(jnp.full((n,), value, f32), W.reduce(0))
        finite = lambda top: jnp.where(top == -jnp.inf, 0.0, top)

        top, total = full(-jnp.inf), full(0.0)
        if sinks_g is not None:
            has_keys = len_g[row] > 0
            top = vector(sinks_g.at[head_tile]) + jnp.where(has_keys, 0.0, -jnp.inf)
            total = full(1.0) * jnp.where(has_keys, 1.0, 0.0)

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
            shrink = jnp.exp2(top - finite(new_top))
            acc, total = acc * column(shrink), total * shrink
            for t, l, o in zip(tops, totals, outs, strict=True):
                weight = jnp.exp2(t - finite(new_top))
                acc, total = acc + o * column(weight), total + l * weight
            return acc, new_top, total

        acc = plgpu.layout_cast(jnp.zeros((PART, n), f32), W)
        rounds = lax.div(count + (at_once - 1), jnp.int32(at_once))
        acc, top, total = lax.fori_loop(0, rounds, add, (acc, top, total))
        acc = acc * column(1.0 / jnp.where(total == 0.0, 1.0, total))

        @pl.when(part == 0)
        def _() -> None:
            lse_g[row, head_tile] = (top + jnp.log2(total)) * math.log(2)

        out_s.T[...] = plgpu.layout_cast(acc.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        # TMA drops the rows past the last and the columns past the end of a chunk.
        to = out_g.at[row, head_tile, pl.ds(0, n), pl.ds(pl.multiple_of(part * PART, PART), PART)]
        if cut.is_padded:
            to = out_g.at[row, head_tile, pl.ds(0, n), part, pl.ds(0, PART)]
        plgpu.copy_smem_to_gmem(out_s, to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    head = (cut.chunks, cut.chunk) if cut.is_padded else (cut.chunk,)
    o, top, total = partials
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((reqs, shape.head_tiles, shape.rows, *head), dtype),
            jax.ShapeDtypeStruct((reqs, shape.head_tiles, n), f32),
        ),
        scratch_types=[swizzled_smem((n, PART), dtype)],
        grid=(reqs, shape.head_tiles, parts),
        grid_names=("req", "head_tile", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_merge",
        interpret=interpret,
    )
    o = o.reshape(*o.shape[:2], cut.padded_dim, n)
    return kernel(o, top, total, seq_lens, schedule.unit_ends, sinks)


def _partials_of(row: Any, ends_g: Any, slots: int, tiles: Tiles) -> tuple[Any, Any]:
    """First partial result of a request, and how many it has."""
    end = ends_g[row]
    start = jnp.where(row > 0, ends_g[jnp.maximum(row - 1, 0)], 0)
    if tiles.split_kv is not None:
        return start, end - start
    per_span = span_units(ends_g[ends_g.shape[0] - 1], slots)
    first = lax.div(start, per_span)
    count = jnp.where(end > start, lax.div(end - 1, per_span) - first + 1, 0)
    return row + first, count


def _loads_at_once(reqs: int, slots: int, tile_q: int, tiles: Tiles) -> int:
    """Partial results loaded together: as many as a request is likely to have, and registers to hold them.

    Where splits are fixed it does not depend on the batch, or its bits would.
    """
    likely = 4 if tiles.split_kv else slots // reqs + 2
    room = max(128 // tile_q, 1)  # 64 registers
    return max(min(1 << (likely - 1).bit_length(), room, 16), 1)
