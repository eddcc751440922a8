"""The kernel of block_scores: a warp loads bounds of blocks, a warpgroup multiplies them with the queries.

Rows of a tile are the kv heads of a few neighbouring blocks, columns all query heads: of the products those
of a row's own query heads count. That wastes most of the tensor core's work, which costs nothing here, and
keeps a block's bounds one piece of memory. A thread block has every `ctas`-th tile i of a request:

    producer: warp 0 of warpgroup 1    shared memory         consumer: warpgroup 0
    -------------------------------    -------------         ------------------------------------------
    TMA: queries --------------------> q[0] ---------------> wait q_full; q[0] = min(q, 0)
    block ids of its first tile                              q[1] = max(q, 0)
    for each tile i (s = i % stages):                        for each tile i:
      ids of its next tile
      wait free[s]                                             wait full[s]
      TMA: lows, highs a block ------> bounds[s] ----------->  S = low q[0]^T + high q[1]^T
                                                               arrive free[s]
                                                               largest of own heads --> global memory
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
ROWS = 64  # of a tile: what the tensor core takes
# Bytes of shared memory for bounds on their way, and thread blocks: one an SM with 160 KB takes 1 % longer.
IN_FLIGHT = 64 * 1024
CTAS = 264
# Bytes of shared memory that a thread block may take, and those besides queries and bounds: barriers, sums.
MAX_SMEM, SPARE = 232448, 3072
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static about a call.

    Attributes:
        q_heads: Query heads.
        kv_heads: Key/value heads; 8 divides them, and they divide 64 and q_heads.
        head_dim: Width of a head, a multiple of 64.
        max_blocks: Columns of the block table.
        block_size: Keys of a block.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    max_blocks: int
    block_size: int

    @property
    def blocks(self) -> int:
        """Of a tile."""
        return ROWS // self.kv_heads

    @property
    def stages(self) -> int:
        """Tiles on their way."""
        return max(IN_FLIGHT // (2 * ROWS * self.head_dim * 2), 2)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a thread block."""
        rows = self.q_heads + self.stages * ROWS
        return 2 * rows * self.head_dim * 2 + SPARE

    @property
    def max_tiles(self) -> int:
        """Of a request."""
        return -(-self.max_blocks // self.blocks)


class Inputs(NamedTuple):
    """What the kernel reads.

    Attributes:
        query: [reqs, q_heads, head_dim].
        low: [blocks, kv_heads, head_dim].
        high: The same.
        block_table: [reqs, max_blocks].
        seq_lens: [reqs].
        bias: [64, q_heads] f32: 0 for a row's own query heads, -inf for the others.
    """

    query: Ref
    low: Ref
    high: Ref
    block_table: Ref
    seq_lens: Ref
    bias: Ref


class Smem(NamedTuple):
    """Shared memory.

    Attributes:
        q: [2, q_heads, head_dim]: negative parts, for low, and positive ones, for high.
        bounds: [stages, 2, 64, head_dim]: low and high.
    """

    q: Ref
    bounds: Ref


class Pipeline(NamedTuple):
    """Barriers: the queries are there; a stage is full, or free."""

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
    shape: Shape,
    interpret: Interpret = None,
) -> jax.Array:
    """f32 [reqs, kv_heads, blocks of max_tiles]: the bound of each block; garbage past a request's end.

    Args:
        query: As Inputs'.
        low: As Inputs'.
        high: As Inputs'.
        block_table: As Inputs'.
        seq_lens: As Inputs'.
        shape: The call's static sizes.
        interpret: Interpret-mode parameters, or None for a GPU.
    """
    reqs, dtype, stages = query.shape[0], query.dtype, shape.stages
    ctas = max(min(CTAS // reqs, shape.max_tiles), 1)
    kernel = plgpu.kernel(
        functools.partial(score_body, shape=shape, ctas=ctas, is_interpreted=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((reqs, shape.kv_heads, shape.max_tiles * shape.blocks), f32),
        scratch_types=(
            Smem(
                q=swizzled_smem((2, shape.q_heads, shape.head_dim), dtype),
                bounds=swizzled_smem((stages, 2, ROWS, shape.head_dim), dtype),
            ),
            Pipeline(
                q_full=plgpu.Barrier(),
                full=plgpu.Barrier(num_arrivals=2 * shape.blocks, num_barriers=stages),
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
    return kernel(Inputs(query, low, high, block_table, seq_lens, bias_of(shape)))


def bias_of(shape: Shape) -> np.ndarray:
    """Inputs' bias; NumPy's: a constant, not a kernel that makes it."""
    kv_head, q_head = np.arange(ROWS)[:, None] % shape.kv_heads, np.arange(shape.q_heads)[None, :]
    is_own = q_head // (shape.q_heads // shape.kv_heads) == kv_head
    return np.where(is_own, 0.0, -np.inf).astype(np.float32)


def score_body(
    inputs: Inputs, out: Ref, smem: Smem, pipeline: Pipeline, *, shape: Shape, ctas: int, is_interpreted: bool
) -> None:
    """What a thread block does; `out` is score_tiles'."""
    stages = shape.stages
    req, first = lax.axis_index("req"), lax.axis_index("cta")
    num_blocks = lax.div(inputs.seq_lens[req] + (shape.block_size - 1), jnp.int32(shape.block_size))
    num = lax.div(num_blocks + (shape.blocks - 1), jnp.int32(shape.blocks))
    steps = lax.div(jnp.maximum(num - first, 0) + (ctas - 1), jnp.int32(ctas))
    tile_of = lambda step: first + step * ctas
    blocks_of = BlockTableRef(inputs.block_table, shape.block_size)

    def ids_of(step: Scalar) -> tuple[Scalar, ...]:
        return tuple(blocks_of.first(req, num_blocks).ids(tile_of(step) * shape.blocks, shape.blocks))

    def produce() -> None:
        plgpu.copy_gmem_to_smem(inputs.query.at[req], smem.q.at[0], pipeline.q_full)

        def load(step: Scalar, ids: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
            stage = lax.rem(step, jnp.int32(stages))
            following = ids_of(step + 1)  # before the wait, so that the latencies overlap
            pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, pipeline.free.at[stage]))
            for side, bounds in enumerate((inputs.low, inputs.high)):
                for j, block in enumerate(ids):
                    rows = pl.ds(j * shape.kv_heads, shape.kv_heads)
                    to = smem.bounds.at[stage, side, rows]
                    plgpu.copy_gmem_to_smem(bounds.at[block], to, pipeline.full.at[stage])
            return following

        lax.fori_loop(0, steps, load, ids_of(jnp.int32(0)))
        # Interpret mode insists that every completion is awaited.
        if is_interpreted:

            @pl.loop(jnp.maximum(steps - stages, 0), steps)
            def _(i: Scalar) -> None:
                plgpu.barrier_wait(pipeline.free.at[lax.rem(i, jnp.int32(stages))])

    def consume() -> None:
        bias = plgpu.load(inputs.bias, layout=W, optimized=False)
        plgpu.barrier_wait(pipeline.q_full)
        split_signs(smem.q, is_interpreted=is_interpreted)
        plgpu.commit_smem()

        @pl.loop(0, steps)
        def _(step: Scalar) -> None:
            stage = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(pipeline.full.at[stage])

            def product(acc: Ref) -> Tile:
                for side in range(2):
                    plgpu.wgmma(acc, smem.bounds.at[stage, side], smem.q.at[side].T)
                return acc[...]

            s = pl.run_scoped(product, plgpu.ACC((ROWS, shape.q_heads), f32))
            plgpu.barrier_arrive(pipeline.free.at[stage])
            to = out.at[req, :, pl.ds(tile_of(step) * shape.blocks, shape.blocks)]
            store_heads(to, (s + bias).max(axis=1), is_interpreted=is_interpreted)

    @pl.when(lax.axis_index("warpgroup") == PRODUCER)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            pl.when(warp == 0)(produce)

    pl.when(lax.axis_index("warpgroup") == CONSUMER)(consume)
