"""One tile by the whole warpgroup: wgmma over 64 or 128 keys and up to 64 query rows.

Keys and values of 8 bits become the queries' 16-bit dtype on the way into the tensor core: keys in registers,
values through shared memory, since wgmma transposes 16-bit operands only.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.stages import HEADROOM, Stages
from pallas_kernels.paged_decode.tiles import Tiles
from pallas_kernels.paged_decode.walk import Place, Segment, Shape
from pallas_kernels.shared import paged_kv
from pallas_kernels.shared.dequant import swizzle_of, widened
from pallas_kernels.shared.types import Tile

W = plgpu.Layout.WGMMA
f32 = jnp.float32


class Warpgroup:
    """Products and reductions over a tile of keys; a largest score and a shrinking factor for each query."""

    def __init__(self, refs: Stages, tiles: Tiles, shape: Shape, *, dtype: Any, is_interpreted: bool):
        self.refs, self.cut, self.dtype, self.is_interpreted = refs, shape.cut, dtype, is_interpreted
        self.tile = tiles.tile_kv, shape.tile_q
        self.headroom = HEADROOM if dtype == jnp.float16 and refs.v_scale_s is not None else 0
        self.widens_values = refs.v_s.dtype != dtype
        # A lone query sees a key of every tile that is not from a list; others may have seen none yet.
        self.sees_a_key = shape.query_len == 1 and not shape.listed

    def spread(self, x: Any) -> Any:
        """One value a query, over a tile."""
        return lax.broadcast_in_dim(x, self.tile, [1])

    def start(self) -> tuple[Any, Any, Any]:
        """Accumulators, largest scores and sums of a request's first tile."""
        zeros = lambda *size: plgpu.layout_cast(jnp.zeros(size, f32), W)
        rows = self.tile[1]
        lowest = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, f32), W.reduce(0))
        return tuple(zeros(self.cut.width, rows) for _ in range(self.cut.chunks)), lowest, zeros(*self.tile)

    def query(self, q_s: Any) -> Any:
        """The queries of a request, and what scores are to be multiplied by."""
        return q_s, 1.0

    def scores(self, stage: Any, q: Any) -> Any:
        """K Q^T of a stage: [tile_kv, rows]."""

        def product(acc: Any) -> Any:
            for chunk in range(self.cut.chunks):
                for columns, operand in self.key_operands(stage, chunk):
                    plgpu.wgmma(acc, operand, q.at[chunk, :, columns].T)
            # Waits: values widened beside this product would need more registers than two thread blocks have.
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC(self.tile, f32))

    def key_operands(self, stage: Any, chunk: int) -> Any:
        """A chunk of keys as the tensor core takes it: (columns, operand) one after the other."""
        tile_s = self.refs.k_s.at[stage, chunk]
        if self.refs.k_s.dtype == self.dtype:
            yield slice(None), tile_s
            return
        for columns in pieces(self.cut.width):
            operand = widened(tile_s.at[:, columns], self.dtype)
            if self.is_interpreted:  # it takes no operand from registers
                self.refs.wide_s[chunk, :, columns] = operand
                operand = self.refs.wide_s.at[chunk, :, columns]
            yield columns, operand

    def largest(self, x: Any) -> Any:
        """The largest of each query's scores."""
        return x.max(axis=0)

    def widen_values(self, stage: Any, segment: Segment, place: Place) -> None:
        """8-bit values of a stage into wide_s."""
        for chunk in range(self.cut.chunks):
            for columns in pieces(self.cut.width):
                v = widened(self.refs.v_s.at[stage, chunk, :, columns], self.dtype)
                seen = functools.partial(only_seen, v, segment, place, 0.0)
                v = lax.cond(has_unseen(segment, place), seen, lambda v=v: v)
                self.refs.wide_s[chunk, :, columns] = v

    def clear_unseen_values(self, stage: Any, segment: Segment, place: Place) -> None:
        """A probability of 0 hides no NaN."""

        @pl.when(has_unseen(segment, place))
        def _() -> None:
            rows, ends = pl.ds(0, self.tile[0]), (segment.low, segment.high)
            paged_kv.clear_unseen(self.refs.v_s.at[stage], rows, functools.partial(keys_of, place), *ends)
            plgpu.commit_smem()

    def add_values(self, accs: Any, shrink: Any, p: Any, stage: Any, segment: Segment, place: Place) -> Any:
        """Accs * shrink + V^T P; waits for the values."""
        self.refs.p_s.T[...] = plgpu.layout_cast(p.astype(self.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        if not self.widens_values:
            plgpu.barrier_wait(self.refs.v_full.at[stage])
            self.clear_unseen_values(stage, segment, place)
        column = lambda acc: lax.broadcast_in_dim(shrink, acc.shape, [1])
        accs = tuple(self.add_chunk(acc * column(acc), stage, chunk) for chunk, acc in enumerate(accs))
        if not self.widens_values:
            plgpu.barrier_arrive(self.refs.v_free.at[stage])
        return accs

    def add_chunk(self, acc: Any, stage: Any, chunk: int) -> Any:
        """Acc + V^T P for one chunk of a head."""

        def product(ref: Any) -> None:
            values = self.refs.wide_s.at[chunk] if self.widens_values else self.refs.v_s.at[stage, chunk]
            plgpu.wgmma(ref, values.T, self.refs.p_s.T)

        def product_alone(ref: Any) -> Any:
            product(ref)
            return ref[...]

        if self.is_interpreted:  # it has no run_state of an accumulator
            return acc + pl.run_scoped(product_alone, plgpu.ACC(acc.shape, f32))
        return pl.run_state(product)(plgpu.ACC.init(acc))

    def merged(self, accs: Any, top: Any, total: Any) -> tuple[Any, Any, Any]:
        """O^T a chunk, each query's largest score and sum of exponentials."""
        return accs, top, total.sum(axis=0)


def has_unseen(segment: Segment, place: Place) -> Any:
    """Whether the tile has keys that no query sees."""
    return place.reaches_out(segment.low, segment.high)


def only_seen(x: Any, segment: Segment, place: Place, otherwise: float) -> Any:
    """Rows of x, one a key; `otherwise` for keys that no query sees."""
    return paged_kv.only_seen(x, keys_of(place, x.shape), segment.low, segment.high, otherwise)


def keys_of(place: Place, shape: tuple[int, ...]) -> Tile:
    """The key of each row of a tile."""
    return place.keys(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=W))


def pieces(width: int) -> list[Any]:
    """The columns of an 8-bit tile that are widened together: a row of shared memory's swizzle."""
    span = swizzle_of(1)
    return [pl.ds(start, span) for start in range(0, width, span)]
