"""The decode kernel: S^T = K Q^T, softmax along the keys, O^T = V^T P^T, over one span of the work.

Keys are the tensor core's M and queries its N (swap-AB), so that a group of 4 query heads costs 8 columns,
not 64 rows. A thread block has a span of the schedule and a tile of query rows; both of its sides walk over
the same requests (n) and tiles of keys (i, over all requests; s = i % stages) and meet at barriers only:

    producer: warp 0 of warpgroup 1      shared memory    consumer: warpgroup 0
    -------------------------------      -------------    ----------------------------------------------
    for each request n of the span:                       for each request n of the span:
      block ids of its first tile
      wait q_free[n % 2]                                    wait q_full[n % 2]
      TMA: queries --------------------> Q [2] -----------> (WarpMma: into registers)
      for each tile i:                                      for each tile i:
        wait k_free[s]                                        wait k_full[s]
        TMA: keys, scales a token -----> K [stages] --------> S^T = K Q^T
                                                              arrive k_free[s]
        wait v_free[s]                                        mask, softmax: P^T in 16 bits
        TMA: values, scales a token ---> V [stages] --+       wait v_full[s]
        (block ids of tile i + 1 are                  +-----> O^T = O^T * shrink + V^T P^T
         read before these waits)                             arrive v_free[s]
                                                            whole in this span: out, lse    --> global memory
                                                            else O^T, max, sum: a partial   --> global memory
                                                            arrive q_free[n % 2]
    paged_decode_merge, the next kernel (merge.py): adds up the partials of each request that was cut

A barrier `full` completes when all TMA copies into it have landed, one `free` by the consumer's arrival.
WarpgroupMma: the warpgroup multiplies together and P^T passes through shared memory; 8-bit values are
widened there before the mask, where v_full is awaited then, and v_free arrived at before the softmax.
WarpMma: each warp has 16 of a tile's 64 keys and a softmax of its own, P^T stays in registers, and the
four results meet in shared memory behind a request's last tile. Values with a scale a token: v_full is
awaited before the softmax, which the scales join.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode import softmax
from pallas_kernels.paged_decode.epilogue import Store
from pallas_kernels.paged_decode.loader import Loader
from pallas_kernels.paged_decode.masking import Mask, has_unseen, where_visible
from pallas_kernels.paged_decode.mma import TileMma, WarpgroupMma, WarpMma
from pallas_kernels.paged_decode.refs import (
    Inputs,
    Outputs,
    Pipeline,
    Smem,
    output_types,
    pipeline_types,
    smem_types,
)
from pallas_kernels.paged_decode.softmax import online_softmax
from pallas_kernels.paged_decode.span import Segment, Span
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.paged_decode.tile_keys import TileKeys, entries_of, keys_of
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Columns, Scalar, Tile

CONSUMER, PRODUCER = range(2)  # warpgroups


def decode_partials(inputs: Inputs, spec: DecodeSpec) -> Outputs:
    """Attention of the requests that lie in one span, and partial results of the others."""
    kernel = plgpu.kernel(
        functools.partial(decode_body, spec=spec),
        out_type=(output_types(inputs, spec),),
        scratch_types=(smem_types(inputs.cache, spec), pipeline_types(inputs.cache, spec)),
        grid=(spec.num_spans, spec.shape.head_tiles),
        grid_names=("span", "head_tile"),
        num_threads=2,
        thread_name="warpgroup",
        # Warps share nothing but Smem.merge, whose barriers stand in ptx/warp_results.py.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=spec.sizes.per_warp_mma
        ),
        kernel_name="paged_decode",
        interpret=spec.interpret,
    )
    (outputs,) = kernel(inputs)
    return outputs


def decode_body(
    inputs: Inputs, outputs: Outputs, smem: Smem, pipeline: Pipeline, *, spec: DecodeSpec
) -> None:
    """What a thread block does; refs of `inputs` and `outputs` are in global memory."""
    number, head_tile = lax.axis_index("span"), lax.axis_index("head_tile")
    cache = inputs.cache
    span = Span(number, head_tile, cache.seq_lens, inputs.unit_ends, inputs.lists.counts, spec)

    def produce() -> None:
        Loader(inputs, smem, pipeline, span).load_span()

    def consume() -> None:
        Attention(inputs, outputs, smem, pipeline, span).attend_span()

    @pl.when(lax.axis_index("warpgroup") == PRODUCER)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            pl.when(warp == 0)(produce)

    pl.when(lax.axis_index("warpgroup") == CONSUMER)(consume)


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
        make_products = WarpMma if self.spec.sizes.per_warp_mma else WarpgroupMma
        self.products: TileMma = make_products(smem, pipeline, self.spec)
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
        k_factor = softmax.of_head(cache.k_scale, segment)
        v_factor = softmax.of_head(cache.v_scale, segment)  # its latency passes beside the first keys'
        plgpu.barrier_wait(self.pipeline.q_full.at[buffer])
        start = *self.products.start(), entries_of(segment, 0, self.inputs.lists.ids, self.spec), step
        operand, factor = self.products.query(self.smem.q.at[buffer])
        query = SegmentQuery(segment, operand, factor, 1.0 if k_factor is None else k_factor, slopes)
        state = lax.fori_loop(
            0, segment.num_tiles, functools.partial(self.attend_tile, query), TileState(*start)
        )
        accs, top, total = self.products.merged(state.accs, state.top, state.total)
        accs = tuple(
            softmax.scaled_output(acc, chunk, segment, cache.v_scale, v_factor)
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
            s = s * softmax.of_keys(k_scale_s, stage, self.spec.tile)
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
            scale = softmax.of_keys(v_scale_s, stage, self.spec.tile)
            seen = functools.partial(where_visible, scale, segment, keys, 1.0)
            weight = lax.cond(has_unseen(segment, keys), seen, lambda: scale)
        if self.products.widens_values:
            plgpu.barrier_arrive(self.pipeline.v_free.at[stage])
        return weight
