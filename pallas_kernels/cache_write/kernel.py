"""One thread block moves a few tokens: bulk copies in, 8-bit rows rounded on the way, bulk copies out."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache_write.tiles import Tiles
from pallas_kernels.shared.store import store_unoptimized

# Contiguous rows need no tensor map, so any length of 16 bytes and more will do.
BULK = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
MIN_SCALE = 1e-6
ROWS_AT_ONCE = 32  # of keys and of values, that registers hold; a row is a token's head
# Adding it leaves the nearest integer, halves to even, in the low bits of a float32 below 2^22.
ROUNDER = 1.5 * 2.0**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """How keys, or values, are written.

    Attributes:
        heads: Heads of a token.
        dtype: Of what is stored, where it is rounded on the way; None = stored as it comes.
        has_token_scales: The scale of each token and head is made here.
    """

    heads: int
    dtype: Any = None
    has_token_scales: bool = False

    def scratch(self, rows: int, array: jax.Array) -> tuple[Any, Any, Any]:
        """SMEM for what comes in, what goes out and the scales; None for what is not needed."""
        if self.dtype is None:
            return plgpu.SMEM((rows, *array.shape[1:]), array.dtype), None, None
        _, unit = row_layout(array.shape[-1])
        tile = -(-rows * self.heads // unit) * unit
        shape = (tile, array.shape[-1])
        scales = plgpu.SMEM((tile,), jnp.float32) if self.has_token_scales else None
        return plgpu.SMEM(shape, array.dtype), plgpu.SMEM(shape, self.dtype), scales

    def token(self, ref: Any, j: int) -> Any:
        """Token j of an SMEM buffer."""
        return ref.at[j] if self.dtype is None else ref.at[pl.ds(j * self.heads, self.heads)]


def write_rows(
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    refs: tuple[Any, Any],
    scales: tuple[Any, Any],
    *,
    sides: tuple[Side, Side],
    is_hnd: bool,
    block_size: int,
    tiles: Tiles,
    interpret: Any = None,
) -> None:
    """Writes into the caches behind refs, and into the scales per token and head.

    Args:
        key: [tokens, kv_heads, head_dim], or [tokens, kv_heads * head_dim] where nothing needs the heads.
        value: As key.
        slot_mapping: int32 [tokens]; tokens of slots < 0 are not written.
        refs: jax.Ref of keys and of values: [slots, *key.shape[1:]], or HND [blocks, kv_heads, block_size,
            head_dim].
        scales: For each side None, a static scale [1], or jax.Ref [blocks, kv_heads, block_size].
        sides: How each is written.
        is_hnd: The layout.
        block_size: Tokens of a block.
        tiles: Static sizes.
        interpret: Interpret-mode parameters, or None for a GPU.
    """
    tokens, rows = slot_mapping.shape[0], tiles.rows

    def body(  # type: ignore[no-untyped-def]
        key_g,  # [tokens, ...]
        value_g,
        slots_g,  # [tokens]
        k_g,  # the caches, written in place
        v_g,
        k_scale_g,  # None, [1], or [blocks, kv_heads, block_size], written in place
        v_scale_g,
        unused_g,
        key_s,  # [rows, ...] or [tile, head_dim] in SMEM
        key_q,  # [tile, head_dim] of the cache's dtype
        key_scale_s,  # [tile]
        value_s,
        value_q,
        value_scale_s,
        loaded,
    ):
        first = lax.axis_index("tile") * rows
        # The last tile loads its last token again rather than reading past the end.
        index = [jnp.minimum(first + j, tokens - 1) for j in range(rows)]
        for j, token in enumerate(index):
            for side, rows_g, rows_s in ((sides[0], key_g, key_s), (sides[1], value_g, value_s)):
                plgpu.copy_gmem_to_smem(rows_g.at[token], side.token(rows_s, j), loaded, oob_mode=BULK)
        slots = [slots_g[token] for token in index]
        writes = (
            (sides[0], key_s, key_q, key_scale_s, k_g, k_scale_g),
            (sides[1], value_s, value_q, value_scale_s, v_g, v_scale_g),
        )
        to_round = [
            (side, rows_s, rows_q, scale_s, None if side.has_token_scales or scale_g is None else scale_g[0])
            for side, rows_s, rows_q, scale_s, _, scale_g in writes
            if side.dtype is not None
        ]
        plgpu.barrier_wait(loaded)
        if to_round:
            round_rows(to_round)
            plgpu.commit_smem()
        for j, slot in enumerate(slots):

            @pl.when((slot >= 0) & (first + j < tokens))
            def _store(j: int = j, slot: Any = slot) -> None:
                block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
                for side, rows_s, rows_q, scale_s, cache_g, scale_g in writes:
                    source = side.token(rows_s if side.dtype is None else rows_q, j)
                    target = cache_g.at[(block, slice(None), offset) if is_hnd else slot]
                    plgpu.copy_smem_to_gmem(source, target, commit_group=False)
                    if side.has_token_scales:
                        for head in range(side.heads):
                            scale_g[block, head, offset] = scale_s[j * side.heads + head]

        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output
        scratch_types=[
            *sides[0].scratch(rows, key),
            *sides[1].scratch(rows, value),
            plgpu.Barrier(num_arrivals=2 * rows),
        ],
        grid=(-(-tokens // rows),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="cache_write",
    )(key, value, slot_mapping, *refs, *scales)


def row_layout(head_dim: int) -> tuple[Any, int]:
    """The layout in which rows are rounded, and the rows that it comes in.

    A warp has a row at a time, or four where 32 lanes cannot share a head: 16 rows a warp, as for matrix
    products, are mostly padding for a few tokens (one token's 8 heads took 2.7 us, in 16 bits 1.4).
    """
    if head_dim % 32:
        tiling = Tiling(((16, 8), (4, 8), (1,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1), 16
    width = math.gcd(head_dim // 32, 4)
    tiling = Tiling(((4, 32 * width), (width,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1), 4


def round_rows(writes: list[Any]) -> None:
    """Tiles of rows to the caches' dtypes. Rows without a token hold garbage, which nothing reads.

    Keys and values are loaded before either is stored, so that neither waits for the other.

    Args:
        writes: For each side that is rounded: the side, its rows and where they go in shared memory, where
            their scales go, and its static scale.
    """
    count, head_dim = writes[0][1].shape  # of keys and values alike
    layout, _ = row_layout(head_dim)
    for start in range(0, count, ROWS_AT_ONCE):
        here = pl.ds(start, min(ROWS_AT_ONCE, count - start))
        loaded = [plgpu.load(rows_s.at[here], layout=layout, optimized=False) for _, rows_s, *_ in writes]
        done = [
            rounded(side, x, scale_g, layout) for (side, *_, scale_g), x in zip(writes, loaded, strict=True)
        ]
        for (_, _, rows_q, scale_s, _), (x, scale) in zip(writes, done, strict=True):
            store_unoptimized(rows_q.at[here], x)
            if scale is not None:
                scale_s[here] = scale


def rounded(side: Side, x: Any, divisor: Any, layout: Any) -> tuple[Any, Any]:
    """Rows [rows, head_dim] in the cache's dtype, and their scales [rows] if they are made here."""
    is_int = side.dtype == jnp.int8
    largest = 127.0 if is_int else float(jnp.finfo(side.dtype).max)
    x, scale = x.astype(jnp.float32), None
    if side.has_token_scales:
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=1) / largest, MIN_SCALE)
        x = x / plgpu.layout_cast(lax.broadcast_in_dim(scale, x.shape, [0]), layout)
    else:
        x = x if divisor is None else x / divisor
        x = jnp.clip(x, -128.0 if is_int else -largest, largest)
    if is_int:
        x = lax.bitcast_convert_type(x + ROUNDER, jnp.int32)
    return x.astype(side.dtype), scale
