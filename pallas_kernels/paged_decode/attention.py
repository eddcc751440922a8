"""The consumer of the decode kernel: scores, softmax and values of a span's requests, a tile at a time."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode import scales
from pallas_kernels.paged_decode.masking import Mask, has_unseen, only_seen
from pallas_kernels.paged_decode.mma_products import MmaProducts
from pallas_kernels.paged_decode.products import Products
from pallas_kernels.paged_decode.refs import Inputs, Outputs, Pipeline, Smem
from pallas_kernels.paged_decode.segments import Segment, Span
from pallas_kernels.paged_decode.softmax import online_softmax
from pallas_kernels.paged_decode.store import Store
from pallas_kernels.paged_decode.tile_keys import TileKeys, entries_of, keys_of
from pallas_kernels.paged_decode.wgmma_products import WgmmaProducts
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Columns, Scalar, Tile

W = plgpu.Layout.WGMMA


class SegmentQuery(NamedTuple):
    """What all tiles of a segment have in common.

    Attributes:
        segment: The segment.
        operand: Its queries as the products take them.
        factor: What scores are multiplied by besides the layer's scale, for that.
        k_factor: The keys' static scale.
        slopes: ALiBi slopes times log2(e), or None.
    """

    segment: Segment
    operand: Any
    factor: Tile | float
    k_factor: Scalar | float
    slopes: Columns | None


class TileState(NamedTuple):
    """What tiles of a segment leave to the next one.

    Attributes:
        accs: Accumulators of O^T.
        top: Largest scores.
        total: Sums of the exponentials.
        entries: The list's entries of the next tile, read a tile ahead.
        step: Counts the tiles of the whole span.
    """

    accs: tuple[Tile, ...]
    top: Columns | Tile
    total: Tile
    entries: tuple[Scalar, ...]
    step: Scalar


class Attention:
    """The warpgroup that computes."""

    def __init__(self, inputs: Inputs, outputs: Outputs, smem: Smem, pipeline: Pipeline, span: Span):
        self.inputs, self.smem, self.pipeline, self.span, self.spec = inputs, smem, pipeline, span, span.spec
        make_products = MmaProducts if self.spec.sizes.by_warp else WgmmaProducts
        self.products: Products = make_products(smem, pipeline, self.spec)
        self.mask = Mask(self.spec, span.head_tile)
        self.store = Store(outputs, inputs.sinks, span.head_tile, self.spec)

    def attend_span(self) -> None:
        """All segments, one after the other."""

        def visit(segment: Segment, step: Scalar, nth: Scalar) -> None:
            pl.when(segment.is_live)(lambda: self.attend_segment(segment, step, nth))

        self.span.walk(visit)

    def attend_segment(self, segment: Segment, step: Scalar, nth: Scalar) -> None:
        """All tiles of a segment, the `nth` that is live; the first is step `step` of the span."""
        buffer, slopes, cache = lax.rem(nth, jnp.int32(2)), self.inputs.slopes, self.inputs.cache
        if slopes is not None:
            slopes = plgpu.load(slopes.at[segment.heads], layout=W.reduce(0), optimized=False)
        k_factor = scales.of_head(cache.k_scale, segment)
        v_factor = scales.of_head(cache.v_scale, segment)  # its latency passes beside the first keys'
        plgpu.barrier_wait(self.pipeline.q_full.at[buffer])
        start = *self.products.start(), entries_of(segment, 0, self.inputs.lists.ids, self.spec), step
        operand, factor = self.products.query(self.smem.q.at[buffer])
        query = SegmentQuery(segment, operand, factor, 1.0 if k_factor is None else k_factor, slopes)
        state = lax.fori_loop(
            0, segment.num_tiles, functools.partial(self.attend_tile, query), TileState(*start)
        )
        accs, top, total = self.products.merged(state.accs, state.top, state.total)
        accs = tuple(
            scales.scaled_output(acc, chunk, segment, cache.v_scale, v_factor)
            for chunk, acc in enumerate(accs)
        )
        self.store.segment(segment, accs, top, total)
        plgpu.barrier_arrive(self.pipeline.q_free.at[buffer])

    def attend_tile(self, query: SegmentQuery, tile_index: Scalar, state: TileState) -> TileState:
        """Takes one tile of keys into a segment's attention: scores, softmax, values."""
        segment, stage = query.segment, lax.rem(state.step, jnp.int32(self.spec.sizes.stages))
        keys = keys_of(segment, tile_index, state.entries, self.spec)
        entries = entries_of(segment, tile_index + 1, self.inputs.lists.ids, self.spec)

        s = self.scores(stage, query)
        self.products.widen_values(stage, segment, keys)
        s = self.mask.apply(s, segment, keys, query.slopes)
        weight = self.value_weights(stage, segment, keys)

        p, shrink, top, total = online_softmax(s, weight, state.top, state.total, self.products)
        accs = self.products.add_values(state.accs, shrink, p, stage, segment, keys)
        return TileState(accs, top, total, entries, state.step + 1)

    def scores(self, stage: Scalar, query: SegmentQuery) -> Tile:
        """S^T of a stage, times log2(e), with scales and soft cap; the stage's keys are free then."""
        score, k_scale_s = self.spec.score, self.smem.k_scale
        plgpu.barrier_wait(self.pipeline.k_full.at[stage])
        s = self.products.scores(stage, query.operand)
        if k_scale_s is not None:
            s = s * scales.of_keys(k_scale_s, stage, self.spec.tile)
        if score.soft_cap is None:
            s = s * (query.factor * (query.k_factor * (score.scale * LOG2E)))
        else:
            s = s * (query.factor * (query.k_factor * (score.scale / score.soft_cap)))
            s = jnp.tanh(s) * (score.soft_cap * LOG2E)
        plgpu.barrier_arrive(self.pipeline.k_free.at[stage])
        return s

    def value_weights(self, stage: Scalar, segment: Segment, keys: TileKeys) -> Tile | None:
        """What each key's value is to be multiplied by, over a tile; None where values have no such scales.

        Values that are widened by now, and their scales, are free then.
        """
        v_scale_s, weight = self.smem.v_scale, None
        if v_scale_s is not None:
            if not self.products.widens_values:
                plgpu.barrier_wait(self.pipeline.v_full.at[stage])
            scale = scales.of_keys(v_scale_s, stage, self.spec.tile)
            seen = functools.partial(only_seen, scale, segment, keys, 1.0)
            weight = lax.cond(has_unseen(segment, keys), seen, lambda: scale)
        if self.products.widens_values:
            plgpu.barrier_arrive(self.pipeline.v_free.at[stage])
        return weight
