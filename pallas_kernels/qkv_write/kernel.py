"""One thread block takes one token: each head goes through registers once.

one warpgroup, for its token                all that it needs is on its way before anything is computed
------------------------------------------  -----------------------------------------------------------
qkv[token, :, j], both halves               j = 0 .. group - 1 queries, then the key, then the value
cos, sin of the token; weights of norms
    norm: x / rms(x) * weight
    turn: (a, b) -> (a cos - b sin, b cos + a sin)
queries ---> query[token]                   key, value ---> the token's slot of the caches, if it has one
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_norm.kernel import weighted
from pallas_kernels.cache_write.kernel import row_layout
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.paged_kv import split_slot
from pallas_kernels.shared.types import Interpret, Ref, Tile

type Halves = tuple[Tile, Tile]  # of the last axis


class Refs(NamedTuple):
    """What the kernel reads, and the caches that it writes in place.

    Attributes:
        qkv: [tokens, kv_heads, group + 2, head_dim].
        slot_mapping: int32 [tokens]; tokens of slots < 0 are not written.
        k_cache: jax.Ref [slots, kv_heads, head_dim], or HND [blocks, kv_heads, block_size, head_dim].
        v_cache: As k_cache.
        cos: [tokens, head_dim / 2], or None.
        sin: As cos.
        q_norm: Weights [head_dim], or None.
        k_norm: As q_norm.
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
class Shape:
    """What is static about a call.

    Attributes:
        kv_heads: Heads of keys.
        group: Query heads of each.
        head_dim: Width of a head.
        is_hnd: The caches' layout.
        block_size: Tokens of a cache block.
        eps: Added to the mean square.
        is_offset: The norm's factor is 1 + weight.
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
        """Where a head's second half begins."""
        return self.head_dim // 2


def write_tokens(refs: Refs, *, shape: Shape, interpret: Interpret = None) -> jax.Array:
    """Writes into the caches behind refs; returns queries [tokens, kv_heads, group, head_dim]."""
    tokens = refs.qkv.shape[0]
    return plgpu.kernel(
        functools.partial(write_body, shape=shape),
        out_type=jax.ShapeDtypeStruct((tokens, shape.kv_heads, shape.group, shape.head_dim), refs.qkv.dtype),
        grid=(tokens,),
        grid_names=("token",),
        interpret=interpret,
        kernel_name="qkv_write",
    )(refs)


def write_body(refs: Refs, query: Ref, *, shape: Shape) -> None:
    """What a thread block does."""
    token = lax.axis_index("token")
    slot = refs.slot_mapping[token]
    heads = [_halves(refs.qkv.at[token, :, j], shape) for j in range(shape.group + 2)]
    *queries, key, value = heads
    cos_sin = None if refs.cos is None else (_row(refs.cos.at[token], shape), _row(refs.sin.at[token], shape))
    q_weight, k_weight = (_weight(weight, shape) for weight in (refs.q_norm, refs.k_norm))
    for j, head in enumerate(queries):
        _store(query.at[token, :, j], _turned(_normed(head, q_weight, shape), cos_sin), shape)

    @pl.when(slot >= 0)
    def _write() -> None:
        block, offset = split_slot(slot, shape.block_size)
        place = (block, slice(None), offset) if shape.is_hnd else slot
        _store(refs.k_cache.at[place], _turned(_normed(key, k_weight, shape), cos_sin), shape)
        _store(refs.v_cache.at[place], value, shape)


def _halves(ref: Ref, shape: Shape) -> Halves:
    """[kv_heads, head_dim] as it is stored, in registers."""
    layout = row_layout(shape.kv_heads, shape.half)
    load = lambda start: plgpu.load(ref.at[:, pl.ds(start, shape.half)], layout=layout, optimized=False)
    return load(0), load(shape.half)


def _row(ref: Ref, shape: Shape, start: int = 0) -> Tile:
    """head_dim / 2 numbers from `start` on, f32, the same for all heads."""
    size = (shape.kv_heads, shape.half)
    layout = row_layout(*size)
    numbers = plgpu.load(ref.at[pl.ds(start, shape.half)], layout=layout.reduce(0), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(numbers.astype(jnp.float32), size, [1]), layout)


def _weight(ref: Ref, shape: Shape) -> Halves | None:
    return None if ref is None else (_row(ref, shape), _row(ref, shape, shape.half))


def _normed(x: Halves, weight: Halves | None, shape: Shape) -> Halves:
    """Divided by the root mean square of each head; f32 where anything is done, rounded where Llama does."""
    if weight is None:
        return x
    first, second = (part.astype(jnp.float32) for part in x)
    squares = jnp.sum(first * first + second * second, axis=1)
    factor = lax.rsqrt(squares / shape.head_dim + shape.eps)
    layout = row_layout(shape.kv_heads, shape.half)
    factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, first.shape, [0]), layout)
    of = lambda part, w: weighted(part * factor, w, x[0].dtype, is_offset=shape.is_offset)
    return of(first, weight[0]), of(second, weight[1])


def _turned(x: Halves, cos_sin: Halves | None) -> Halves:
    if cos_sin is None:
        return x
    cos, sin = cos_sin
    first, second = (part.astype(jnp.float32) for part in x)
    rounded = lambda y: y.astype(x[0].dtype)
    return rounded(first * cos - second * sin), rounded(second * cos + first * sin)


def _store(ref: Any, x: Halves, shape: Shape) -> None:
    for start, part in zip((0, shape.half), x, strict=True):
        store_unoptimized(ref.at[:, pl.ds(start, shape.half)], part)
