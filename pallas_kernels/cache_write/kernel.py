"""One thread block moves a few tokens: each row of keys and of values is a bulk copy in and one out."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache_write.tiles import Tiles

# Contiguous rows need no tensor map, so any length of 16 bytes and more will do.
BULK = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


def write_rows(
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    k_ref: Any,
    v_ref: Any,
    *,
    is_hnd: bool,
    block_size: int,
    tiles: Tiles,
    interpret: Any = None,
) -> None:
    """Writes into the caches behind k_ref and v_ref.

    Args:
        key: [tokens, kv_heads * head_dim], or [tokens, kv_heads, head_dim] for HND.
        value: As key.
        slot_mapping: int32 [tokens]; tokens of slots < 0 are not written.
        k_ref: jax.Ref: [slots, kv_heads * head_dim], or HND [blocks, kv_heads, block_size, head_dim].
        v_ref: As k_ref.
        is_hnd: Which of the two.
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
        unused_g,
        key_s,  # [rows, ...] in SMEM
        value_s,
        loaded,
    ):
        first = lax.axis_index("tile") * rows
        # The last tile loads its last token again rather than reading past the end.
        index = [jnp.minimum(first + j, tokens - 1) for j in range(rows)]
        for j, token in enumerate(index):
            plgpu.copy_gmem_to_smem(key_g.at[token], key_s.at[j], loaded, oob_mode=BULK)
            plgpu.copy_gmem_to_smem(value_g.at[token], value_s.at[j], loaded, oob_mode=BULK)
        slots = [slots_g[token] for token in index]
        plgpu.barrier_wait(loaded)
        for j, slot in enumerate(slots):

            @pl.when((slot >= 0) & (first + j < tokens))
            def _store(j: int = j, slot: Any = slot) -> None:
                for rows_s, cache_g in ((key_s, k_g), (value_s, v_g)):
                    target = slot
                    if is_hnd:
                        target = (lax.div(slot, block_size), slice(None), lax.rem(slot, block_size))
                    plgpu.copy_smem_to_gmem(rows_s.at[j], cache_g.at[target], commit_group=False)

        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output
        scratch_types=[
            plgpu.SMEM((rows, *key.shape[1:]), key.dtype),
            plgpu.SMEM((rows, *value.shape[1:]), value.dtype),
            plgpu.Barrier(num_arrivals=2 * rows),
        ],
        grid=(-(-tokens // rows),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="cache_write",
    )(key, value, slot_mapping, k_ref, v_ref)
