"""One tile by four warps that do not wait for each other: each takes 16 of its 64 keys.

A warp has a softmax of its own, with its own largest score; the four are merged where a request ends, as
spans are. Nothing is written back to shared memory, and no barrier stands between two tiles but TMA's.

For few query rows: an accumulator is [head_dim, rows] in every warp.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode import warp_code as code
from pallas_kernels.paged_decode.products import Products
from pallas_kernels.paged_decode.refs import Pipeline, Smem
from pallas_kernels.paged_decode.segments import Segment
from pallas_kernels.paged_decode.softmax import HEADROOM
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.paged_decode.tile_keys import TileKeys
from pallas_kernels.paged_decode.warp_code import KEYS, QUERY_BITS, W
from pallas_kernels.shared.dequant import swizzle_transforms
from pallas_kernels.shared.paged_kv import only_seen
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile

f32 = jnp.float32
WARPS = 4


class MmaProducts(Products):
    """See Products. A warp's largest scores, sums and accumulators are of its own 16 keys.

    Arrays of a tile are [64, rows]: row 16 w + i belongs to warp w. The accumulators are a tuple of them, one
    for every 16 columns of a head.

    Interpreted, a fence follows what is read: jax 0.12 looks for one between a read and TMA's next write into
    the same memory. On the device no fence of the two proxies stands there, though PTX's memory model has one
    for any two accesses: a stage is released by mbarrier.arrive, after which no earlier read comes, and a
    read that is done cannot see a later write. CUTLASS's pipelines release their stages the same way.
    """

    sees_a_key = False  # a warp's own keys may all be unseen
    widens_values = False  # on the way into the tensor core, in registers

    def __init__(self, smem: Smem, pipeline: Pipeline, spec: DecodeSpec):
        self.smem, self.pipeline = smem, pipeline
        self.shape, self.cut, self.tile = spec.shape, spec.shape.cut, spec.tile
        self.dtype, self.is_interpreted = spec.dtype, spec.is_interpreted
        self.k_dtype, self.v_dtype = smem.k.dtype, smem.v.dtype
        self.key_operand, self.value_operand = (
            operand_of(stored, spec.dtype) for stored in (self.k_dtype, self.v_dtype)
        )
        self.num_accs = self.cut.padded_dim // KEYS
        self.headroom = HEADROOM if self.value_operand == jnp.float16 else 0

    def spread(self, x: Tile) -> Tile:
        """It is spread already."""
        return x

    def zeros(self) -> Tile:
        """Nothing summed yet."""
        return plgpu.layout_cast(jnp.zeros(self.tile, f32), W)

    def start(self) -> tuple[tuple[Tile, ...], Tile, Tile]:
        """One accumulator for every 16 columns of a head."""
        lowest = plgpu.layout_cast(jnp.full(self.tile, -jnp.inf, f32), W)
        return tuple(self.zeros() for _ in range(self.num_accs)), lowest, self.zeros()

    def query(self, q_s: Ref) -> tuple[Tile, Tile]:
        """The queries in registers, as the tensor core's right operand."""
        is_scaled = self.key_operand != self.dtype  # bf16 has a wider range than f16
        if self.is_interpreted:
            q = q_s[...].astype(f32)
            plgpu.commit_smem()
            if not is_scaled:
                return q, self.zeros() + 1.0
            largest = jnp.abs(q).max(axis=(0, 2))
            exponent = jnp.clip(jnp.floor(jnp.log2(jnp.maximum(largest, 2.0**-116))) - QUERY_BITS, -126, 126)
            q = (q * jnp.exp2(-exponent)[None, :, None]).astype(self.key_operand).astype(f32)
            return q, jnp.broadcast_to(jnp.exp2(exponent)[None], self.tile)
        layout = fragments_layout(self.key_operand)
        load = functools.partial(code.query_fragments, warps=self, layout=layout, is_scaled=is_scaled)
        fragments = plgpu.ShapeDtypeStruct((self.cut.padded_dim, self.shape.tile_q), self.key_operand, layout)
        factors = plgpu.ShapeDtypeStruct(self.tile, f32, W)
        types = (ref_type(2),)
        return plgpu.inline_mgpu(arg_types=types, return_type=(fragments, factors))(load)(q_s)

    def scores(self, stage: Scalar, query: Tile) -> Tile:
        """K Q^T of a stage."""
        if self.is_interpreted:
            k = self.smem.k[stage].astype(f32)
            plgpu.commit_smem()
            return jnp.einsum("ckd,cqd->kq", k, query)
        k_s = self.smem.k.at[stage]
        types = (ref_type(self.k_dtype.itemsize, self.cut.width), fragments_layout(self.key_operand))
        run = plgpu.inline_mgpu(arg_types=types, return_type=plgpu.ShapeDtypeStruct(self.tile, f32, W))
        return run(functools.partial(code.key_products, warps=self))(k_s, query)

    def widen_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """Nothing: see add_values."""

    def largest(self, s: Tile) -> Tile:
        """The largest of each warp's rows, in all of its rows."""
        if self.is_interpreted:
            of_warp = s.reshape(WARPS, KEYS, -1).max(axis=1, keepdims=True)
            return jnp.broadcast_to(of_warp, (WARPS, KEYS, s.shape[1])).reshape(s.shape)
        run = plgpu.inline_mgpu(arg_types=(W,), return_type=plgpu.ShapeDtypeStruct(self.tile, f32, W))
        return run(code.warp_largest)(s)

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
        accs = self.value_products([acc * shrink for acc in accs], p, stage, segment, keys)
        plgpu.barrier_arrive(self.pipeline.v_free.at[stage])
        return accs

    def value_products(
        self, accs: list[Tile], p: Tile, stage: Scalar, segment: Segment, keys: TileKeys
    ) -> tuple[Tile, ...]:
        """Accs + V^T P; values of keys that no query sees count as 0."""
        if self.is_interpreted:
            return self.value_products_interpreted(accs, p, stage, segment, keys)
        v_s = self.smem.v.at[stage]
        of_ref, scalar = ref_type(self.v_dtype.itemsize, self.cut.width), plgpu.Layout.WG_SPLAT
        types = (of_ref, W, [W] * self.num_accs, [scalar] * (2 + len(keys.firsts)))
        result = plgpu.ShapeDtypeStruct(self.tile, f32, W)
        run = plgpu.inline_mgpu(arg_types=types, return_type=(result,) * self.num_accs)
        body = functools.partial(code.value_products, warps=self, piece=keys.piece)
        return tuple(run(body)(v_s, p, accs, [segment.low, segment.high, *keys.firsts]))

    def value_products_interpreted(
        self, accs: list[Tile], p: Tile, stage: Scalar, segment: Segment, keys: TileKeys
    ) -> tuple[Tile, ...]:
        """The same without lanes."""
        at = keys.of_rows(jnp.arange(self.tile[0], dtype=jnp.int32))
        v = self.smem.v[stage].astype(f32)
        v = only_seen(v, jnp.broadcast_to(at[:, None], v.shape), segment.low, segment.high)
        plgpu.commit_smem()
        v = v.reshape(-1, WARPS, KEYS, self.cut.width)
        p = p.astype(self.value_operand).astype(f32).reshape(WARPS, KEYS, -1)
        new = jnp.einsum("cwkd,wkq->cdwq", v, p).reshape(self.num_accs, KEYS, WARPS, -1)
        return tuple(acc + x.swapaxes(0, 1).reshape(self.tile) for acc, x in zip(accs, new, strict=True))

    def merged(
        self, accs: tuple[Tile, ...], top: Tile, total: Tile
    ) -> tuple[tuple[Tile, ...], Columns, Columns]:
        """The four warps' results as one."""
        merge_s, dim = self.smem.merge, self.cut.padded_dim
        if self.is_interpreted:
            of_warps = lambda x: x.reshape(*x.shape[:-2], WARPS, KEYS, -1)
            merge_s[:, :dim] = of_warps(jnp.stack(accs)).swapaxes(0, 1).reshape(WARPS, dim, -1)
            merge_s[:, dim] = of_warps(top)[:, 0]
            merge_s[:, dim + 1] = of_warps(total).sum(axis=1)
            plgpu.commit_smem()
        else:
            types = plgpu.RefType(), [W] * self.num_accs, W, W
            run = plgpu.inline_mgpu(arg_types=types, return_type=())
            run(functools.partial(code.store_results, warps=self))(merge_s, list(accs), top, total)
        of_query = lambda w, row: plgpu.load(merge_s.at[w, row], layout=W.reduce(0), optimized=False)
        tops = [of_query(w, dim) for w in range(WARPS)]
        of_all = functools.reduce(jnp.maximum, tops)
        finite = jnp.where(of_all == -jnp.inf, 0.0, of_all)
        weights = [jnp.exp2(top - finite) for top in tops]
        total = functools.reduce(jnp.add, [weights[w] * of_query(w, dim + 1) for w in range(WARPS)])
        outs = []
        for chunk in range(self.cut.chunks):
            rows = slice(chunk * self.cut.width, (chunk + 1) * self.cut.width)
            parts = [plgpu.load(merge_s.at[w, rows], layout=W, optimized=False) for w in range(WARPS)]
            column = functools.partial(lax.broadcast_in_dim, shape=parts[0].shape, broadcast_dimensions=[1])
            outs.append(
                functools.reduce(jnp.add, [x * column(y) for x, y in zip(parts, weights, strict=True)])
            )
        return tuple(outs), of_all, total


def operand_of(stored: Any, dtype: Any) -> Any:
    """What the tensor core multiplies: 8 bits have instructions to f16 only, and fit into it exactly."""
    return jnp.dtype(dtype) if stored.itemsize == 2 else jnp.dtype(jnp.float16)


def fragments_layout(dtype: Any) -> Any:
    """The right operand's, whole in every warp."""
    return plgpu.Layout.MMA_RHS(dtype, m_warps=4)


def ref_type(itemsize: int, width: int = 64) -> Any:
    """A tile of swizzled_smem."""
    return plgpu.RefType(swizzle_transforms(itemsize, width))
