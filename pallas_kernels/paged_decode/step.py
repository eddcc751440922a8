"""One tile of keys into the online softmax; what multiplies is Warpgroup's or Warps'.

Scales touch neither keys nor values: a key's multiplies its row of S^T, a value's its row of P^T.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.stages import Stages
from pallas_kernels.paged_decode.tiles import Tiles
from pallas_kernels.paged_decode.walk import Place, Segment, Shape, entries_of, place_of
from pallas_kernels.paged_decode.warpgroup import Warpgroup, has_unseen, only_seen
from pallas_kernels.paged_decode.warps import Warps
from pallas_kernels.shared.score import Score

LOG2E = math.log2(math.e)
W = plgpu.Layout.WGMMA
f32 = jnp.float32
SMALLEST_SCALE = 2.0**-60


def attention_step(
    refs: Stages, ids_g: Any, tiles: Tiles, shape: Shape, score: Score, products: Warpgroup | Warps
) -> Callable:
    """The function that takes one tile of keys into the online softmax.

    Args:
        refs: Shared memory and barriers.
        ids_g: Lists of sparse blocks, or None.
        tiles: The kernel's static sizes.
        shape: The call's static sizes.
        score: The layer.
        products: Who multiplies.
    """
    tile = tiles.tile_kv
    s_shape = (tile, shape.tile_q)
    keys = plgpu.broadcasted_iota(jnp.int32, s_shape, 0, layout=W)
    has_v_scales = refs.v_scale_s is not None
    headroom = products.headroom
    widener = products if isinstance(products, Warpgroup) and products.widens_values else None

    def query_positions(segment: Segment, first_row: Any) -> Any:
        """Positions of the queries: a scalar where all rows are one token."""
        if shape.query_len == 1:
            return segment.seq_len - 1
        rows = plgpu.broadcasted_iota(jnp.int32, s_shape, 1, layout=W) + first_row
        return lax.div(rows, jnp.full_like(rows, shape.group)) + (segment.seq_len - shape.query_len)

    def scores(stage: Any, query: Any, k_factor: Any) -> Any:
        operand, factor = query
        s = products.scores(stage, operand)
        if refs.k_scale_s is not None:
            s = s * token_scales(refs.k_scale_s, stage)
        if score.soft_cap is None:
            return s * (factor * (k_factor * (score.scale * LOG2E)))
        return jnp.tanh(s * (factor * (k_factor * (score.scale / score.soft_cap)))) * (score.soft_cap * LOG2E)

    def token_scales(scale_s: Any, stage: Any) -> Any:
        scale = plgpu.load(scale_s.at[stage], layout=W.reduce(1), optimized=False)
        return lax.broadcast_in_dim(scale, s_shape, [0])

    def biased(s: Any, slopes: Any, position: Any, place: Place) -> Any:
        back = (position - place.keys(keys)).astype(f32)
        if score.sqrt_alibi:
            back = jnp.sqrt(jnp.maximum(back, 0.0))
        return s - lax.broadcast_in_dim(slopes, s_shape, [1]) * back

    def masked(s: Any, segment: Segment, position: Any, place: Place) -> Any:
        """-inf where a query does not see a key. Skipped where every query sees every key of the tile."""
        seen_by_all, _ = score.key_range(segment.seq_len - 1, segment.seq_len)
        _, until = score.key_range(segment.seq_len - shape.query_len, segment.seq_len)

        def mask() -> Any:
            at = place.keys(keys)
            low, high = score.key_range(position, segment.seq_len)
            return jnp.where((at >= low) & (at < high), s, -jnp.inf)

        return lax.cond(place.reaches_out(seen_by_all, until), mask, lambda: s)

    def masked_by_head(s: Any, first_row: Any, place: Place) -> Any:
        """-inf where a list says that a query head does not see a block."""
        rows = plgpu.broadcasted_iota(jnp.int32, s_shape, 1, layout=W) + first_row
        head = lax.rem(rows, jnp.full_like(rows, shape.group))
        return jnp.where(lax.shift_right_logical(place.heads_of(keys), head) & 1 != 0, s, -jnp.inf)

    def value_weights(stage: Any, segment: Segment, place: Place) -> Any:
        scales = token_scales(refs.v_scale_s, stage)
        seen = functools.partial(only_seen, scales, segment, place, 1.0)
        return lax.cond(has_unseen(segment, place), seen, lambda: scales)

    def step(
        segment: Segment, query: Any, k_factor: Any, slopes: Any, first_row: Any, tile_index: Any, carry: Any
    ) -> Any:
        accs, top, total, listed, count = carry
        stage = lax.rem(count, jnp.int32(tiles.stages))
        place = place_of(segment, tile_index, listed, tile, shape)
        following = entries_of(segment, tile_index + 1, ids_g, tile, shape)
        plgpu.barrier_wait(refs.k_full.at[stage])
        s = scores(stage, query, k_factor)
        plgpu.barrier_arrive(refs.k_free.at[stage])
        if widener:
            plgpu.barrier_wait(refs.v_full.at[stage])
            widener.widen_values(stage, segment, place)
        position = query_positions(segment, first_row)
        if slopes is not None:
            s = biased(s, slopes, position, place)
        s = masked(s, segment, position, place)
        if shape.lists_tell_heads:
            s = masked_by_head(s, first_row, place)
        weight = None  # of each key's value
        if has_v_scales:
            if not widener:
                plgpu.barrier_wait(refs.v_full.at[stage])
            weight = value_weights(stage, segment, place)
        if widener:
            plgpu.barrier_arrive(refs.v_free.at[stage])
        heavy = s
        if weight is not None and headroom:
            heavy = s + jnp.log2(jnp.maximum(weight, SMALLEST_SCALE))
        tile_top = products.largest(heavy)
        new_top = jnp.maximum(top, tile_top - headroom if headroom else tile_top)
        base = new_top if products.sees_a_key else jnp.where(new_top == -jnp.inf, 0.0, new_top)
        shrink = jnp.exp2(top - base)
        p = jnp.exp2(s - products.spread(base))
        total = total * products.spread(shrink) + p  # summed over the keys at the end, once
        p = p if weight is None else p * weight
        accs = products.add_values(accs, shrink, p, stage, segment, place)
        return accs, new_top, total, following, count + 1

    return step
