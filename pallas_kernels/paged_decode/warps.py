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
from pallas_kernels.paged_decode.stages import HEADROOM, Stages
from pallas_kernels.paged_decode.walk import Place, Segment, Shape
from pallas_kernels.paged_decode.warp_code import KEYS, QUERY_BITS, W
from pallas_kernels.shared.dequant import swizzle_transforms

f32 = jnp.float32
WARPS = 4


class Warps:
    """Products and reductions over a tile of 64 keys, a warp at a time.

    Arrays of a tile are [64, rows]: row 16 w + i belongs to warp w. The accumulators are a tuple of them, one
    for every 16 columns of a head.

    Interpreted, a fence follows what is read: jax 0.12 looks for one between a read and TMA's next write into
    the same memory. On the device no fence of the two proxies stands there, though PTX's memory model has one
    for any two accesses: a stage is released by mbarrier.arrive, after which no earlier read comes, and a
    read that is done cannot see a later write. CUTLASS's pipelines release their stages the same way.
    """

    def __init__(self, refs: Stages, shape: Shape, *, dtype: Any, is_interpreted: bool):
        self.refs, self.shape, self.cut = refs, shape, shape.cut
        self.dtype, self.is_interpreted = dtype, is_interpreted
        self.k_dtype, self.v_dtype = refs.k_s.dtype, refs.v_s.dtype
        self.key_operand, self.value_operand = (operand_of(x, dtype) for x in (self.k_dtype, self.v_dtype))
        self.tile = 64, shape.tile_q
        self.num_accs = self.cut.padded_dim // KEYS
        self.headroom = HEADROOM if self.value_operand == jnp.float16 else 0
        self.sees_a_key = False

    def spread(self, x: Any) -> Any:
        """What is known of each query, over a tile."""
        return x

    def zeros(self) -> Any:
        """Nothing summed yet."""
        return plgpu.layout_cast(jnp.zeros(self.tile, f32), W)

    def start(self) -> tuple[Any, Any, Any]:
        """Accumulators, largest scores and sums of a request's first tile."""
        lowest = plgpu.layout_cast(jnp.full(self.tile, -jnp.inf, f32), W)
        return tuple(self.zeros() for _ in range(self.num_accs)), lowest, self.zeros()

    def query(self, q_s: Any) -> tuple[Any, Any]:
        """The queries of a request as the tensor core's right operand, and what scores are multiplied by.

        Args:
            q_s: [chunks, tile_q, width] in SMEM.
        """
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

    def scores(self, stage: Any, fragments: Any) -> Any:
        """K Q^T of a stage: [64, rows]."""
        if self.is_interpreted:
            k = self.refs.k_s[stage].astype(f32)
            plgpu.commit_smem()
            return jnp.einsum("ckd,cqd->kq", k, fragments)
        k_s = self.refs.k_s.at[stage]
        types = (ref_type(self.k_dtype.itemsize, self.cut.width), fragments_layout(self.key_operand))
        run = plgpu.inline_mgpu(arg_types=types, return_type=plgpu.ShapeDtypeStruct(self.tile, f32, W))
        return run(functools.partial(code.key_products, warps=self))(k_s, fragments)

    def largest(self, x: Any) -> Any:
        """The largest of each warp's rows, in all of its rows."""
        if self.is_interpreted:
            of_warp = x.reshape(WARPS, KEYS, -1).max(axis=1, keepdims=True)
            return jnp.broadcast_to(of_warp, (WARPS, KEYS, x.shape[1])).reshape(x.shape)
        run = plgpu.inline_mgpu(arg_types=(W,), return_type=plgpu.ShapeDtypeStruct(self.tile, f32, W))
        return run(code.warp_largest)(x)

    def add_values(self, accs: Any, shrink: Any, p: Any, stage: Any, segment: Segment, place: Place) -> Any:
        """Accs * shrink + V^T P of each warp's keys; waits for the values."""
        if self.refs.v_scale_s is None:
            plgpu.barrier_wait(self.refs.v_full.at[stage])
        accs = self.products([acc * shrink for acc in accs], p, stage, segment, place)
        plgpu.barrier_arrive(self.refs.v_free.at[stage])
        return accs

    def products(self, accs: list[Any], p: Any, stage: Any, segment: Segment, place: Place) -> Any:
        """Accs + V^T P; values of keys that no query sees count as 0."""
        if self.is_interpreted:
            rows = jnp.arange(64, dtype=jnp.int32)
            at = place.keys(rows)
            is_seen = (at >= segment.low) & (at < segment.high)
            v = jnp.where(is_seen[:, None], self.refs.v_s[stage].astype(f32), 0.0)
            plgpu.commit_smem()
            v = v.reshape(-1, WARPS, KEYS, self.cut.width)
            p = p.astype(self.value_operand).astype(f32).reshape(WARPS, KEYS, -1)
            new = jnp.einsum("cwkd,wkq->cdwq", v, p).reshape(self.num_accs, KEYS, WARPS, -1)
            return tuple(acc + x.swapaxes(0, 1).reshape(self.tile) for acc, x in zip(accs, new, strict=True))
        v_s = self.refs.v_s.at[stage]
        of_ref, scalar = ref_type(self.v_dtype.itemsize, self.cut.width), plgpu.Layout.WG_SPLAT
        types = (of_ref, W, [W] * self.num_accs, [scalar] * (2 + len(place.firsts)))
        result = plgpu.ShapeDtypeStruct(self.tile, f32, W)
        run = plgpu.inline_mgpu(arg_types=types, return_type=(result,) * self.num_accs)
        body = functools.partial(code.value_products, warps=self, piece=place.piece)
        return tuple(run(body)(v_s, p, accs, [segment.low, segment.high, *place.firsts]))

    def merged(self, accs: Any, top: Any, total: Any) -> tuple[Any, Any, Any]:
        """The four warps' results as one: O^T a chunk, each query's largest score and sum of exponentials."""
        merge_s, dim = self.refs.merge_s, self.cut.padded_dim
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


def merge_smem(shape: Shape) -> Any:
    """Where the warps' results meet: accumulators, then each query's largest score and sum."""
    return plgpu.SMEM((WARPS, shape.cut.padded_dim + 2, shape.tile_q), f32)


def fragments_layout(dtype: Any) -> Any:
    """The right operand's, whole in every warp."""
    return plgpu.Layout.MMA_RHS(dtype, m_warps=4)


def ref_type(itemsize: int, width: int = 64) -> Any:
    """A tile of swizzled_smem."""
    return plgpu.RefType(swizzle_transforms(itemsize, width))
