"""What multiplies a tile: the protocol that the whole warpgroup and its warps alone both meet.

WarpgroupMma: wgmma over 64 or 128 keys and up to 64 query rows; warps wait for each other between the two
products. WarpMma: mma.sync, each warp 16 keys of 64, few rows; they wait for nobody until a segment ends.
DecodeSizes.per_warp_mma says which is compiled.
"""

import functools
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.masking import has_unseen, where_visible
from pallas_kernels.paged_decode.refs import Pipeline, Smem
from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.paged_decode.tile_keys import TileKeys
from pallas_kernels.ptx.warp_mma import pv_mma, qk_mma, warp_row_max
from pallas_kernels.ptx.warp_outputs import store_warp_outputs
from pallas_kernels.ptx.warp_query import WARPS, WarpTile, load_query_fragments
from pallas_kernels.shared.dequant import load_dequantized
from pallas_kernels.shared.memory import swizzle_bytes
from pallas_kernels.shared.paged_kv import clear_masked_out
from pallas_kernels.shared.types import Columns, Ref, Scalar, Slice, Tile

W = plgpu.Layout.WGMMA
f32 = jnp.float32
# f16 probabilities go up to 2 ** 14, not 1: small ones, and small scales, would lose bits as subnormals.
HEADROOM = 14


@runtime_checkable
class TileMma(Protocol):
    """K Q^T and V^T P of one tile, and the reductions between them; state is in the caller's hands.

    Asked in this order: `start` and `query` once a segment; then of every tile `scores`, `widen_values`,
    `largest` and `spread` (through the softmax), `add_values`; `merged` once, after the segment's last tile.
    All threads of the warpgroup ask, with the same scalars.

    Who waits for what a stage holds, and who frees it:
        keys: the caller waits before `scores` and frees them behind it.
        values, where `widens_values`: `widen_values` waits; the caller frees them once it has read their
            scales, before `largest`.
        other values with a scale per token: the caller waits, for the scales; `add_values` frees them.
        other values: `add_values` waits for them and frees them.

    Accumulators, largest scores and sums may be of any form that `start` makes, as long as they go through
    jax.lax.fori_loop; only `merged` gives them the form that all results have.

    Attributes:
        headroom: The softmax may let probabilities grow to 2 ** headroom, since they are rounded to f16; 0:
            to 1.
        sees_a_key: Each query has seen a key after any tile, so that its largest score is finite.
        widens_values: 8-bit values pass through shared memory on their way to the tensor core.
    """

    headroom: int
    sees_a_key: bool
    widens_values: bool

    def start(self) -> tuple[tuple[Tile, ...], Columns | Tile, Tile]:
        """Accumulators, largest scores and sums of a request's first tile."""
        ...

    def query(self, q_s: Ref) -> tuple[Any, Any]:
        """The queries of a request in the form that `scores` wants, and what scores are to be multiplied by.

        Args:
            q_s: [chunks, tile_q, width] in SMEM, full; the caller frees it behind the last tile.
        """
        ...

    def scores(self, stage: Scalar, query: Any) -> Tile:
        """K Q^T of a stage: [tile_kv, tile_q] f32. Its keys have been read when it returns."""
        ...

    def widen_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """Waits for values and widens them where `widens_values`; of keys that no query sees, to 0."""
        ...

    def largest(self, s: Tile) -> Columns | Tile:
        """The largest of each query's scores."""
        ...

    def spread(self, x: Columns | Tile) -> Tile:
        """What is known of each query, such as its largest score, over a tile."""
        ...

    def add_values(
        self,
        accs: tuple[Tile, ...],
        shrink: Columns | Tile,
        p: Tile,
        stage: Scalar,
        segment: Segment,
        keys: TileKeys,
    ) -> tuple[Tile, ...]:
        """Accs * shrink + V^T P, p rounded to 16 bits. Values of keys that no query sees count as 0."""
        ...

    def merged(
        self, accs: tuple[Tile, ...], top: Columns | Tile, total: Tile
    ) -> tuple[tuple[Tile, ...], Columns, Columns]:
        """O^T a chunk, [width, tile_q] in the layout WGMMA; each query's largest score and its sum."""
        ...


class WarpgroupMma(TileMma):
    """See TileMma. A largest score and a shrinking factor for each query, whole in every warp."""

    def __init__(self, smem: Smem, pipeline: Pipeline, spec: DecodeSpec):
        self.smem, self.pipeline, self.cut, self.dtype = smem, pipeline, spec.shape.cut, spec.dtype
        self.tile, self.is_interpreted = spec.tile, spec.is_interpreted
        self.headroom = HEADROOM if spec.dtype == jnp.float16 and smem.v_scale is not None else 0
        self.widens_values = smem.v.dtype != spec.dtype
        # A lone query sees a key of every tile that is not from a list; others may have seen none yet.
        self.sees_a_key = spec.shape.query_len == 1 and not spec.shape.list_block_size

    def spread(self, x: Columns) -> Tile:
        """One value a query, over a tile."""
        return lax.broadcast_in_dim(x, self.tile, [1])

    def start(self) -> tuple[tuple[Tile, ...], Columns, Tile]:
        """Accumulators a chunk, [width, tile_q]."""
        zeros = lambda *size: plgpu.layout_cast(jnp.zeros(size, f32), W)
        rows = self.tile[1]
        lowest = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, f32), W.reduce(0))
        return (
            tuple(zeros(self.cut.width, rows) for _ in range(self.cut.num_chunks)),
            lowest,
            zeros(*self.tile),
        )

    def query(self, q_s: Ref) -> tuple[Ref, float]:
        """They stay where they are."""
        return q_s, 1.0

    def scores(self, stage: Scalar, query: Ref) -> Tile:
        """K Q^T of a stage."""

        def product(acc: Ref) -> Tile:
            for chunk in range(self.cut.num_chunks):
                for columns, operand in self.key_operands(stage, chunk):
                    plgpu.wgmma(acc, operand, query.at[chunk, :, columns].T)
            # Waits: values widened beside this product would need more registers than two thread blocks have.
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC(self.tile, f32))

    def key_operands(self, stage: Scalar, chunk: int) -> Iterator[tuple[Slice, Ref]]:
        """A chunk of keys as the tensor core takes it: (columns, operand) one after the other."""
        tile_s = self.smem.k.at[stage, chunk]
        if self.smem.k.dtype == self.dtype:
            yield slice(None), tile_s
            return
        for columns in pieces(self.cut.width):
            operand = load_dequantized(tile_s.at[:, columns], self.dtype)
            if self.is_interpreted:  # it takes no operand from registers
                self.smem.wide[chunk, :, columns] = operand
                operand = self.smem.wide.at[chunk, :, columns]
            yield columns, operand

    def largest(self, s: Tile) -> Columns:
        """The largest of each query's scores."""
        return s.max(axis=0)

    def widen_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """8-bit values of a stage into shared memory of 16 bits."""
        if not self.widens_values:
            return
        plgpu.barrier_wait(self.pipeline.v_full.at[stage])
        for chunk in range(self.cut.num_chunks):
            for columns in pieces(self.cut.width):
                v = load_dequantized(self.smem.v.at[stage, chunk, :, columns], self.dtype)
                seen = functools.partial(where_visible, v, segment, keys, 0.0)
                v = lax.cond(has_unseen(segment, keys), seen, lambda v=v: v)
                self.smem.wide[chunk, :, columns] = v

    def clear_unseen_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """A probability of 0 hides no NaN."""

        @pl.when(has_unseen(segment, keys))
        def _() -> None:
            rows = pl.ds(0, self.tile[0])
            clear_masked_out(self.smem.v.at[stage], rows, keys.over, segment.low, segment.high)
            plgpu.commit_smem()

    def add_values(
        self,
        accs: tuple[Tile, ...],
        shrink: Columns,
        p: Tile,
        stage: Scalar,
        segment: Segment,
        keys: TileKeys,
    ) -> tuple[Tile, ...]:
        """Accs * shrink + V^T P, p through shared memory."""
        self.smem.p.T[...] = plgpu.layout_cast(p.astype(self.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        if not self.widens_values:
            plgpu.barrier_wait(self.pipeline.v_full.at[stage])
            self.clear_unseen_values(stage, segment, keys)
        column = lambda acc: lax.broadcast_in_dim(shrink, acc.shape, [1])
        accs = tuple(self.add_chunk(acc * column(acc), stage, chunk) for chunk, acc in enumerate(accs))
        if not self.widens_values:
            plgpu.barrier_arrive(self.pipeline.v_free.at[stage])
        return accs

    def add_chunk(self, acc: Tile, stage: Scalar, chunk: int) -> Tile:
        """Acc + V^T P for one chunk of a head."""

        def product(ref: Ref) -> None:
            values = self.smem.wide.at[chunk] if self.widens_values else self.smem.v.at[stage, chunk]
            plgpu.wgmma(ref, values.T, self.smem.p.T)

        def product_alone(ref: Ref) -> Tile:
            product(ref)
            return ref[...]

        if self.is_interpreted:  # it has no run_state of an accumulator
            rows, columns = acc.shape
            return acc + pl.run_scoped(product_alone, plgpu.ACC((rows, columns), f32))
        return pl.run_state(product)(plgpu.ACC.init(acc))

    def merged(
        self, accs: tuple[Tile, ...], top: Columns, total: Tile
    ) -> tuple[tuple[Tile, ...], Columns, Columns]:
        """Only the sums are apart: each thread has its keys'."""
        return accs, top, total.sum(axis=0)


def pieces(width: int) -> list[Slice]:
    """The columns of an 8-bit tile that are widened together: a row of shared memory's swizzle."""
    span = swizzle_bytes(1)
    return [pl.ds(start, span) for start in range(0, width, span)]


class WarpMma(TileMma):
    """See TileMma. A warp's largest scores, sums and accumulators are of its own 16 keys.

    Arrays of a tile are [64, rows]: row 16 w + i belongs to warp w. The accumulators are a tuple of them, one
    for every 16 columns of a head.
    """

    sees_a_key = False  # a warp's own keys may all be unseen
    widens_values = False  # on the way into the tensor core, in registers

    def __init__(self, smem: Smem, pipeline: Pipeline, spec: DecodeSpec):
        self.smem, self.pipeline = smem, pipeline
        self.cut, self.is_interpreted = spec.shape.cut, spec.is_interpreted
        dtypes = jnp.dtype(spec.dtype), smem.k.dtype, smem.v.dtype
        self.tile = WarpTile(spec.shape.tile_q, self.cut, *dtypes)
        self.headroom = HEADROOM if self.tile.value_operand == jnp.float16 else 0

    def spread(self, x: Tile) -> Tile:
        """It is spread already."""
        return x

    def zeros(self) -> Tile:
        """Nothing summed yet."""
        return plgpu.layout_cast(jnp.zeros(self.tile.shape, f32), W)

    def start(self) -> tuple[tuple[Tile, ...], Tile, Tile]:
        """One accumulator for every 16 columns of a head."""
        lowest = plgpu.layout_cast(jnp.full(self.tile.shape, -jnp.inf, f32), W)
        return tuple(self.zeros() for _ in range(self.tile.num_accs)), lowest, self.zeros()

    def query(self, q_s: Ref) -> tuple[Tile, Tile]:
        """The queries in registers, as the tensor core's right operand."""
        return load_query_fragments(q_s, tile=self.tile, is_interpreted=self.is_interpreted)

    def scores(self, stage: Scalar, query: Tile) -> Tile:
        """K Q^T of a stage."""
        k_s = self.smem.k.at[stage]
        return qk_mma(k_s, query, tile=self.tile, is_interpreted=self.is_interpreted)

    def widen_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """Nothing: see add_values."""

    def largest(self, s: Tile) -> Tile:
        """The largest of each warp's rows, in all of its rows."""
        return warp_row_max(s, tile=self.tile, is_interpreted=self.is_interpreted)

    def add_values(
        self,
        accs: tuple[Tile, ...],
        shrink: Tile,
        p: Tile,
        stage: Scalar,
        segment: Segment,
        keys: TileKeys,
    ) -> tuple[Tile, ...]:
        """Accs * shrink + V^T P of each warp's keys."""
        if self.smem.v_scale is None:
            plgpu.barrier_wait(self.pipeline.v_full.at[stage])
        accs = pv_mma(
            self.smem.v.at[stage],
            p,
            [acc * shrink for acc in accs],
            segment.low,
            segment.high,
            keys.firsts,
            piece=keys.piece,
            tile=self.tile,
            is_interpreted=self.is_interpreted,
        )
        plgpu.barrier_arrive(self.pipeline.v_free.at[stage])
        return accs

    def merged(
        self, accs: tuple[Tile, ...], top: Tile, total: Tile
    ) -> tuple[tuple[Tile, ...], Columns, Columns]:
        """The four warps' results as one."""
        merge_s, dim = self.smem.merge, self.cut.padded_dim
        store_warp_outputs(merge_s, accs, top, total, tile=self.tile, is_interpreted=self.is_interpreted)
        of_query = lambda w, row: plgpu.load(merge_s.at[w, row], layout=W.reduce(0), optimized=False)
        tops = [of_query(w, dim) for w in range(WARPS)]
        of_all = functools.reduce(jnp.maximum, tops)
        finite = jnp.where(of_all == -jnp.inf, 0.0, of_all)
        weights = [jnp.exp2(top - finite) for top in tops]
        total = functools.reduce(jnp.add, [weights[w] * of_query(w, dim + 1) for w in range(WARPS)])
        outs = []
        for chunk in range(self.cut.num_chunks):
            rows = slice(chunk * self.cut.width, (chunk + 1) * self.cut.width)
            of_warps = [plgpu.load(merge_s.at[w, rows], layout=W, optimized=False) for w in range(WARPS)]
            column = functools.partial(
                lax.broadcast_in_dim, shape=of_warps[0].shape, broadcast_dimensions=[1]
            )
            outs.append(
                functools.reduce(jnp.add, [x * column(y) for x, y in zip(of_warps, weights, strict=True)])
            )
        return tuple(outs), of_all, total
