"""The kernel of qkv_write: one thread block per token, which loads and stores each head once.

one warpgroup, for its token                  every load is issued before anything is computed
--------------------------------------------  -------------------------------------------------------------
qkv[token, :, j], both halves of each head    j = 0 .. group - 1 are queries, then the key, then the value
cos, sin of the token; weights of the norms
    norm: x / rms(x) * weight
    RoPE: (a, b) -> (a cos - b sin, b cos + a sin)
queries ---> query[token]                     key, value ---> the token's slot of the caches, if it has one
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_norm.kernel import apply_norm_weight
from pallas_kernels.cache_write.kernel import row_layout
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.paged_kv import split_slot
from pallas_kernels.shared.types import Interpret, Ref, Tile

type Halves = tuple[Tile, Tile]
"""First and second half of one head per KV head, each [kv_heads, head_dim / 2]."""


class QkvWriteRefs(NamedTuple):
    """Arrays that the kernel reads, and the caches that it writes in place.

    Attributes:
        qkv: Queries, key and value of each KV head, [tokens, kv_heads, group + 2, head_dim].
        slot_mapping: Slot of each token, int32 [tokens]; tokens with negative slots are not written.
        k_cache: Cache of the keys [slots, kv_heads, head_dim], or HND [blocks, kv_heads, block_size,
            head_dim].
        v_cache: Cache of the values, like `k_cache`.
        cos: Cosines of the rotary angles [tokens, head_dim / 2], or None without RoPE.
        sin: Sines of the rotary angles, like `cos`.
        q_norm: Weight of the query norm [head_dim], or None.
        k_norm: Weight of the key norm [head_dim], or None.
    """

    qkv: Ref
    slot_mapping: Ref
    k_cache: Ref
    v_cache: Ref
    cos: Ref
    sin: Ref
    q_norm: Ref
    k_norm: Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class QkvWriteDims:
    """Static sizes and options of one call.

    Attributes:
        kv_heads: Number of KV heads.
        group: Number of query heads per KV head.
        head_dim: Number of elements per head.
        is_hnd: Whether the caches' layout is HND.
        block_size: Number of tokens per cache block.
        eps: Number added to the mean square.
        is_offset: Whether norms multiply by 1 + weight.
    """

    kv_heads: int
    group: int
    head_dim: int
    is_hnd: bool
    block_size: int
    eps: float
    is_offset: bool

    @property
    def half(self) -> int:
        """Number of elements of half a head."""
        return self.head_dim // 2


def write_tokens(refs: QkvWriteRefs, *, dims: QkvWriteDims, interpret: Interpret = None) -> jax.Array:
    """Write the caches in place and return queries [tokens, kv_heads, group, head_dim]."""
    tokens = refs.qkv.shape[0]
    return plgpu.kernel(
        functools.partial(write_body, dims=dims),
        out_type=jax.ShapeDtypeStruct((tokens, dims.kv_heads, dims.group, dims.head_dim), refs.qkv.dtype),
        grid=(tokens,),
        grid_names=("token",),
        interpret=interpret,
        kernel_name="qkv_write",
    )(refs)


def write_body(refs: QkvWriteRefs, query: Ref, *, dims: QkvWriteDims) -> None:
    """Normalize, rotate and store the heads of one token."""
    token = lax.axis_index("token")
    # Load: all reads are issued before anything is computed, so that their latencies overlap.
    slot = refs.slot_mapping[token]
    heads = [_load_halves(refs.qkv.at[token, :, j], dims) for j in range(dims.group + 2)]
    *queries, key, value = heads
    cos_sin = None
    if refs.cos is not None:
        cos_sin = _load_row(refs.cos.at[token], dims), _load_row(refs.sin.at[token], dims)
    q_weight, k_weight = (_load_weight(weight, dims) for weight in (refs.q_norm, refs.k_norm))
    # Queries: norm, RoPE, store.
    for j, head in enumerate(queries):
        rotated = _apply_rope(_apply_norm(head, q_weight, dims), cos_sin)
        _store_halves(query.at[token, :, j], rotated, dims)

    # Key and value: padding tokens have a negative slot and write nothing.
    @pl.when(slot >= 0)
    def _write() -> None:
        block, offset = split_slot(slot, dims.block_size)
        index = (block, slice(None), offset) if dims.is_hnd else slot
        rotated = _apply_rope(_apply_norm(key, k_weight, dims), cos_sin)
        _store_halves(refs.k_cache.at[index], rotated, dims)
        _store_halves(refs.v_cache.at[index], value, dims)


def _load_halves(ref: Ref, dims: QkvWriteDims) -> Halves:
    """Load one head per KV head, [kv_heads, head_dim], without conversion."""
    layout = row_layout(dims.kv_heads, dims.half)
    first, second = (
        plgpu.load(ref.at[:, pl.ds(start, dims.half)], layout=layout, optimized=False)
        for start in (0, dims.half)
    )
    return first, second


def _load_row(ref: Ref, dims: QkvWriteDims, start: int = 0) -> Tile:
    """Load head_dim / 2 numbers from `start` on as f32, broadcast over the heads."""
    size = (dims.kv_heads, dims.half)
    layout = row_layout(*size)
    numbers = plgpu.load(ref.at[pl.ds(start, dims.half)], layout=layout.reduce(0), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(numbers.astype(jnp.float32), size, [1]), layout)


def _load_weight(ref: Ref, dims: QkvWriteDims) -> Halves | None:
    return None if ref is None else (_load_row(ref, dims), _load_row(ref, dims, dims.half))


def _apply_norm(x: Halves, weight: Halves | None, dims: QkvWriteDims) -> Halves:
    """Apply the RMS norm over each head in f32 and round to the dtype of `x`; without a weight return `x`."""
    if weight is None:
        return x
    dtype = x[0].dtype
    first, second = (half.astype(jnp.float32) for half in x)
    squares = jnp.sum(first * first + second * second, axis=1)
    factor = lax.rsqrt(squares / dims.head_dim + dims.eps)
    layout = row_layout(dims.kv_heads, dims.half)
    factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, first.shape, [0]), layout)
    return (
        apply_norm_weight(first * factor, weight[0], dtype, is_offset=dims.is_offset),
        apply_norm_weight(second * factor, weight[1], dtype, is_offset=dims.is_offset),
    )


def _apply_rope(x: Halves, cos_sin: Halves | None) -> Halves:
    if cos_sin is None:
        return x
    cos, sin = cos_sin
    dtype = x[0].dtype
    first, second = (half.astype(jnp.float32) for half in x)
    return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)


def _store_halves(ref: Any, x: Halves, dims: QkvWriteDims) -> None:
    for start, half in zip((0, dims.half), x, strict=True):
        store_unoptimized(ref.at[:, pl.ds(start, dims.half)], half)
