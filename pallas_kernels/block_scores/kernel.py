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

Without TMA there is no loader: each warp of the consumer fills its 16 rows of a stage again by cp.async as
soon as it has read them. Without wgmma, the consumer multiplies by mma.sync. The consumer is the same.
"""

import dataclasses
import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.architectures import ARCHITECTURES, Architecture
from pallas_kernels.ptx.cp_async import (
    commit_copies,
    copy_queries,
    release_to_warp,
    wait_for_warp,
    wait_for_warpgroup,
)
from pallas_kernels.ptx.cp_async_paged import copy_tile
from pallas_kernels.ptx.split_signs import split_signs
from pallas_kernels.ptx.stores import store_heads
from pallas_kernels.ptx.tile_mma import multiply_chunks
from pallas_kernels.shared.layouts import WARPGROUP_ROWS, WGMMA
from pallas_kernels.shared.memory import HeadChunks, swizzled_smem
from pallas_kernels.shared.paged_kv import BlockTableRef, CacheTiling
from pallas_kernels.shared.types import Barriers, Interpret, Ref, Scalar, Tile, f32

CONSUMER, LOADER = range(2)  # warpgroups
# Bytes of shared memory for bounds in flight, and thread blocks of the grid per SM, measured on an H200. One
# thread block per SM with 160 KB takes 1 % longer. Those of other architectures are estimated.
BYTES_IN_FLIGHT = 64 * 1024
SCORE_CTAS_PER_SM = 2
SMEM_RESERVE = 3072  # bytes for everything except queries and bounds: barriers, sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScoresDims:
    """Static sizes of one call.

    Attributes:
        q_heads: Number of query heads.
        kv_heads: Number of KV heads, a multiple of 8 that divides 64 and q_heads.
        head_dim: Number of elements per head, a multiple of 64.
        max_blocks: Number of columns of the block table.
        block_size: Number of keys per block.
        gpu: Compute capability that the kernel is built for, one of architectures.ARCHITECTURES.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    max_blocks: int
    block_size: int
    gpu: str = "9.0"

    @property
    def architecture(self) -> Architecture:
        """Architecture that the kernel is built for."""
        return ARCHITECTURES[self.gpu]

    @property
    def blocks(self) -> int:
        """Number of blocks per tile."""
        return WARPGROUP_ROWS // self.kv_heads

    @property
    def stages(self) -> int:
        """Number of pipeline stages, each with the bounds of one tile: two or more, or one if no more fit."""
        stage_bytes = 2 * WARPGROUP_ROWS * self.head_dim * 2
        if self.architecture.has_wgmma:
            return max(BYTES_IN_FLIGHT // stage_bytes, 2)
        available = self.architecture.smem_bytes - SMEM_RESERVE - 2 * self.q_heads * self.head_dim * 2
        in_flight = max(self.architecture.bytes_in_flight(BYTES_IN_FLIGHT), 2 * stage_bytes)
        return max(min(in_flight, available) // stage_bytes, 1)

    @property
    def tiling(self) -> CacheTiling:
        """The bounds as a cache: each block holds the bounds of kv_heads heads in place of tokens."""
        head = HeadChunks(1, self.head_dim, self.head_dim, self.head_dim, is_padded=False)
        return CacheTiling(block_size=self.kv_heads, run_length=WARPGROUP_ROWS, is_hnd=False, head=head)

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory per thread block."""
        rows = self.q_heads + self.stages * WARPGROUP_ROWS
        return 2 * rows * self.head_dim * 2 + SMEM_RESERVE

    @property
    def max_tiles(self) -> int:
        """Maximum number of tiles per request."""
        return -(-self.max_blocks // self.blocks)


class BlockScoresInputs(NamedTuple):
    """Arrays that the kernel reads.

    Attributes:
        query: One query token per request, [reqs, q_heads, head_dim].
        low: Minimum of each element over a block's keys, [blocks, kv_heads, head_dim]; without TMA as
            `BlockScoresDims.tiling` shapes it.
        high: Maximum of each element over a block's keys, of the shape of `low`.
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
    num_ctas, uses_tma = SCORE_CTAS_PER_SM * dims.architecture.num_sms, dims.architecture.has_tma
    ctas = max(min(num_ctas // reqs, dims.max_tiles), 1)
    barriers = BlockScoresBarriers(
        q_full=plgpu.Barrier(),
        full=plgpu.Barrier(num_arrivals=2 * dims.blocks, num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
    )
    if not uses_tma:
        low, high = (dims.tiling.tile_cache(bounds[:, :, None]) for bounds in (low, high))
    kernel = plgpu.kernel(
        functools.partial(score_body, dims=dims, ctas=ctas, is_interpreted=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((reqs, dims.kv_heads, dims.max_tiles * dims.blocks), f32),
        scratch_types=(
            BlockScoresSmem(
                q=swizzled_smem((2, dims.q_heads, dims.head_dim), dtype),
                bounds=swizzled_smem((stages, 2, WARPGROUP_ROWS, dims.head_dim), dtype),
            ),
            barriers if uses_tma else None,
        ),
        grid=(reqs, ctas),
        grid_names=("req", "cta"),
        num_threads=2 if uses_tma else 1,
        thread_name="warpgroup",
        kernel_name="block_scores",
        interpret=interpret,
    )
    return kernel(BlockScoresInputs(query, low, high, block_table, seq_lens, head_bias(dims)))


def head_bias(dims: BlockScoresDims) -> np.ndarray:
    """Return the f32 bias [64, q_heads]: 0 for query heads of the row's KV head, else -inf.

    A NumPy array is a constant of the kernel; a jnp array would be computed on the device.
    """
    kv_head, q_head = np.arange(WARPGROUP_ROWS)[:, None] % dims.kv_heads, np.arange(dims.q_heads)[None, :]
    is_own_head = q_head // (dims.q_heads // dims.kv_heads) == kv_head
    return np.where(is_own_head, 0.0, -np.inf).astype(np.float32)


@runtime_checkable
class Pipeline(Protocol):
    """The loads of a thread block as the consumer sees them.

    The consumer calls `start`, `wait_queries` and `publish_queries`, then `wait_tile` and `release_tile` for
    each step.
    """

    def start(self) -> tuple[Scalar, ...]:
        """Start to load, and return the state that `release_tile` takes and returns."""
        ...

    def wait_queries(self) -> None:
        """Wait until the queries are in shared memory."""
        ...

    def publish_queries(self) -> None:
        """Wait until all threads have written the parts of the queries, so that all may read them."""
        ...

    def wait_tile(self, stage: Scalar) -> None:
        """Wait until the bounds of a stage's tile are in shared memory."""
        ...

    def release_tile(self, step: Scalar, state: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        """Declare that the bounds of a step's tile have been read, so that the stage may be filled again."""
        ...


class TileSource:
    """The tiles of one thread block, and where their bounds are in global and in shared memory."""

    def __init__(self, inputs: BlockScoresInputs, smem: BlockScoresSmem, dims: BlockScoresDims, ctas: int):
        self.inputs, self.smem, self.dims, self.ctas = inputs, smem, dims, ctas
        self.stages = dims.stages
        self.req, self.first_tile = lax.axis_index("req"), lax.axis_index("cta")
        num_keys = inputs.seq_lens[self.req] + (dims.block_size - 1)
        self.num_blocks = lax.div(num_keys, jnp.int32(dims.block_size))
        num_tiles = lax.div(self.num_blocks + (dims.blocks - 1), jnp.int32(dims.blocks))
        self.num_steps = lax.div(jnp.maximum(num_tiles - self.first_tile, 0) + (ctas - 1), jnp.int32(ctas))
        self.table = BlockTableRef(inputs.block_table, dims.block_size)

    def first_block(self, step: Scalar) -> Scalar:
        """Return the first block of a step's tile."""
        return (self.first_tile + step * self.ctas) * self.dims.blocks

    def block_ids(self, step: Scalar) -> tuple[Scalar, ...]:
        """Return the ids of a tile's blocks."""
        blocks = self.table.first_blocks(self.req, self.num_blocks)
        return tuple(blocks.ids(self.first_block(step), self.dims.blocks))

    def stage(self, step: Scalar) -> Scalar:
        """Return the stage of a step's tile."""
        return lax.rem(step, jnp.int32(self.stages))


class TmaPipeline(Pipeline):
    """Loads that `load_by_tma` issues in another warpgroup; the consumer only waits at barriers."""

    def __init__(self, barriers: BlockScoresBarriers, source: TileSource):
        self.barriers, self.source = barriers, source

    def start(self) -> tuple[Scalar, ...]:
        """Do nothing, because the loader runs ahead."""
        return ()

    def wait_queries(self) -> None:
        """Wait until TMA has written the queries."""
        plgpu.barrier_wait(self.barriers.q_full)

    def publish_queries(self) -> None:
        """Commit shared memory, also for wgmma."""
        plgpu.commit_smem()

    def wait_tile(self, stage: Scalar) -> None:
        """Wait until the bounds of all blocks of the tile have arrived."""
        plgpu.barrier_wait(self.barriers.full.at[stage])

    def release_tile(self, step: Scalar, state: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        """Arrive at the barrier for which the loader waits."""
        plgpu.barrier_arrive(self.barriers.free.at[self.source.stage(step)])
        return state


class CpAsyncPipeline(Pipeline):
    """Loads that the consumer issues by cp.async; each warp loads the rows that it multiplies.

    The groups of copies are, in order: the queries; the first `stages` tiles; then tile i + stages when tile
    i has been read. After the last tile groups are empty. So at any wait for a tile, exactly `stages - 1`
    groups are younger than its own. The state is the block ids of the next tile to load.
    """

    def __init__(self, source: TileSource, *, is_interpreted: bool):
        self.source, self.is_interpreted = source, is_interpreted

    def start(self) -> tuple[Scalar, ...]:
        """Load the queries and the first `stages` tiles."""
        source, stages = self.source, self.source.stages
        ids = [source.block_ids(jnp.int32(i)) for i in range(stages + 1)]
        query_g = source.inputs.query.at[source.req]
        head, is_interpreted = source.dims.tiling.head, self.is_interpreted
        copy_queries(source.smem.q.at[pl.ds(0, 1)], query_g, head=head, is_interpreted=is_interpreted)
        commit_copies(is_interpreted=is_interpreted)
        for i in range(stages):
            self.load(jnp.int32(i), ids[i])
        return ids[stages]

    def load(self, step: Scalar, ids: tuple[Scalar, ...]) -> None:
        """Load a step's tile if there is one, and commit the copies."""
        source, tiling = self.source, self.source.dims.tiling
        stage, zero = source.stage(step), step * 0

        @pl.when(step < source.num_steps)
        def _() -> None:
            for side, bounds_g in enumerate((source.inputs.low, source.inputs.high)):
                target, copies = source.smem.bounds.at[stage, pl.ds(side, 1)], [zero] * len(ids)
                copy_tile(
                    target, bounds_g, ids, copies, zero, tiling=tiling, is_interpreted=self.is_interpreted
                )

        commit_copies(is_interpreted=self.is_interpreted)

    def wait_queries(self) -> None:
        """Wait for the first group of all threads."""
        wait_for_warpgroup(num_pending=self.source.stages, is_interpreted=self.is_interpreted)

    def publish_queries(self) -> None:
        """Wait for all threads; their copies are the same as at `wait_queries`."""
        self.wait_queries()

    def wait_tile(self, stage: Scalar) -> None:
        """Wait for the copies of the warp's rows."""
        wait_for_warp(num_pending=self.source.stages - 1, is_interpreted=self.is_interpreted)

    def release_tile(self, step: Scalar, state: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        """Load the tile that uses the stage next, and read the block ids of the one after it."""
        release_to_warp(is_interpreted=self.is_interpreted)
        self.load(step + self.source.stages, state)
        return self.source.block_ids(step + (self.source.stages + 1))


def load_by_tma(source: TileSource, barriers: BlockScoresBarriers, *, is_interpreted: bool) -> None:
    """Load the queries, and the bounds of each tile into the stages; for one warp."""
    inputs, smem, kv_heads, stages = source.inputs, source.smem, source.dims.kv_heads, source.stages
    plgpu.copy_gmem_to_smem(inputs.query.at[source.req], smem.q.at[0], barriers.q_full)

    def load(step: Scalar, ids: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        stage = source.stage(step)
        # Read the next tile's block ids before the wait, so that the latencies overlap.
        next_ids = source.block_ids(step + 1)
        # Wait until the consumer has read the tile that used this stage before.
        pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, barriers.free.at[stage]))
        for side, bounds in enumerate((inputs.low, inputs.high)):
            for j, block in enumerate(ids):
                target = smem.bounds.at[stage, side, pl.ds(j * kv_heads, kv_heads)]
                plgpu.copy_gmem_to_smem(bounds.at[block], target, barriers.full.at[stage])
        return next_ids

    lax.fori_loop(0, source.num_steps, load, source.block_ids(jnp.int32(0)))
    # Interpret mode requires that every completion of a barrier is awaited.
    if is_interpreted:

        @pl.loop(jnp.maximum(source.num_steps - stages, 0), source.num_steps)
        def _(i: Scalar) -> None:
            plgpu.barrier_wait(barriers.free.at[source.stage(i)])


def score_body(
    inputs: BlockScoresInputs,
    out: Ref,
    smem: BlockScoresSmem,
    barriers: BlockScoresBarriers | None,
    *,
    dims: BlockScoresDims,
    ctas: int,
    is_interpreted: bool,
) -> None:
    """Score every `ctas`-th tile of one request; `out` is the result of `score_tiles`."""
    source = TileSource(inputs, smem, dims, ctas)

    def multiply(stage: Scalar) -> Tile:
        """Return low q[0]^T + high q[1]^T of a stage."""
        shape = WARPGROUP_ROWS, dims.q_heads

        def by_wgmma(acc: Ref) -> Tile:
            for side in range(2):
                plgpu.wgmma(acc, smem.bounds.at[stage, side], smem.q.at[side].T)
            return acc[...]

        if dims.architecture.has_wgmma:
            return pl.run_scoped(by_wgmma, plgpu.ACC(shape, f32))
        return multiply_chunks(smem.bounds.at[stage], smem.q, is_interpreted=is_interpreted)

    def consume(pipeline: Pipeline) -> None:
        state = pipeline.start()
        bias = plgpu.load(inputs.bias, layout=WGMMA, optimized=False)
        # Wait for the queries, and split them by sign: a product with a negative element is largest at `low`.
        pipeline.wait_queries()
        split_signs(smem.q, is_interpreted=is_interpreted)
        pipeline.publish_queries()

        def score(step: Scalar, state: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
            stage = source.stage(step)
            pipeline.wait_tile(stage)
            s = multiply(stage)
            # The bounds have been read: the stage may be filled again.
            state = pipeline.release_tile(step, state)
            # The maximum over the query heads of each row's KV head is the score of its block.
            target = out.at[source.req, :, pl.ds(source.first_block(step), dims.blocks)]
            store_heads(target, (s + bias).max(axis=1), is_interpreted=is_interpreted)
            return state

        lax.fori_loop(0, source.num_steps, score, state)

    if barriers is None:
        consume(CpAsyncPipeline(source, is_interpreted=is_interpreted))
        return

    @pl.when(lax.axis_index("warpgroup") == LOADER)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            load = functools.partial(load_by_tma, source, barriers, is_interpreted=is_interpreted)
            pl.when(warp == 0)(load)

    pl.when(lax.axis_index("warpgroup") == CONSUMER)(
        functools.partial(consume, TmaPipeline(barriers, source))
    )
