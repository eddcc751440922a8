"""One thread block moves a few tokens: by bulk copies, or through registers where they become 8 bits."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache_write.tiles import Tiles
from pallas_kernels.shared.paged_kv import place_of_slot
from pallas_kernels.shared.store import store_unoptimized

# Contiguous rows need no tensor map, so any length of 16 bytes and more will do.
BULK = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
MIN_SCALE = 1e-6
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

    def smem(self, rows: int, array: jax.Array) -> Any:
        """Where rows pass through on their way, if they need no registers."""
        return plgpu.SMEM((rows, *array.shape[1:]), array.dtype) if self.dtype is None else None

    def rounded(self, row: Any, divisor: Any) -> tuple[Any, Any]:
        """A token's [heads, head_dim] in the cache's dtype, and the heads' scales if they are made here.

        Args:
            row: In registers.
            divisor: The static scale, if there is one.
        """
        is_int = self.dtype == jnp.int8
        largest = 127.0 if is_int else float(jnp.finfo(self.dtype).max)
        x, scale = row.astype(jnp.float32), None
        if self.has_token_scales:
            scale = jnp.maximum(jnp.max(jnp.abs(x), axis=1) / largest, MIN_SCALE)
            inverse = lax.broadcast_in_dim(1.0 / scale, x.shape, [0])
            x = x * plgpu.layout_cast(inverse, row_layout(*x.shape))  # a division a head, not one a number
        else:
            x = x if divisor is None else x / divisor
            x = jnp.clip(x, -128.0 if is_int else -largest, largest)
        if is_int:
            x = lax.bitcast_convert_type(x + ROUNDER, jnp.int32)
        return x.astype(self.dtype), scale


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
    copies = rows * sum(side.dtype is None for side in sides)

    def body(  # type: ignore[no-untyped-def]
        key_g,  # [tokens, ...]
        value_g,
        slots_g,  # [tokens]
        k_g,  # the caches, written in place
        v_g,
        k_scale_g,  # None, [1], or [blocks, kv_heads, block_size], written in place
        v_scale_g,
        unused_g,
        key_s,  # [rows, ...] in SMEM; None where they are rounded
        value_s,
        loaded,
    ):
        first = lax.axis_index("tile") * rows
        # The last tile loads its last token again rather than reading past the end.
        index = [jnp.minimum(first + j, tokens - 1) for j in range(rows)]
        new: list[list[Any]] = []  # all that is read is on its way before anything is computed
        divisors = []
        reads = ((sides[0], key_g, key_s, k_scale_g), (sides[1], value_g, value_s, v_scale_g))
        for side, rows_g, rows_s, scale_g in reads:
            if side.dtype is None:
                for j, token in enumerate(index):
                    plgpu.copy_gmem_to_smem(rows_g.at[token], rows_s.at[j], loaded, oob_mode=BULK)
                new.append([])
            else:
                load = functools.partial(plgpu.load, layout=row_layout(*rows_g.shape[1:]), optimized=False)
                new.append([load(rows_g.at[token]) for token in index])
            is_static = scale_g is not None and not side.has_token_scales
            divisors.append(scale_g[0] if is_static else None)
        slots = [slots_g[token] for token in index]
        rounded = [
            [side.rounded(row, divisor) for row in rows_of_side]
            for side, rows_of_side, divisor in zip(sides, new, divisors, strict=True)
        ]
        if copies:
            plgpu.barrier_wait(loaded)
        writes = list(zip(sides, (key_s, value_s), (k_g, v_g), rounded, (k_scale_g, v_scale_g), strict=True))
        for j, slot in enumerate(slots):

            @pl.when((slot >= 0) & (first + j < tokens))
            def _store(j: int = j, slot: Any = slot) -> None:
                block, offset = place_of_slot(slot, block_size)
                for side, rows_s, cache_g, results, scale_g in writes:
                    target = cache_g.at[(block, slice(None), offset) if is_hnd else slot]
                    if side.dtype is None:
                        plgpu.copy_smem_to_gmem(rows_s.at[j], target, commit_group=False)
                        continue
                    row, scale = results[j]
                    store_unoptimized(target, row)
                    if scale is not None:
                        store_unoptimized(scale_g.at[block, slice(None), offset], scale)

        if copies:
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output
        scratch_types=[
            sides[0].smem(rows, key),
            sides[1].smem(rows, value),
            plgpu.Barrier(num_arrivals=copies) if copies else None,
        ],
        grid=(-(-tokens // rows),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="cache_write",
    )(key, value, slot_mapping, *refs, *scales)


def row_layout(heads: int, head_dim: int) -> Any:
    """Registers of a token's heads, a head a warp's own, or several warps' that hold the same.

    A tile of matrix products, 16 heads a warp, would be mostly padding: a token's 8 heads took 2.7 us in it,
    where the write in 16 bits takes 1.4.
    """
    lanes = 8 if head_dim % 32 else 32
    width, warps = math.gcd(head_dim // lanes, lanes // 8), math.gcd(heads, 4)
    twins = lambda count: () if count == 1 else (Replicated(count),)
    return plgpu.Layout.TILED(
        Tiling(((warps, lanes * width), (width,))),  # [warps, lanes, width]
        warp_dims=(*twins(4 // warps), *(() if warps == 1 else (-3,))),
        lane_dims=(*twins(32 // lanes), -2),
        vector_dim=-1,
    )
