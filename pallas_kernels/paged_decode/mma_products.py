"""One tile by four warps that do not wait for each other: each takes 16 of its 64 keys.

A warp has a softmax of its own, with its own largest score; the four are merged where a request ends, as
spans are. Nothing is written back to shared memory, and no barrier stands between two tiles but TMA's.

For few query rows: an accumulator is [head_dim, rows] in every warp.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.products import Products
from pallas_kernels.paged_decode.refs import Pipeline, Smem
from pallas_kernels.paged_decode.segments import Segment
from pallas_kernels.paged_decode.softmax import HEADROOM
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.paged_decode.tile_keys import TileKeys
from pallas_kernels.ptx.warp_products import key_products, value_products, warp_largest
from pallas_kernels.ptx.warp_queries import WARPS, WarpTile, query_fragments
from pallas_kernels.ptx.warp_results import store_results
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile

W = plgpu.Layout.WGMMA
f32 = jnp.float32


class MmaProducts(Products):
    """See Products. A warp's largest scores, sums and accumulators are of its own 16 keys.

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
        return query_fragments(q_s, tile=self.tile, is_interpreted=self.is_interpreted)

    def scores(self, stage: Scalar, query: Tile) -> Tile:
        """K Q^T of a stage."""
        k_s = self.smem.k.at[stage]
        return key_products(k_s, query, tile=self.tile, is_interpreted=self.is_interpreted)

    def widen_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """Nothing: see add_values."""

    def largest(self, s: Tile) -> Tile:
        """The largest of each warp's rows, in all of its rows."""
        return warp_largest(s, tile=self.tile, is_interpreted=self.is_interpreted)

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
        accs = value_products(
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
        store_results(merge_s, accs, top, total, tile=self.tile, is_interpreted=self.is_interpreted)
        of_query = lambda w, row: plgpu.load(merge_s.at[w, row], layout=W.reduce(0), optimized=False)
        tops = [of_query(w, dim) for w in range(WARPS)]
        of_all = functools.reduce(jnp.maximum, tops)
        finite = jnp.where(of_all == -jnp.inf, 0.0, of_all)
        weights = [jnp.exp2(top - finite) for top in tops]
        total = functools.reduce(jnp.add, [weights[w] * of_query(w, dim + 1) for w in range(WARPS)])
        outs = []
        for chunk in range(self.cut.chunks):
            rows = slice(chunk * self.cut.width, (chunk + 1) * self.cut.width)
            of_warps = [plgpu.load(merge_s.at[w, rows], layout=W, optimized=False) for w in range(WARPS)]
            column = functools.partial(
                lax.broadcast_in_dim, shape=of_warps[0].shape, broadcast_dimensions=[1]
            )
            outs.append(
                functools.reduce(jnp.add, [x * column(y) for x, y in zip(of_warps, weights, strict=True)])
            )
        return tuple(outs), of_all, total
