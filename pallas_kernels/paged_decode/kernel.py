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
    paged_decode_combine, the next kernel (combine.py): merges the split outputs of each request that
    was split

Without TMA (`DecodeSizes.uses_tma`), there is one warpgroup. It issues the loads itself, by cp.async: where
it would arrive at a barrier `free`, each warp starts to fill its rows of the stage again, and where it would
wait at a barrier `full`, it waits for its own copies. This requires WarpMma.

A barrier `full` completes when all its TMA copies have arrived, a barrier `free` when the consumer arrives.
WarpgroupMma: the whole warpgroup computes each product, and P^T passes through shared memory. 8-bit values
    are dequantized through shared memory before the mask. In this case, the warpgroup waits for v_full before
    it dequantizes, and arrives at v_free before the softmax.
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

from pallas_kernels.paged_decode.loader import (
    CpAsyncPipeline,
    DecodeLoader,
    Pipeline,
    TileCopies,
    TmaPipeline,
)
from pallas_kernels.paged_decode.mma import TileMma, WarpgroupMma, WarpMma
from pallas_kernels.paged_decode.span import Segment, Span, SpanCursor, TileKeys, get_tile_keys, read_entries
from pallas_kernels.paged_decode.spec import (
    DecodeBarriers,
    DecodeInputs,
    DecodeOutputs,
    DecodeSmem,
    DecodeSpec,
    barrier_types,
    output_types,
    smem_refs,
    smem_types,
)
from pallas_kernels.ptx.stores import store_transposed
from pallas_kernels.score_mod import PairValue, Positions, ScoreTile
from pallas_kernels.shared.layouts import COLUMN, ROW, WGMMA
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.paged_kv import load_head_scale
from pallas_kernels.shared.softmax import LOG2E, finalize_softmax
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile

CONSUMER, LOADER = range(2)  # warpgroups
SMALLEST_SCALE = 2.0**-60


def run_decode_kernel(inputs: DecodeInputs, spec: DecodeSpec) -> DecodeOutputs:
    """Return the outputs of requests that lie in one span, and the split outputs of all other requests."""
    kernel = plgpu.kernel(
        functools.partial(decode_body, spec=spec),
        out_type=(output_types(inputs, spec),),
        scratch_types=(
            smem_types(inputs.kv, spec),
            barrier_types(spec) if spec.sizes.uses_tma else None,
        ),
        grid=(spec.num_spans, spec.head_tiles),
        grid_names=("span", "head_tile"),
        num_threads=2 if spec.sizes.uses_tma else 1,
        thread_name="warpgroup",
        # Warps share only DecodeSmem.warp_outputs, whose barriers are in ptx/warp_mma.py.
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
    scratch: Ref,
    barriers: DecodeBarriers | None,
    *,
    spec: DecodeSpec,
) -> None:
    """Compute attention for the span of one thread block (see `span`) and one tile of query rows.

    The refs of `inputs` and `outputs` are in global memory, `scratch` is that of `smem_types`. Without TMA
    there are no barriers.
    """
    index, head_tile = lax.axis_index("span"), lax.axis_index("head_tile")
    span = Span(index, head_tile, inputs.seq_lens, inputs.unit_ends, inputs.lists.counts, spec)
    smem = smem_refs(scratch, spec)
    if barriers is None:
        pipeline = CpAsyncPipeline(inputs, smem, None, span)
        DecodeConsumer(inputs, outputs, smem, pipeline, span).attend_span()
        return

    @pl.when(lax.axis_index("warpgroup") == LOADER)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            pl.when(warp == 0)(DecodeLoader(inputs, smem, barriers, span).load_span)

    @pl.when(lax.axis_index("warpgroup") == CONSUMER)
    def _() -> None:
        DecodeConsumer(inputs, outputs, smem, TmaPipeline(barriers), span).attend_span()


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


class DecodeTileState(NamedTuple):
    """Loop state of `attend_tile`.

    Attributes:
        accs: Accumulators of O^T, in the layout of `TileMma.init_state`.
        row_max: Maximum score of each query so far.
        row_sum: Sum of the exponentials so far, one partial sum per thread.
        entries: List entries of the next tile.
        copies: Copies of the tile that takes this tile's stage; empty if another warp issues them.
        step: Number of tiles of the span that have been processed.
    """

    accs: tuple[Tile, ...]
    row_max: Columns | Tile
    row_sum: Tile
    entries: tuple[Scalar, ...]
    copies: TileCopies
    step: Scalar


class DecodeConsumer:
    """The warpgroup that computes scores, softmax and values of a span, one tile at a time."""

    def __init__(
        self,
        inputs: DecodeInputs,
        outputs: DecodeOutputs,
        smem: DecodeSmem,
        pipeline: Pipeline,
        span: Span,
    ):
        self.inputs, self.outputs, self.smem, self.pipeline = inputs, outputs, smem, pipeline
        self.span, self.head_tile, self.spec = span, span.head_tile, span.spec
        self.mma: TileMma = (WarpMma if self.spec.sizes.per_warp_mma else WarpgroupMma)(smem, self.spec)
        # For each element of a tile of scores its row, and the query row of the tile's first column.
        shape = self.spec.shape
        self.rows = plgpu.broadcasted_iota(jnp.int32, self.spec.tile, 0, layout=WGMMA)
        self.first_query_row = lax.rem(span.head_tile, jnp.int32(shape.row_tiles)) * shape.tile_q

    def attend_span(self) -> None:
        """Process the segments of the span in order."""
        span, loop = self.span, self.span.loop()

        def attend(_: Scalar, cursor: SpanCursor) -> SpanCursor:
            # Read one row ahead, so that the latency passes during the segment.
            next_row = span.read_row(cursor.row.number + 1, start=cursor.row.end)
            segment = span.segment(cursor, loop.stop)
            attend_segment = functools.partial(
                self.attend_segment, segment, cursor.step, cursor.segment_index
            )
            pl.when(segment.is_nonempty)(attend_segment)
            return span.advance(cursor, segment, next_row)

        lax.fori_loop(0, loop.num_segments, attend, loop.first)

    def attend_segment(self, segment: Segment, step: Scalar, segment_index: Scalar) -> None:
        """Process all tiles of a segment that is not empty.

        Args:
            segment: Segment.
            step: Number of tiles of the span before the segment.
            segment_index: Number of non-empty segments of the span before this one; selects the query buffer.
        """
        pipeline = self.pipeline
        buffer = lax.rem(segment_index, jnp.int32(pipeline.num_query_buffers))
        copies = pipeline.start_segment(segment, step)
        slopes, kv = self.inputs.slopes, self.inputs.kv
        # Load the slopes and the static scales first: their latency passes while the first keys arrive.
        if slopes is not None:
            slopes = plgpu.load(slopes.at[segment.request_head_tile], layout=COLUMN, optimized=False)
        k_scale, v_scale = [
            load_head_scale(scale, segment.kv_head) if scale is not None and scale.ndim == 1 else None
            for scale in (kv.k_scale, kv.v_scale)
        ]
        # Wait for the segment's queries.
        pipeline.wait_queries(buffer)
        entries = read_entries(segment, 0, self.inputs.lists.ids, self.spec)
        state = DecodeTileState(*self.mma.init_state(), entries, copies, step)
        query, query_factor = self.mma.load_query(self.smem.q.at[buffer])
        common = SegmentInputs(segment, query, query_factor, 1.0 if k_scale is None else k_scale, slopes)
        # Main loop: one tile of keys and values per iteration.
        attend_tile = functools.partial(self.attend_tile, common)
        state = lax.fori_loop(0, segment.num_tiles, attend_tile, state)
        # Epilogue: combine the warps, and apply the scale of the values unless it is per token. The results
        # are O^T of each chunk, [width, tile_q], not normalized, and row_max is times log2(e).
        accs, row_max, row_sum = self.mma.combine_warps(state.accs, state.row_max, state.row_sum)
        if v_scale is not None:
            accs = tuple([acc * v_scale for acc in accs])
        elif kv.v_scale is not None and not self.spec.has_token_scales[1]:  # one scale per channel
            scaled = []
            for chunk, acc in enumerate(accs):
                scale_g = kv.v_scale.at[segment.kv_head, chunk]
                scale = plgpu.load(scale_g, layout=ROW, optimized=False)
                scaled.append(acc * lax.broadcast_in_dim(scale, acc.shape, [0]))
            accs = tuple(scaled)
        outputs, sinks, head_tile = self.outputs, self.inputs.sinks, self.head_tile

        # A complete request: normalize and store its output.
        @pl.when(segment.is_complete)
        def _() -> None:
            sink = None
            if sinks is not None:
                sink = plgpu.load(sinks.at[segment.request_head_tile], layout=COLUMN, optimized=False)
                # A padding row has no keys and no sink: its output is 0.
                sink = jnp.minimum(sink, jnp.where(segment.seq_len > 0, jnp.inf, -jnp.inf))
            factor, lse = finalize_softmax(row_max, row_sum, sink)
            store_unoptimized(outputs.lse.at[segment.row, head_tile], lse)
            for chunk, acc in enumerate(accs):
                chunk_index = (chunk,) if self.spec.shape.head.is_padded else ()
                out = outputs.out.at[(segment.row, head_tile, slice(None), *chunk_index)]
                acc = acc * lax.broadcast_in_dim(factor, acc.shape, [1])
                store_transposed(out, acc, is_interpreted=self.spec.is_interpreted)

        # A part of a request: store a split output, which the combine kernel merges with the others.
        @pl.when(jnp.logical_not(segment.is_complete))
        def _() -> None:
            splits, index = outputs.splits, (segment.split_index, head_tile)
            for chunk, acc in enumerate(accs):
                splits.out[(*index, chunk)] = acc
            store_unoptimized(splits.row_max.at[index], row_max)
            store_unoptimized(splits.row_sum.at[index], row_sum)

        # Free the query buffer only now: WarpgroupMma reads it for every tile.
        pipeline.release_queries(buffer)

    def attend_tile(
        self, common: SegmentInputs, tile_index: Scalar, state: DecodeTileState
    ) -> DecodeTileState:
        """Add one tile of keys and values to a segment's attention."""
        spec, mma, smem, pipeline, score = self.spec, self.mma, self.smem, self.pipeline, self.spec.score
        segment, stage = common.segment, lax.rem(state.step, jnp.int32(spec.sizes.stages))
        keys = get_tile_keys(segment, tile_index, state.entries, self.inputs.lists.ids, spec)
        # Read the list entries of the next tile now, so that their latency passes during this one.
        entries = read_entries(segment, tile_index + 1, self.inputs.lists.ids, spec)

        next_copies = pipeline.copies_after(segment, tile_index)

        # Keys: wait until they and their scales have arrived, multiply, scale and cap.
        pipeline.wait_keys(stage)
        s = mma.qk(stage, common.query)
        if smem.k_scale is not None:
            s = s * self.load_token_scales(smem.k_scale, stage)
        if score.soft_cap is None:
            s = s * (common.query_factor * (common.k_scale * (score.scale * LOG2E)))
        else:
            s = s * (common.query_factor * (common.k_scale * (score.scale / score.soft_cap)))
            s = jnp.tanh(s) * (score.soft_cap * LOG2E)
        # Release the keys: they and their scales have been read, so that the stage may be filled again.
        pipeline.release_keys(stage, segment, tile_index, state.copies)

        # 8-bit values of WarpgroupMma: wait for them and dequantize before the mask, whose registers come
        # after.
        if mma.dequantizes_values:
            pipeline.wait_values(stage)
            mma.dequantize_values(stage, segment, keys)

        # ALiBi and mask: before the maximum, which must not see masked-out scores.
        s = self.mask_scores(s, segment, keys, common.slopes)

        # Scales per token arrive with the values; those of masked-out keys may be NaN.
        v_scale = None
        if smem.v_scale is not None:
            if not mma.dequantizes_values:
                pipeline.wait_values(stage)
            loaded = self.load_token_scales(smem.v_scale, stage)
            clear = functools.partial(keys.where_visible, loaded, segment, 1.0)
            v_scale = lax.cond(keys.has_masked_out(segment), clear, lambda: loaded)
        # Release dequantized values early: they and their scales have been read.
        if mma.dequantizes_values:
            pipeline.release_values(stage, segment, tile_index, state.copies)

        # Softmax, in powers of 2. f16 must hold the probability times the scale, so that the scale takes part
        # in the maximum.
        scaled = s
        if v_scale is not None and mma.log2_headroom:
            scaled = s + jnp.log2(jnp.maximum(v_scale, SMALLEST_SCALE))
        tile_max = mma.row_max(scaled)
        row_max = jnp.maximum(state.row_max, tile_max - mma.log2_headroom if mma.log2_headroom else tile_max)
        # Without a visible key so far the maximum is -inf, and subtracting it would give NaN.
        finite_max = row_max if mma.row_max_is_finite else jnp.where(row_max == -jnp.inf, 0.0, row_max)
        alpha = jnp.exp2(state.row_max - finite_max)
        p = jnp.exp2(s - mma.broadcast(finite_max))
        row_sum = state.row_sum * mma.broadcast(alpha) + p
        p = mma.store_probabilities(p if v_scale is None else p * v_scale)

        # Values: wait for them, unless that is done, multiply, and release them.
        if not mma.dequantizes_values and smem.v_scale is None:
            pipeline.wait_values(stage)
        accs = mma.pv(state.accs, alpha, p, stage, segment, keys)
        if not mma.dequantizes_values:
            pipeline.release_values(stage, segment, tile_index, state.copies)
        return DecodeTileState(accs, row_max, row_sum, entries, next_copies, state.step + 1)

    def load_token_scales(self, scale_s: Ref, stage: Scalar) -> Tile:
        """Return the scale of each token of a stage, broadcast over the token's row of a tile."""
        scale = plgpu.load(scale_s.at[stage], layout=ROW, optimized=False)
        return lax.broadcast_in_dim(scale, self.spec.tile, [0])

    def mask_scores(self, s: Tile, segment: Segment, keys: TileKeys, slopes: Columns | None) -> Tile:
        """Apply ALiBi's bias and the score function; -inf where a query does not attend to a key.

        Args:
            s: Scores times log2(e), [tile_kv, tile_q].
            segment: Segment of the tile.
            keys: Key positions of the tile.
            slopes: ALiBi slopes times log2(e), or None.
        """
        spec, shape, score, rows = self.spec, self.spec.shape, self.spec.score, self.rows
        seq_len = segment.seq_len
        # Position of each column's query; a scalar if all columns belong to one token.
        position = seq_len - 1
        if shape.query_len > 1:
            query_rows = self.query_rows()
            position = lax.div(query_rows, jnp.full_like(query_rows, shape.group)) + (
                seq_len - shape.query_len
            )
        # ALiBi: minus the slope times the distance to the key, or its square root.
        if slopes is not None:
            distance = (position - keys.row_positions(rows)).astype(jnp.float32)
            if score.sqrt_alibi:
                distance = jnp.sqrt(jnp.maximum(distance, 0.0))
            s = s - lax.broadcast_in_dim(slopes, spec.tile, [1]) * distance
        if self.inputs.score_mod is not None:
            score_tile = self.score_tile(segment, keys)
            lookups = self.inputs.score_mod.load(score_tile)
            new_scores = self.inputs.score_mod.apply(s, 1 / LOG2E, score_tile, lookups)
            s = new_scores.tile * (new_scores.factor * LOG2E)
            if new_scores.query_term is not None:
                query_term, axes = new_scores.query_term * LOG2E, (1,) if new_scores.query_term.ndim else ()
                s = s + lax.broadcast_in_dim(query_term, spec.tile, axes)
        # Causal, window and chunk masks, unless every query attends to every key of the tile.
        first_key_for_all, _ = score.key_range(seq_len - 1, seq_len)
        _, end_key_for_all = score.key_range(seq_len - shape.query_len, seq_len)

        def mask_range() -> Tile:
            key = keys.row_positions(rows)
            first_key, end_key = score.key_range(position, seq_len)
            return jnp.where((key >= first_key) & (key < end_key), s, -jnp.inf)

        s = lax.cond(keys.has_key_outside(first_key_for_all, end_key_for_all), mask_range, lambda: s)
        # Sparse blocks that a query head does not visit: each list entry has one bit per head of the group.
        if shape.lists_have_head_bits:
            query_rows = self.query_rows()
            head = lax.rem(query_rows, jnp.full_like(query_rows, shape.group))
            s = jnp.where(lax.shift_right_logical(keys.row_head_bits(rows), head) & 1 != 0, s, -jnp.inf)
        return s

    def query_rows(self) -> Tile:
        """Return, for each column of the scores, the index of its query row among the rows of the KV head."""
        return plgpu.broadcasted_iota(jnp.int32, self.spec.tile, 1, layout=WGMMA) + self.first_query_row

    def score_tile(self, segment: Segment, keys: TileKeys) -> ScoreTile:
        """Return the pairs of a tile, with one key per row and one query per column."""
        shape, (tile_kv, tile_q) = self.spec.shape, self.spec.tile
        first_head = segment.kv_head * shape.group
        query_rows = functools.partial(plgpu.broadcasted_iota, jnp.int32, (tile_q,), 0, layout=COLUMN)

        def head() -> Columns | Scalar:
            if shape.group == 1:
                return first_head
            rows = query_rows() + self.first_query_row
            return lax.rem(rows, jnp.full_like(rows, shape.group)) + first_head

        def query_index() -> Columns:
            rows = query_rows() + self.first_query_row
            return lax.div(rows, jnp.full_like(rows, shape.group))

        has_queries, num_rows = shape.query_len > 1, shape.query_len * shape.group + tile_q
        return ScoreTile(
            shape=self.spec.tile,
            request=segment.request,
            head=PairValue(head, () if shape.group == 1 else (1,)),
            query=Positions(
                segment.seq_len - shape.query_len,
                query_index if has_queries else None,
                (1,) if has_queries else (),
                num_rows // shape.group,
            ),
            key=Positions(segment.seq_len * 0, lambda: keys.positions(tile_kv), (0,), None),
            query_axis=1,
            is_interpreted=self.spec.is_interpreted,
        )
