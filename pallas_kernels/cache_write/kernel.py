"""One thread block moves a few tokens: by bulk copies, or through registers where they become 8 bits.

one warpgroup, for keys and for values           where rows are stored as they come   where they are rounded
----------------------------------------------   ----------------------------------   ----------------------
for each of its tokens j, all on their way:      TMA: row ------> new[j] (SMEM)       row ------> registers
the tokens' slots                                                                     scales, 8 bits
wait loaded, if anything is copied
for each token j with a slot:                    TMA: new[j] ---> cache               row ------> cache
its scales > cache
wait until shared memory has been read
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import BULK_COPY, store_unoptimized
from pallas_kernels.shared.paged_kv import split_slot
from pallas_kernels.shared.types import Barriers, Interpret, Layout, Ref, Rows, Scalar, ScratchType, Tile

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
    dtype: np.dtype | None = None
    has_token_scales: bool = False

    def smem(self, rows: int, array: jax.Array) -> ScratchType:
        """Where rows pass through on their way, if they need no registers."""
        return plgpu.SMEM((rows, *array.shape[1:]), array.dtype) if self.dtype is None else None

    def rounded(self, row: Tile, divisor: Scalar | None) -> tuple[Tile, Rows | None]:
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


type Both[T] = tuple[T, T]
"""Something of keys, and of values."""


class Refs(NamedTuple):
    """What the kernel reads, and the caches that it writes in place.

    Attributes:
        new: [tokens, kv_heads, head_dim], or [tokens, kv_heads * head_dim] where nothing needs the heads.
        slot_mapping: int32 [tokens]; tokens of slots < 0 are not written.
        caches: jax.Ref [slots, *], as new, or HND [blocks, kv_heads, block_size, head_dim].
        scales: None, a static scale [1], or jax.Ref [blocks, kv_heads, block_size].
    """

    new: Both[Ref]
    slot_mapping: Ref
    caches: Both[Ref]
    scales: Both[Ref]


class Smem(NamedTuple):
    """Shared memory, and the barrier of what is loaded into it.

    Attributes:
        new: [rows, ...]; None where they are rounded.
        loaded: Arrived at by every copy; None where there is none.
    """

    new: Both[ScratchType]
    loaded: Barriers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static about a call.

    Attributes:
        sides: How keys and how values are written.
        is_hnd: The layout.
        block_size: Tokens of a block.
        rows: Tokens of a thread block.
    """

    sides: Both[Side]
    is_hnd: bool
    block_size: int
    rows: int

    @property
    def copies(self) -> int:
        """Bulk copies of a thread block into shared memory."""
        return self.rows * sum(side.dtype is None for side in self.sides)


def write_rows(refs: Refs, *, shape: Shape, interpret: Interpret = None) -> None:
    """Writes into the caches behind refs, and into the scales per token and head."""
    (key, value), (new_keys, new_values) = shape.sides, refs.new
    rows_of_both = key.smem(shape.rows, new_keys), value.smem(shape.rows, new_values)
    loaded = plgpu.Barrier(num_arrivals=shape.copies) if shape.copies else None
    plgpu.kernel(
        functools.partial(write_body, shape=shape),
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output
        scratch_types=[Smem(rows_of_both, loaded)],
        grid=(-(-refs.slot_mapping.shape[0] // shape.rows),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="cache_write",
    )(refs)


def write_body(refs: Refs, unused: Ref, smem: Smem, *, shape: Shape) -> None:
    """What a thread block does."""
    tokens, sides = refs.slot_mapping.shape[0], shape.sides
    first = lax.axis_index("tile") * shape.rows
    # The last tile loads its last token again rather than reading past the end.
    index = [jnp.minimum(first + j, tokens - 1) for j in range(shape.rows)]
    new: list[list[Tile]] = []  # all that is read is on its way before anything is computed
    divisors: list[Scalar | None] = []
    for side, rows_g, rows_s, scale in zip(sides, refs.new, smem.new, refs.scales, strict=True):
        if side.dtype is None:
            for j, token in enumerate(index):
                plgpu.copy_gmem_to_smem(rows_g.at[token], rows_s.at[j], smem.loaded, oob_mode=BULK_COPY)
            new.append([])
        else:
            load = functools.partial(plgpu.load, layout=row_layout(*rows_g.shape[1:]), optimized=False)
            new.append([load(rows_g.at[token]) for token in index])
        is_static = scale is not None and not side.has_token_scales
        divisors.append(scale[0] if is_static else None)
    slots = [refs.slot_mapping[token] for token in index]
    rounded = [
        [side.rounded(row, divisor) for row in rows_of_side]
        for side, rows_of_side, divisor in zip(sides, new, divisors, strict=True)
    ]
    if shape.copies:
        plgpu.barrier_wait(smem.loaded)
    writes = list(zip(sides, smem.new, refs.caches, rounded, refs.scales, strict=True))
    for j, slot in enumerate(slots):

        @pl.when((slot >= 0) & (first + j < tokens))
        def _store(j: int = j, slot: Scalar = slot) -> None:
            block, offset = split_slot(slot, shape.block_size)
            for side, rows_s, cache, results, scale in writes:
                target = cache.at[(block, slice(None), offset) if shape.is_hnd else slot]
                if side.dtype is None:
                    plgpu.copy_smem_to_gmem(rows_s.at[j], target, commit_group=False)
                    continue
                row, made = results[j]
                store_unoptimized(target, row)
                if made is not None:
                    store_unoptimized(scale.at[block, slice(None), offset], made)

    if shape.copies:
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def row_layout(heads: int, head_dim: int) -> Layout:
    """Registers of a token's heads, a head a warp's own, or several warps' that hold the same.

    A tile of matrix products, 16 heads a warp, would be mostly padding: a token's 8 heads took 2.7 us in it,
    where the write in 16 bits takes 1.4.
    """
    lanes = math.gcd(head_dim, 32)
    width, warps = math.gcd(head_dim // lanes, lanes // 8), math.gcd(heads, 4)
    twins = lambda count: () if count == 1 else (Replicated(count),)
    return plgpu.Layout.TILED(
        Tiling(((warps, lanes * width), (width,))),  # [warps, lanes, width]
        warp_dims=(*twins(4 // warps), *(() if warps == 1 else (-3,))),
        lane_dims=(*twins(32 // lanes), -2),
        vector_dim=-1,
    )
