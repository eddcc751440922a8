"""The computing warpgroup: one tile of keys into the online softmax.

Keys and values of 8 bits become the queries' 16-bit dtype on the way into the tensor core: keys in registers,
values through shared memory, since the tensor core transposes 16-bit operands only. Scales touch neither: a
key's multiplies its row of S^T, a value's its row of P^T.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.tiles import Tiles
from pallas_kernels.paged_decode.walk import Place, Segment, Shape, place_of
from pallas_kernels.shared.dequant import swizzle_of, widened
from pallas_kernels.shared.score import Score

LOG2E = math.log2(math.e)
W = plgpu.Layout.WGMMA
f32 = jnp.float32
# f16 probabilities go up to 2 ** 14, not 1: small ones times small scales would lose bits as subnormals.
HEADROOM = 14
SMALLEST_SCALE = 2.0**-60


class Stages(NamedTuple):
    """What the loading warp fills and the computing warpgroup reads.

    Attributes:
        k_s: [stages, chunks, tile_kv, width] in SMEM.
        v_s: The same.
        k_scale_s: [stages, tile_kv] f32 in SMEM: a scale per token and head; or None.
        v_scale_s: The same.
        wide_s: [chunks, tile_kv, width] in SMEM, 16-bit: widened values (in interpret mode keys too); None.
        p_s: [tile_q, tile_kv] in SMEM: the probabilities.
        k_full: Barriers.
        v_full: Barriers.
        k_free: Barriers.
        v_free: Barriers.
    """

    k_s: Any
    v_s: Any
    k_scale_s: Any
    v_scale_s: Any
    wide_s: Any
    p_s: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


def attention_step(
    refs: Stages, ids_g: Any, tiles: Tiles, shape: Shape, score: Score, *, dtype: Any, is_interpreted: bool
) -> Callable:
    """The function that takes one tile of keys into the online softmax.

    Args:
        refs: Shared memory and barriers.
        ids_g: Lists of sparse blocks, or None.
        tiles: The kernel's static sizes.
        shape: The call's static sizes.
        score: The layer.
        dtype: Of the queries, and of what the tensor core multiplies.
        is_interpreted: On a CPU.
    """
    tile, cut = tiles.tile_kv, shape.cut
    s_shape = (tile, shape.tile_q)
    column = functools.partial(lax.broadcast_in_dim, broadcast_dimensions=[1])  # one value a query
    keys = plgpu.broadcasted_iota(jnp.int32, s_shape, 0, layout=W)
    has_wide_values = refs.v_s.dtype != dtype
    needs_headroom = refs.v_scale_s is not None and dtype == jnp.float16

    def query_positions(segment: Segment, first_row: Any) -> Any:
        """Positions of the queries: a scalar where all rows are one token."""
        if shape.query_len == 1:
            return segment.seq_len - 1
        rows = plgpu.broadcasted_iota(jnp.int32, s_shape, 1, layout=W) + first_row
        return lax.div(rows, jnp.full_like(rows, shape.group)) + (segment.seq_len - shape.query_len)

    def key_operands(stage: Any, chunk: int) -> Any:
        """A chunk of keys as the tensor core takes it: (columns, operand) one after the other."""
        tile_s = refs.k_s.at[stage, chunk]
        if refs.k_s.dtype == dtype:
            yield slice(None), tile_s
            return
        for columns in pieces(cut.width):
            operand = widened(tile_s.at[:, columns], dtype)
            if is_interpreted:  # it takes no operand from registers
                refs.wide_s[chunk, :, columns] = operand
                operand = refs.wide_s.at[chunk, :, columns]
            yield columns, operand

    def scores(stage: Any, q: Any, k_factor: Any) -> Any:
        def product(acc: Any) -> Any:
            for chunk in range(cut.chunks):
                for columns, operand in key_operands(stage, chunk):
                    plgpu.wgmma(acc, operand, q.at[chunk, :, columns].T)
            # Waits: values widened beside this product would need more registers than two thread blocks have.
            return acc[...]

        s = pl.run_scoped(product, plgpu.ACC(s_shape, f32))
        if refs.k_scale_s is not None:
            s = s * token_scales(refs.k_scale_s, stage)
        if score.soft_cap is None:
            return s * (k_factor * (score.scale * LOG2E))
        return jnp.tanh(s * (k_factor * (score.scale / score.soft_cap))) * (score.soft_cap * LOG2E)

    def token_scales(scale_s: Any, stage: Any) -> Any:
        scale = plgpu.load(scale_s.at[stage], layout=W.reduce(1), optimized=False)
        return lax.broadcast_in_dim(scale, s_shape, [0])

    def biased(s: Any, slopes: Any, position: Any, place: Place) -> Any:
        back = (position - place.keys(keys)).astype(f32)
        if score.sqrt_alibi:
            back = jnp.sqrt(jnp.maximum(back, 0.0))
        return s - column(slopes, s_shape) * back

    def masked(s: Any, segment: Segment, position: Any, place: Place) -> Any:
        """-inf where a query does not see a key. Skipped where every query sees every key of the tile."""
        seen_by_all, _ = score.key_range(segment.seq_len - 1, segment.seq_len)
        _, until = score.key_range(segment.seq_len - shape.query_len, segment.seq_len)

        def mask() -> Any:
            at = place.keys(keys)
            low, high = score.key_range(position, segment.seq_len)
            return jnp.where((at >= low) & (at < high), s, -jnp.inf)

        return lax.cond(place.reaches_out(seen_by_all, until), mask, lambda: s)

    def only_seen(x: Any, segment: Segment, place: Place, otherwise: float) -> Any:
        """Rows of x, one a key; `otherwise` for keys that no query sees: a probability of 0 hides no NaN."""
        at = place.keys(plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=W))
        is_seen = (at >= segment.low) & (at < segment.high)
        return jnp.where(is_seen, x, jnp.full_like(x, otherwise))

    def has_unseen(segment: Segment, place: Place) -> Any:
        return place.reaches_out(segment.low, segment.high)

    def clear_unseen_values(stage: Any, segment: Segment, place: Place) -> None:
        @pl.when(has_unseen(segment, place))
        def _() -> None:
            for chunk in range(cut.chunks):
                for start in range(0, cut.width, 64):
                    part = refs.v_s.at[stage, chunk, :, pl.ds(start, 64)]
                    v = plgpu.load(part, layout=W, optimized=False)
                    part[...] = only_seen(v, segment, place, 0.0)
            plgpu.commit_smem()

    def widen_values(stage: Any, segment: Segment, place: Place) -> None:
        for chunk in range(cut.chunks):
            for columns in pieces(cut.width):
                v = widened(refs.v_s.at[stage, chunk, :, columns], dtype)
                seen = functools.partial(only_seen, v, segment, place, 0.0)
                refs.wide_s[chunk, :, columns] = lax.cond(has_unseen(segment, place), seen, lambda v=v: v)

    def add_values(acc: Any, stage: Any, chunk: int) -> Any:
        def product(ref: Any) -> None:
            values = refs.wide_s.at[chunk] if has_wide_values else refs.v_s.at[stage, chunk]
            plgpu.wgmma(ref, values.T, refs.p_s.T)

        def product_alone(ref: Any) -> Any:
            product(ref)
            return ref[...]

        if is_interpreted:  # it has no run_state of an accumulator
            return acc + pl.run_scoped(product_alone, plgpu.ACC(acc.shape, f32))
        return pl.run_state(product)(plgpu.ACC.init(acc))

    def step(
        segment: Segment, q: Any, k_factor: Any, slopes: Any, first_row: Any, tile_index: Any, carry: Any
    ) -> Any:
        accs, top, total, firsts, count = carry
        stage = lax.rem(count, jnp.int32(tiles.stages))
        place = Place(firsts, shape.piece(tile))
        # Read a tile ahead: a list is in global memory.
        next_place = place_of(segment, tile_index + 1, ids_g, tile, shape)
        plgpu.barrier_wait(refs.k_full.at[stage])
        s = scores(stage, q, k_factor)
        plgpu.barrier_arrive(refs.k_free.at[stage])
        if has_wide_values:
            plgpu.barrier_wait(refs.v_full.at[stage])
            widen_values(stage, segment, place)
        position = query_positions(segment, first_row)
        if slopes is not None:
            s = biased(s, slopes, position, place)
        s = masked(s, segment, position, place)
        heavy, weight = s, None  # of each key's value
        if refs.v_scale_s is not None:
            scales = token_scales(refs.v_scale_s, stage)
            seen = functools.partial(only_seen, scales, segment, place, 1.0)
            weight = lax.cond(has_unseen(segment, place), seen, lambda: scales)
            if needs_headroom:
                heavy = s + (jnp.log2(jnp.maximum(weight, SMALLEST_SCALE)) - HEADROOM)
        if has_wide_values:
            plgpu.barrier_arrive(refs.v_free.at[stage])
        new_top = jnp.maximum(top, heavy.max(axis=0))
        # A lone query sees a key of every tile that is not from a list; others may have seen none yet.
        has_seen_one = shape.query_len == 1 and not shape.listed
        base = new_top if has_seen_one else jnp.where(new_top == -jnp.inf, 0.0, new_top)
        shrink = jnp.exp2(top - base)
        p = jnp.exp2(s - column(base, s_shape))
        total = total * column(shrink, s_shape) + p  # summed over the keys at the end, once
        p = p if weight is None else p * weight
        refs.p_s.T[...] = plgpu.layout_cast(p.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        if not has_wide_values:
            plgpu.barrier_wait(refs.v_full.at[stage])
            clear_unseen_values(stage, segment, place)
        accs = tuple(add_values(acc * column(shrink, acc.shape), stage, c) for c, acc in enumerate(accs))
        if not has_wide_values:
            plgpu.barrier_arrive(refs.v_free.at[stage])
        return accs, new_top, total, next_place.firsts, count + 1

    return step


def pieces(width: int) -> list[Any]:
    """The columns of an 8-bit tile that are widened together: a row of shared memory's swizzle."""
    span = swizzle_of(1)
    return [pl.ds(start, span) for start in range(0, width, span)]


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
