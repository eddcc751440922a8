"""The decode kernel: S^T = K Q^T, softmax along the keys, O^T = V^T P^T, over one span.

Keys are the M of the tensor core and queries its N (swap-AB), so that a group of 4 query heads takes 8
columns instead of 64 rows. A thread block has one span of the schedule and one tile of query rows. Its loader
and its consumer walk over the same segments (n) and tiles (i, over all segments; s = i % stages) and
synchronize by barriers only:

    loader: warp 0 of warpgroup 1        shared memory    consumer: warpgroup 0
    -------------------------------      -------------    ----------------------------------------------
    for each segment n of the span:                       for each segment n of the span:
      block ids of its first tile
      wait q_free[n % 2]                                    wait q_full[n % 2]
      TMA: queries --------------------> Q [2] -----------> (WarpMma: into registers)
      for each tile i:                                      for each tile i:
        wait k_free[s]                                        wait k_full[s]
        TMA: keys, token scales -------> K [stages] --------> S^T = K Q^T
                                                              arrive k_free[s]
        wait v_free[s]                                        mask, softmax: P^T in 16 bits
        TMA: values, token scales -----> V [stages] --+       wait v_full[s]
        (block ids of tile i + 1 are                  +-----> O^T = O^T * alpha + V^T P^T
         read before these waits)                             arrive v_free[s]
                                                            complete request: out, lse     --> global memory
                                                            else O^T, row max, row sum     --> split output
                                                            arrive q_free[n % 2]
    paged_decode_combine, the next kernel (combine.py): merges the split outputs of each request that was
    split

A barrier `full` completes when all its TMA copies have arrived, a barrier `free` when the consumer arrives.
WarpgroupMma: the whole warpgroup computes each product, and P^T passes through shared memory. 8-bit values
are
    dequantized through shared memory before the mask. In this case, the warpgroup waits for v_full before it
    dequantizes, and arrives at v_free before the softmax.
WarpMma: each warp has 16 of a tile's 64 keys and computes a separate softmax, P^T stays in registers, and the
    four results are combined in shared memory after a segment's last tile. If values have a scale per token,
    the warps wait for v_full before the softmax, which uses the scales.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.epilogue import DecodeEpilogue
from pallas_kernels.paged_decode.loader import DecodeLoader
from pallas_kernels.paged_decode.masking import DecodeMask, has_masked_out_keys, where_visible
from pallas_kernels.paged_decode.mma import TileMma, WarpgroupMma, WarpMma
from pallas_kernels.paged_decode.refs import (
    DecodeBarriers,
    DecodeInputs,
    DecodeOutputs,
    DecodeSmem,
    barrier_types,
    output_types,
    smem_types,
)
from pallas_kernels.paged_decode.softmax import (
    load_static_scale,
    load_token_scales,
    online_softmax,
    scale_output,
)
from pallas_kernels.paged_decode.span import Segment, Span
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.paged_decode.tile_keys import TileKeys, get_tile_keys, read_entries
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Columns, Scalar, Tile

CONSUMER, PRODUCER = range(2)  # warpgroups
W = plgpu.Layout.WGMMA


def run_decode_kernel(inputs: DecodeInputs, spec: DecodeSpec) -> DecodeOutputs:
    """Return the outputs of requests that lie in one span, and the split outputs of all other requests."""
    kernel = plgpu.kernel(
        functools.partial(decode_body, spec=spec),
        out_type=(output_types(inputs, spec),),
        scratch_types=(smem_types(inputs.cache, spec), barrier_types(inputs.cache, spec)),
        grid=(spec.num_spans, spec.shape.head_tiles),
        grid_names=("span", "head_tile"),
        num_threads=2,
        thread_name="warpgroup",
        # Warps share only DecodeSmem.warp_outputs, whose barriers are in ptx/warp_outputs.py.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=spec.sizes.per_warp_mma
        ),
        kernel_name="paged_decode",
        interpret=spec.interpret,
    )
    (outputs,) = kernel(inputs)
    return outputs


def decode_body(
    inputs: DecodeInputs,
    outputs: DecodeOutputs,
    smem: DecodeSmem,
    barriers: DecodeBarriers,
    *,
    spec: DecodeSpec,
) -> None:
    """Compute attention for the span of one thread block (see `span`) and one tile of query rows.

    The refs of `inputs` and `outputs` are in global memory.
    """
    index, head_tile = lax.axis_index("span"), lax.axis_index("head_tile")
    cache = inputs.cache
    span = Span(index, head_tile, cache.seq_lens, inputs.unit_ends, inputs.lists.counts, spec)

    def produce() -> None:
        DecodeLoader(inputs, smem, barriers, span).load_span()

    def consume() -> None:
        DecodeConsumer(inputs, outputs, smem, barriers, span).attend_span()

    @pl.when(lax.axis_index("warpgroup") == PRODUCER)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            pl.when(warp == 0)(produce)

    pl.when(lax.axis_index("warpgroup") == CONSUMER)(consume)


class SegmentInputs(NamedTuple):
    """Inputs that all tiles of a segment share.

    Attributes:
        segment: Segment that the tiles belong to.
        query: First result of `TileMma.load_query`: the queries in shared memory, or in registers.
        query_factor: Second result of `TileMma.load_query`, which the scores are multiplied by.
        k_scale: Scale that all keys of the segment share; 1.0 if there is none.
        slopes: ALiBi slopes times log2(e), or None.
    """

    segment: Segment
    query: Any
    query_factor: Tile | float
    k_scale: Scalar | float
    slopes: Columns | None


class TileState(NamedTuple):
    """Loop state of `attend_tile`.

    Attributes:
        accs: Accumulators of O^T, in the layout of `TileMma.init_state`.
        row_max: Maximum score of each query so far.
        row_sum: Sum of the exponentials so far, one partial sum per thread.
        entries: List entries of the next tile.
        step: Number of tiles of the span that have been processed.
    """

    accs: tuple[Tile, ...]
    row_max: Columns | Tile
    row_sum: Tile
    entries: tuple[Scalar, ...]
    step: Scalar


class DecodeConsumer:
    """The warpgroup that computes scores, softmax and values of a span, one tile at a time."""

    def __init__(
        self,
        inputs: DecodeInputs,
        outputs: DecodeOutputs,
        smem: DecodeSmem,
        barriers: DecodeBarriers,
        span: Span,
    ):
        self.inputs, self.smem, self.barriers, self.span, self.spec = inputs, smem, barriers, span, span.spec
        make_mma = WarpMma if self.spec.sizes.per_warp_mma else WarpgroupMma
        self.mma: TileMma = make_mma(smem, barriers, self.spec)
        self.mask = DecodeMask(self.spec, span.head_tile)
        self.epilogue = DecodeEpilogue(outputs, inputs.sinks, span.head_tile, self.spec)

    def attend_span(self) -> None:
        """Process all segments of the span in order."""

        def visit(segment: Segment, step: Scalar, segment_index: Scalar) -> None:
            pl.when(segment.is_nonempty)(lambda: self.attend_segment(segment, step, segment_index))

        self.span.walk(visit)

    def attend_segment(self, segment: Segment, step: Scalar, segment_index: Scalar) -> None:
        """Process all tiles of a segment.

        Args:
            segment: Segment with at least one unit.
            step: Number of tiles of the span before the segment.
            segment_index: Number of non-empty segments of the span before this one; selects the query buffer.
        """
        buffer = lax.rem(segment_index, jnp.int32(2))
        slopes, cache = self.inputs.slopes, self.inputs.cache
        # Load the slopes and the static scales first: their latency passes while the first keys arrive.
        if slopes is not None:
            slopes = plgpu.load(slopes.at[segment.request_head_tile], layout=W.reduce(0), optimized=False)
        k_scale = load_static_scale(cache.k_scale, segment)
        v_scale = load_static_scale(cache.v_scale, segment)
        # Wait for the segment's queries.
        plgpu.barrier_wait(self.barriers.q_full.at[buffer])
        start = *self.mma.init_state(), read_entries(segment, 0, self.inputs.lists.ids, self.spec), step
        query, query_factor = self.mma.load_query(self.smem.q.at[buffer])
        common = SegmentInputs(segment, query, query_factor, 1.0 if k_scale is None else k_scale, slopes)
        # Main loop: one tile of keys and values per iteration.
        state = lax.fori_loop(
            0, segment.num_tiles, functools.partial(self.attend_tile, common), TileState(*start)
        )
        # Epilogue: combine the warps, apply the static scale of the values, store.
        accs, row_max, row_sum = self.mma.combine_warps(state.accs, state.row_max, state.row_sum)
        accs = tuple(
            scale_output(acc, chunk, segment, cache.v_scale, v_scale) for chunk, acc in enumerate(accs)
        )
        self.epilogue.store(segment, accs, row_max, row_sum)
        # Free the query buffer only now: WarpgroupMma reads it for every tile.
        plgpu.barrier_arrive(self.barriers.q_free.at[buffer])

    def attend_tile(self, common: SegmentInputs, tile_index: Scalar, state: TileState) -> TileState:
        """Add one tile of keys and values to a segment's attention."""
        segment, stage = common.segment, lax.rem(state.step, jnp.int32(self.spec.sizes.stages))
        keys = get_tile_keys(segment, tile_index, state.entries, self.spec)
        # Read the list entries of the next tile now, so that their latency passes during this one.
        entries = read_entries(segment, tile_index + 1, self.inputs.lists.ids, self.spec)

        # Scores: wait for the keys, multiply, free their stage.
        s = self.scores(stage, common)
        # 8-bit values of WarpgroupMma: wait for them and dequantize before the mask, whose registers come
        # after.
        self.mma.dequantize_values(stage, segment, keys)
        # ALiBi and mask.
        s = self.mask.apply(s, segment, keys, common.slopes)
        token_scales = self.load_value_scales(stage, segment, keys)

        # Softmax, then P V: wait for the values (unless done above), multiply, free their stage.
        p, alpha, row_max, row_sum = online_softmax(s, token_scales, state.row_max, state.row_sum, self.mma)
        accs = self.mma.accumulate_pv(state.accs, alpha, p, stage, segment, keys)
        return TileState(accs, row_max, row_sum, entries, state.step + 1)

    def scores(self, stage: Scalar, common: SegmentInputs) -> Tile:
        """Return S^T of a stage times log2(e), scaled and soft-capped, and free the stage's keys."""
        score, k_scale_s = self.spec.score, self.smem.k_scale
        # Wait until all copies of the keys, and of their scales, have arrived.
        plgpu.barrier_wait(self.barriers.k_full.at[stage])
        s = self.mma.qk(stage, common.query)
        if k_scale_s is not None:
            s = s * load_token_scales(k_scale_s, stage, self.spec.tile)
        if score.soft_cap is None:
            s = s * (common.query_factor * (common.k_scale * (score.scale * LOG2E)))
        else:
            s = s * (common.query_factor * (common.k_scale * (score.scale / score.soft_cap)))
            s = jnp.tanh(s) * (score.soft_cap * LOG2E)
        # Keys and scales have been read: the loader may refill the stage.
        plgpu.barrier_arrive(self.barriers.k_free.at[stage])
        return s

    def load_value_scales(self, stage: Scalar, segment: Segment, keys: TileKeys) -> Tile | None:
        """Return the scale of each key's value over a tile, or None without scales per token.

        If `dequantize_values` has read the values already, this frees their stage.
        """
        v_scale_s, scales = self.smem.v_scale, None
        if v_scale_s is not None:
            # The scales arrive with the values; dequantize_values has waited for both already.
            if not self.mma.dequantizes_values:
                plgpu.barrier_wait(self.barriers.v_full.at[stage])
            loaded = load_token_scales(v_scale_s, stage, self.spec.tile)
            # Scales of masked-out keys may be NaN.
            clear = functools.partial(where_visible, loaded, segment, keys, 1.0)
            scales = lax.cond(has_masked_out_keys(segment, keys), clear, lambda: loaded)
        if self.mma.dequantizes_values:
            plgpu.barrier_arrive(self.barriers.v_free.at[stage])
        return scales
