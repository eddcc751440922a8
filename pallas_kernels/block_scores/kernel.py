"""The kernel of block_scores: one warp loads bounds of blocks, a warpgroup multiplies them by the queries.

The rows of a tile are the KV heads of a few consecutive blocks, and its columns are all query heads. Only the
products of a KV head with the query heads of its group are used. The unused products take no additional time,
because loads bound the speed, and the bounds of a block stay contiguous. A thread block processes every
`ctas`-th tile i of a request:

    loader: warp 0 of warpgroup 1      shared memory         consumer: warpgroup 0
    -------------------------------    -------------         ------------------------------------------
    TMA: queries --------------------> q[0] ---------------> wait q_full; q[0] = min(q, 0)
    block ids of its first tile                              q[1] = max(q, 0)
    for each tile i (s = i % stages):                        for each tile i:
      ids of its next tile
      wait free[s]                                             wait full[s]
      TMA: low, high of each block ---> bounds[s] ---------->  S = low q[0]^T + high q[1]^T
                                                               arrive free[s]
                                                               maximum per group --> global memory
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

from pallas_kernels.ptx.split_signs import split_signs
from pallas_kernels.ptx.stores import store_heads
from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.paged_kv import BlockTableRef
from pallas_kernels.shared.types import Barriers, Interpret, Ref, Scalar, Tile

W = plgpu.Layout.WGMMA
CONSUMER, PRODUCER = range(2)  # warpgroups
TILE_ROWS = 64  # rows of a tile: the M of the tensor core
# Bytes of shared memory for bounds in flight, and thread blocks of the grid. One thread block per SM with 160
# KB takes 1 % longer.
BYTES_IN_FLIGHT = 64 * 1024
CTAS = 264
# Bytes of shared memory per thread block, and bytes for everything except queries and bounds: barriers, sums.
MAX_SMEM, SMEM_RESERVE = 232448, 3072
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScoresDims:
    """Static sizes of one call.

    Attributes:
        q_heads: Number of query heads.
        kv_heads: Number of KV heads, a multiple of 8 that divides 64 and q_heads.
        head_dim: Number of elements per head, a multiple of 64.
        max_blocks: Number of columns of the block table.
        block_size: Number of keys per block.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    max_blocks: int
    block_size: int

    @property
    def blocks(self) -> int:
        """Number of blocks per tile."""
        return TILE_ROWS // self.kv_heads

    @property
    def stages(self) -> int:
        """Number of pipeline stages, each with the bounds of one tile."""
        return max(BYTES_IN_FLIGHT // (2 * TILE_ROWS * self.head_dim * 2), 2)

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory per thread block."""
        rows = self.q_heads + self.stages * TILE_ROWS
        return 2 * rows * self.head_dim * 2 + SMEM_RESERVE

    @property
    def max_tiles(self) -> int:
        """Maximum number of tiles per request."""
        return -(-self.max_blocks // self.blocks)


class BlockScoresInputs(NamedTuple):
    """Arrays that the kernel reads.

    Attributes:
        query: One query token per request, [reqs, q_heads, head_dim].
        low: Minimum of each element over a block's keys, [blocks, kv_heads, head_dim].
        high: Maximum of each element over a block's keys, [blocks, kv_heads, head_dim].
        block_table: Block ids of each request, int32 [reqs, max_blocks].
        seq_lens: Number of keys of each request, int32 [reqs].
        bias: f32 [64, q_heads]: 0 for the query heads of a row's KV head, -inf for all other query heads.
    """

    query: Ref
    low: Ref
    high: Ref
    block_table: Ref
    seq_lens: Ref
    bias: Ref


class BlockScoresSmem(NamedTuple):
    """Shared memory of a thread block.

    Attributes:
        q: Negative part of the queries, which is multiplied by `low`, and positive part, which is multiplied
            by `high`: [2, q_heads, head_dim].
        bounds: Values of `low` and `high` of each stage's tile, [stages, 2, 64, head_dim].
    """

    q: Ref
    bounds: Ref


class BlockScoresBarriers(NamedTuple):
    """Barriers between the loader and the consumer.

    Attributes:
        q_full: Queries have arrived.
        full: Bounds of a tile have arrived [stages].
        free: The consumer has read the bounds of a tile [stages].
    """

    q_full: Barriers
    full: Barriers
    free: Barriers


def score_tiles(
    query: jax.Array,
    low: jax.Array,
    high: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    dims: BlockScoresDims,
    interpret: Interpret = None,
) -> jax.Array:
    """Return the bound of each block, f32 [reqs, kv_heads, blocks of max_tiles].

    Bounds after a request's last block are undefined.

    Args:
        query: See BlockScoresInputs.
        low: See BlockScoresInputs.
        high: See BlockScoresInputs.
        block_table: See BlockScoresInputs.
        seq_lens: See BlockScoresInputs.
        dims: Static sizes of the call.
        interpret: Parameters of interpret mode, or None for a GPU.
    """
    reqs, dtype, stages = query.shape[0], query.dtype, dims.stages
    ctas = max(min(CTAS // reqs, dims.max_tiles), 1)
    kernel = plgpu.kernel(
        functools.partial(score_body, dims=dims, ctas=ctas, is_interpreted=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((reqs, dims.kv_heads, dims.max_tiles * dims.blocks), f32),
        scratch_types=(
            BlockScoresSmem(
                q=swizzled_smem((2, dims.q_heads, dims.head_dim), dtype),
                bounds=swizzled_smem((stages, 2, TILE_ROWS, dims.head_dim), dtype),
            ),
            BlockScoresBarriers(
                q_full=plgpu.Barrier(),
                full=plgpu.Barrier(num_arrivals=2 * dims.blocks, num_barriers=stages),
                free=plgpu.Barrier(num_barriers=stages),
            ),
        ),
        grid=(reqs, ctas),
        grid_names=("req", "cta"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="block_scores",
        interpret=interpret,
    )
    return kernel(BlockScoresInputs(query, low, high, block_table, seq_lens, head_bias(dims)))


def head_bias(dims: BlockScoresDims) -> np.ndarray:
    """Return the f32 bias [64, q_heads]: 0 for query heads of the row's KV head, else -inf.

    A NumPy array is a constant of the kernel; a jnp array would be computed on the device.
    """
    kv_head, q_head = np.arange(TILE_ROWS)[:, None] % dims.kv_heads, np.arange(dims.q_heads)[None, :]
    is_own_head = q_head // (dims.q_heads // dims.kv_heads) == kv_head
    return np.where(is_own_head, 0.0, -np.inf).astype(np.float32)


def score_body(
    inputs: BlockScoresInputs,
    out: Ref,
    smem: BlockScoresSmem,
    barriers: BlockScoresBarriers,
    *,
    dims: BlockScoresDims,
    ctas: int,
    is_interpreted: bool,
) -> None:
    """Score every `ctas`-th tile of one request; `out` is the result of `score_tiles`."""
    stages = dims.stages
    req, first_tile = lax.axis_index("req"), lax.axis_index("cta")
    num_blocks = lax.div(inputs.seq_lens[req] + (dims.block_size - 1), jnp.int32(dims.block_size))
    num_tiles = lax.div(num_blocks + (dims.blocks - 1), jnp.int32(dims.blocks))
    num_steps = lax.div(jnp.maximum(num_tiles - first_tile, 0) + (ctas - 1), jnp.int32(ctas))
    table = BlockTableRef(inputs.block_table, dims.block_size)

    def first_block(step: Scalar) -> Scalar:
        return (first_tile + step * ctas) * dims.blocks

    def block_ids(step: Scalar) -> tuple[Scalar, ...]:
        return tuple(table.first_blocks(req, num_blocks).ids(first_block(step), dims.blocks))

    def produce() -> None:
        plgpu.copy_gmem_to_smem(inputs.query.at[req], smem.q.at[0], barriers.q_full)

        def load(step: Scalar, ids: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
            stage = lax.rem(step, jnp.int32(stages))
            # Read the next tile's block ids before the wait, so that the latencies overlap.
            next_ids = block_ids(step + 1)
            # Wait until the consumer has read the tile that used this stage before.
            pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, barriers.free.at[stage]))
            for side, bounds in enumerate((inputs.low, inputs.high)):
                for j, block in enumerate(ids):
                    rows = pl.ds(j * dims.kv_heads, dims.kv_heads)
                    target = smem.bounds.at[stage, side, rows]
                    plgpu.copy_gmem_to_smem(bounds.at[block], target, barriers.full.at[stage])
            return next_ids

        lax.fori_loop(0, num_steps, load, block_ids(jnp.int32(0)))
        # Interpret mode requires that every completion of a barrier is awaited.
        if is_interpreted:

            @pl.loop(jnp.maximum(num_steps - stages, 0), num_steps)
            def _(i: Scalar) -> None:
                plgpu.barrier_wait(barriers.free.at[lax.rem(i, jnp.int32(stages))])

    def consume() -> None:
        bias = plgpu.load(inputs.bias, layout=W, optimized=False)
        # Wait for the queries, and split them by sign: a product with a negative element is largest at `low`.
        plgpu.barrier_wait(barriers.q_full)
        split_signs(smem.q, is_interpreted=is_interpreted)
        plgpu.commit_smem()

        @pl.loop(0, num_steps)
        def _(step: Scalar) -> None:
            stage = lax.rem(step, jnp.int32(stages))
            # Wait until the bounds of all blocks of the tile have arrived.
            plgpu.barrier_wait(barriers.full.at[stage])

            def multiply(acc: Ref) -> Tile:
                for side in range(2):
                    plgpu.wgmma(acc, smem.bounds.at[stage, side], smem.q.at[side].T)
                return acc[...]

            s = pl.run_scoped(multiply, plgpu.ACC((TILE_ROWS, dims.q_heads), f32))
            # The bounds have been read: the loader may refill the stage.
            plgpu.barrier_arrive(barriers.free.at[stage])
            # The maximum over the query heads of each row's KV head is the score of its block.
            target = out.at[req, :, pl.ds(first_block(step), dims.blocks)]
            store_heads(target, (s + bias).max(axis=1), is_interpreted=is_interpreted)

    @pl.when(lax.axis_index("warpgroup") == PRODUCER)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            pl.when(warp == 0)(produce)

    pl.when(lax.axis_index("warpgroup") == CONSUMER)(consume)
