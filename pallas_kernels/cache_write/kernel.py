"""The kernel of cache_write: a thread block moves a few tokens, by bulk copies or through registers.

Keys and values in the dtype of the cache are copied by TMA; without TMA they pass through registers. For an
8-bit cache, they are quantized in registers.

one warpgroup, for keys and for values           copied                               quantized
----------------------------------------------   ----------------------------------   ----------------------
issue for each of its tokens j:                  TMA: row ------> new[j] (SMEM)       row ------> registers
read the tokens' slots                                                                scales, 8-bit rows
wait loaded, if anything is copied
for each token j with a slot:                    TMA: new[j] ---> cache               row ------> cache
its scales ---> cache
wait until TMA has read shared memory
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.layouts import row_layout
from pallas_kernels.shared.memory import BULK_COPY, store_unoptimized
from pallas_kernels.shared.paged_kv import split_slot
from pallas_kernels.shared.types import Barriers, Interpret, Ref, Rows, Scalar, ScratchType, Tile

MIN_SCALE = 1e-6
# Adding it to a float32 below 2^22 leaves the nearest integer, halves to even, in the low bits.
ROUNDER = 1.5 * 2.0**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideOptions:
    """Static options of writing one side of the cache, the keys or the values.

    Attributes:
        heads: Number of KV heads.
        is_copied: Whether TMA copies the rows; otherwise they pass through registers.
        dtype: 8-bit dtype that the rows are quantized to; None if they have the cache's dtype.
        has_token_scales: Whether the kernel computes a scale per token and head.
    """

    heads: int
    is_copied: bool
    dtype: np.dtype | None = None
    has_token_scales: bool = False

    def smem(self, rows: int, array: jax.Array) -> ScratchType:
        """Return shared memory for copies of rows; None if they pass through registers."""
        return plgpu.SMEM((rows, *array.shape[1:]), array.dtype) if self.is_copied else None

    def quantize(self, row: Tile, divisor: Scalar | None) -> tuple[Tile, Rows | None]:
        """Quantize the keys or values of a token, [heads, head_dim], if the cache has another dtype.

        Args:
            row: Keys or values of all heads of the token, in registers.
            divisor: Scale of the whole cache, which rows are divided by; None for 1.

        Returns:
            The row in the cache's dtype, and the scale of each head, or None without scales per token.
        """
        if self.dtype is None:
            return row, None
        is_int = self.dtype == jnp.int8
        max_stored = 127.0 if is_int else float(jnp.finfo(self.dtype).max)
        x, scale = row.astype(jnp.float32), None
        if self.has_token_scales:
            scale = jnp.maximum(jnp.max(jnp.abs(x), axis=1) / max_stored, MIN_SCALE)
            # One division per head instead of one per element.
            inverse = lax.broadcast_in_dim(1.0 / scale, x.shape, [0])
            x = x * plgpu.layout_cast(inverse, row_layout(*x.shape))
        else:
            x = x if divisor is None else x / divisor
            x = jnp.clip(x, -128.0 if is_int else -max_stored, max_stored)
        if is_int:
            x = lax.bitcast_convert_type(x + ROUNDER, jnp.int32)
        return x.astype(self.dtype), scale


type Both[T] = tuple[T, T]
"""A pair: one element for the keys, one for the values."""


class CacheWriteRefs(NamedTuple):
    """Arrays that the kernel reads, and the caches and scales that it writes in place.

    Attributes:
        new: New keys and values [tokens, kv_heads, head_dim]; flattened to [tokens, kv_heads * head_dim] for
            NHD caches of the same dtype, whose rows are copied as a whole.
        slot_mapping: Slot of each token, int32 [tokens]; tokens with negative slots are not written.
        caches: Caches to write, [slots, ...] with the last axes of `new`, or HND [blocks, kv_heads,
            block_size, head_dim].
        scales: Scales per token and head to write, [blocks, kv_heads, block_size]; or the scale of the whole
            cache, [1]; or None.
    """

    new: Both[Ref]
    slot_mapping: Ref
    caches: Both[Ref]
    scales: Both[Ref]


class CacheWriteSmem(NamedTuple):
    """Shared memory of a thread block, and the barrier for the copies into it.

    Attributes:
        new: New keys and values of the thread block's tokens, [rows, ...]; None if registers
            hold them.
        loaded: Barrier at which each copy arrives; None without copies.
    """

    new: Both[ScratchType]
    loaded: Barriers


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheWriteDims:
    """Static sizes and options of one call.

    Attributes:
        sides: Options of the keys and of the values.
        is_hnd: Whether the caches' layout is HND.
        block_size: Number of tokens per cache block.
        rows: Number of tokens per thread block.
    """

    sides: Both[SideOptions]
    is_hnd: bool
    block_size: int
    rows: int

    @property
    def num_copies(self) -> int:
        """Number of bulk copies of a thread block into shared memory."""
        return self.rows * sum(side.is_copied for side in self.sides)


def write_rows(refs: CacheWriteRefs, *, dims: CacheWriteDims, interpret: Interpret = None) -> None:
    """Run the kernel, which writes the caches and the scales per token and head in place."""
    (k_side, v_side), (new_keys, new_values) = dims.sides, refs.new
    new_smem = k_side.smem(dims.rows, new_keys), v_side.smem(dims.rows, new_values)
    loaded = plgpu.Barrier(num_arrivals=dims.num_copies) if dims.num_copies else None
    plgpu.kernel(
        functools.partial(write_body, dims=dims),
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output
        scratch_types=[CacheWriteSmem(new_smem, loaded)],
        grid=(-(-refs.slot_mapping.shape[0] // dims.rows),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="cache_write",
    )(refs)


def write_body(refs: CacheWriteRefs, unused: Ref, smem: CacheWriteSmem, *, dims: CacheWriteDims) -> None:
    """Write the tokens of one thread block."""
    tokens, sides = refs.slot_mapping.shape[0], dims.sides
    first = lax.axis_index("tile") * dims.rows
    # The last thread block loads the last token repeatedly instead of reading past the end.
    token_ids = [jnp.minimum(first + j, tokens - 1) for j in range(dims.rows)]
    # Load: all reads are issued before anything is computed, so that their latencies overlap.
    rows_per_side: list[list[Tile]] = []
    divisors: list[Scalar | None] = []
    for side, rows_g, rows_s, scale in zip(sides, refs.new, smem.new, refs.scales, strict=True):
        if side.is_copied:
            for j, token in enumerate(token_ids):
                plgpu.copy_gmem_to_smem(rows_g.at[token], rows_s.at[j], smem.loaded, oob_mode=BULK_COPY)
            rows_per_side.append([])
        else:
            load = functools.partial(plgpu.load, layout=row_layout(*rows_g.shape[1:]), optimized=False)
            rows_per_side.append([load(rows_g.at[token]) for token in token_ids])
        is_static = scale is not None and not side.has_token_scales
        divisors.append(scale[0] if is_static else None)
    slots = [refs.slot_mapping[token] for token in token_ids]
    # Quantize in registers while the copies of the other side are in flight.
    quantized = [
        [side.quantize(row, divisor) for row in rows]
        for side, rows, divisor in zip(sides, rows_per_side, divisors, strict=True)
    ]
    # Store: rows that pass through shared memory must have arrived there.
    if dims.num_copies:
        plgpu.barrier_wait(smem.loaded)
    writes = list(zip(sides, smem.new, refs.caches, quantized, refs.scales, strict=True))
    for j, slot in enumerate(slots):

        @pl.when((slot >= 0) & (first + j < tokens))
        def _store(j: int = j, slot: Scalar = slot) -> None:
            block, offset = split_slot(slot, dims.block_size)
            for side, rows_s, cache, results, scale_ref in writes:
                target = cache.at[(block, slice(None), offset) if dims.is_hnd else slot]
                if side.is_copied:
                    plgpu.copy_smem_to_gmem(rows_s.at[j], target, commit_group=False)
                    continue
                row, scale = results[j]
                store_unoptimized(target, row)
                if scale is not None:
                    store_unoptimized(scale_ref.at[block, slice(None), offset], scale)

    # The thread block must not exit, which frees its shared memory, before TMA has read it.
    if dims.num_copies:
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
