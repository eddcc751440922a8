"""One tile by the whole warpgroup: wgmma over 64 or 128 keys and up to 64 query rows.

Keys and values of 8 bits become the queries' 16-bit dtype on the way into the tensor core: keys in registers,
values through shared memory, since wgmma transposes 16-bit operands only.
"""

import functools
from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.masking import has_unseen, only_seen
from pallas_kernels.paged_decode.products import Products
from pallas_kernels.paged_decode.refs import Pipeline, Smem
from pallas_kernels.paged_decode.segments import Segment
from pallas_kernels.paged_decode.softmax import HEADROOM
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.paged_decode.tile_keys import TileKeys
from pallas_kernels.shared.dequant import swizzle_of, widened
from pallas_kernels.shared.paged_kv import clear_unseen
from pallas_kernels.shared.types import Columns, Ref, Scalar, Slice, Tile

W = plgpu.Layout.WGMMA
f32 = jnp.float32


class WgmmaProducts(Products):
    """See Products. A largest score and a shrinking factor for each query, whole in every warp."""

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
        return tuple(zeros(self.cut.width, rows) for _ in range(self.cut.chunks)), lowest, zeros(*self.tile)

    def query(self, q_s: Ref) -> tuple[Ref, float]:
        """They stay where they are."""
        return q_s, 1.0

    def scores(self, stage: Scalar, query: Ref) -> Tile:
        """K Q^T of a stage."""

        def product(acc: Ref) -> Tile:
            for chunk in range(self.cut.chunks):
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
            operand = widened(tile_s.at[:, columns], self.dtype)
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
        for chunk in range(self.cut.chunks):
            for columns in pieces(self.cut.width):
                v = widened(self.smem.v.at[stage, chunk, :, columns], self.dtype)
                seen = functools.partial(only_seen, v, segment, keys, 0.0)
                v = lax.cond(has_unseen(segment, keys), seen, lambda v=v: v)
                self.smem.wide[chunk, :, columns] = v

    def clear_unseen_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """A probability of 0 hides no NaN."""

        @pl.when(has_unseen(segment, keys))
        def _() -> None:
            rows = pl.ds(0, self.tile[0])
            clear_unseen(self.smem.v.at[stage], rows, keys.over, segment.low, segment.high)
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
    span = swizzle_of(1)
    return [pl.ds(start, span) for start in range(0, width, span)]
