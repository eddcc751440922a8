"""The kernel of block_scores: a warp loads bounds of blocks, a warpgroup multiplies them with the queries.

Rows of a tile are the kv heads of a few neighbouring blocks, columns all query heads: of the products those
of a row's own query heads count. That wastes most of the tensor core's work, which costs nothing here, and
keeps a block's bounds one piece of memory.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.dequant import swizzled_smem

W = plgpu.Layout.WGMMA
ROWS = 64  # of a tile: what the tensor core takes
IN_FLIGHT = 160 * 1024  # bytes of shared memory for bounds on their way
CTAS = 132
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static about a call.

    Attributes:
        q_heads: Query heads.
        kv_heads: Key/value heads; 8 divides them, and they divide 64.
        head_dim: Width of a head, a multiple of 64.
        max_blocks: Columns of the block table.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    max_blocks: int

    @property
    def blocks(self) -> int:
        """Of a tile."""
        return ROWS // self.kv_heads

    @property
    def stages(self) -> int:
        """Tiles on their way."""
        return IN_FLIGHT // (2 * ROWS * self.head_dim * 2)

    @property
    def max_tiles(self) -> int:
        """Of a request."""
        return -(-self.max_blocks // self.blocks)


def score_tiles(
    query: jax.Array,
    low: jax.Array,
    high: jax.Array,
    block_table: jax.Array,
    num_blocks: jax.Array,
    *,
    shape: Shape,
    interpret: Any = None,
) -> jax.Array:
    """f32 [reqs, max_tiles * 64]: for each block and kv head the bound; garbage past a request's end.

    Args:
        query: [reqs, 2, q_heads, head_dim]: its negative part, for low, and its positive one, for high.
        low: [blocks, kv_heads, head_dim]
        high: The same.
        block_table: [reqs, max_blocks]
        num_blocks: [reqs]
        shape: The call's static sizes.
        interpret: Interpret-mode parameters, or None for a GPU.
    """
    reqs, dtype, stages = query.shape[0], query.dtype, shape.stages
    ctas = max(min(CTAS // reqs, shape.max_tiles), 1)

    def body(  # type: ignore[no-untyped-def]
        q_g,
        low_g,
        high_g,
        table_g,
        len_g,
        bias_g,  # [64, q_heads]: 0 for a row's own query heads, -inf for the others
        out_g,
        q_s,  # [2, q_heads, head_dim] in SMEM
        bounds_s,  # [stages, 2, 64, head_dim] in SMEM
        q_full,
        full,
        free,
    ):
        req, first = lax.axis_index("req"), lax.axis_index("part")
        num = lax.div(len_g[req] + (shape.blocks - 1), jnp.int32(shape.blocks))
        steps = lax.div(jnp.maximum(num - first, 0) + (ctas - 1), jnp.int32(ctas))
        tile_of = lambda step: first + step * ctas

        def ids_of(step: Any) -> tuple[Any, ...]:
            last = jnp.maximum(len_g[req] - 1, 0)
            at = tile_of(step) * shape.blocks
            return tuple(table_g[req, jnp.minimum(at + j, last)] for j in range(shape.blocks))

        def load_share() -> None:
            for part in range(2):
                plgpu.copy_gmem_to_smem(q_g.at[req, part], q_s.at[part], q_full)

            def load(step: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
                stage = lax.rem(step, jnp.int32(stages))
                following = ids_of(step + 1)  # before the wait, so that the latencies overlap
                pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, free.at[stage]))
                for part, bounds_g in enumerate((low_g, high_g)):
                    for j, block in enumerate(ids):
                        rows = pl.ds(j * shape.kv_heads, shape.kv_heads)
                        plgpu.copy_gmem_to_smem(
                            bounds_g.at[block], bounds_s.at[stage, part, rows], full.at[stage]
                        )
                return following

            lax.fori_loop(0, steps, load, ids_of(jnp.int32(0)))
            # Interpret mode insists that every completion is awaited.
            if interpret:

                @pl.loop(jnp.maximum(steps - stages, 0), steps)
                def _(i: Any) -> None:
                    plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])

        def compute_share() -> None:
            bias = plgpu.load(bias_g, layout=W, optimized=False)
            plgpu.barrier_wait(q_full)

            @pl.loop(0, steps)
            def _(step: Any) -> None:
                stage = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(full.at[stage])

                def product(acc: Any) -> Any:
                    for part in range(2):
                        plgpu.wgmma(acc, bounds_s.at[stage, part], q_s.at[part].T)
                    return acc[...]

                s = pl.run_scoped(product, plgpu.ACC((ROWS, shape.q_heads), f32))
                plgpu.barrier_arrive(free.at[stage])
                out_g[req, pl.ds(tile_of(step) * ROWS, ROWS)] = (s + bias).max(axis=1)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                pl.when(warp == 0)(load_share)

        pl.when(lax.axis_index("warpgroup") == 0)(compute_share)

    kv_head = jnp.arange(ROWS, dtype=jnp.int32)[:, None] % shape.kv_heads
    q_head = jnp.arange(shape.q_heads, dtype=jnp.int32)[None, :]
    bias = jnp.where(q_head // (shape.q_heads // shape.kv_heads) == kv_head, 0.0, -jnp.inf).astype(f32)
    tile = ROWS, shape.head_dim
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((reqs, shape.max_tiles * ROWS), f32),
        scratch_types=[
            swizzled_smem((2, shape.q_heads, shape.head_dim), dtype),
            swizzled_smem((stages, 2, *tile), dtype),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2 * shape.blocks, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(reqs, ctas),
        grid_names=("req", "part"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="block_scores",
        interpret=interpret,
    )
    return kernel(query, low, high, block_table, num_blocks, bias)
