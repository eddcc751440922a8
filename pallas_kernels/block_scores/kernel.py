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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.shared import lanes
from pallas_kernels.shared.dequant import swizzle_transforms, swizzled_smem
from pallas_kernels.shared.paged_kv import BlockTable

W = plgpu.Layout.WGMMA
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


def score_tiles(
    query: jax.Array,
    low: jax.Array,
    high: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    shape: Shape,
    interpret: Any = None,
) -> jax.Array:
    """f32 [reqs, kv_heads, blocks of max_tiles]: the bound of each block; garbage past a request's end.

    Args:
        query: [reqs, q_heads, head_dim]
        low: [blocks, kv_heads, head_dim]
        high: The same.
        block_table: [reqs, max_blocks]
        seq_lens: [reqs]
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
        q_s,  # [2, q_heads, head_dim] in SMEM: negative parts, for low, and positive ones, for high
        bounds_s,  # [stages, 2, 64, head_dim] in SMEM
        q_full,
        full,
        free,
    ):
        req, first = lax.axis_index("req"), lax.axis_index("part")
        num_blocks = lax.div(len_g[req] + (shape.block_size - 1), jnp.int32(shape.block_size))
        num = lax.div(num_blocks + (shape.blocks - 1), jnp.int32(shape.blocks))
        steps = lax.div(jnp.maximum(num - first, 0) + (ctas - 1), jnp.int32(ctas))
        tile_of = lambda step: first + step * ctas
        blocks_of = BlockTable(table_g, shape.block_size)

        def ids_of(step: Any) -> tuple[Any, ...]:
            return tuple(blocks_of.first(req, num_blocks).ids(tile_of(step) * shape.blocks, shape.blocks))

        def load_share() -> None:
            plgpu.copy_gmem_to_smem(q_g.at[req], q_s.at[0], q_full)

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
            split_signs(q_s, is_interpreted=bool(interpret))
            plgpu.commit_smem()

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
                to = out_g.at[req, :, pl.ds(tile_of(step) * shape.blocks, shape.blocks)]
                store_heads(to, (s + bias).max(axis=1), is_interpreted=bool(interpret))

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                pl.when(warp == 0)(load_share)

        pl.when(lax.axis_index("warpgroup") == 0)(compute_share)

    # NumPy's: a constant, not a kernel that makes it.
    kv_head, q_head = np.arange(ROWS)[:, None] % shape.kv_heads, np.arange(shape.q_heads)[None, :]
    is_own = q_head // (shape.q_heads // shape.kv_heads) == kv_head
    bias = np.where(is_own, 0.0, -np.inf).astype(np.float32)
    tile = ROWS, shape.head_dim
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((reqs, shape.kv_heads, shape.max_tiles * shape.blocks), f32),
        scratch_types=[
            swizzled_smem((2, shape.q_heads, shape.head_dim), dtype),
            swizzled_smem((stages, 2, *tile), dtype),
            plgpu.Barrier(),
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
    return kernel(query, low, high, block_table, seq_lens, bias)


def split_signs(q_s: Any, *, is_interpreted: bool) -> None:
    """From the queries in q_s[0], [2, q_heads, head_dim] in SMEM, their negative and positive parts."""
    if is_interpreted:
        q = q_s[0]
        q_s[0], q_s[1] = jnp.minimum(q, 0), jnp.maximum(q, 0)
        return
    _, q_heads, head_dim = q_s.shape
    kind = lanes.ELEMENTS_16[jnp.dtype(q_s.dtype).name]
    half = q_heads * head_dim * 2  # bytes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzle_transforms(2)),), return_type=())
    def split(_: Any, q_s: Any) -> None:
        lane, warp = lanes.lane_and_warp()
        first = lanes.add(lanes.address(q_s), lanes.times(warp, 128), lanes.times(lane, 4))
        for at in range(0, half, 512):  # the same elements stand at the same place, however swizzled
            code = (
                f"{{ .reg .b32 x, y; ld.shared.b32 x, [$0 + {at}]; "
                f"min.{kind}x2 y, x, $1; max.{kind}x2 x, x, $1; "
                f"st.shared.b32 [$0 + {at}], y; st.shared.b32 [$0 + {at + half}], x; }}"
            )
            utils.inline_ptx(code, first, lanes.const(0), has_side_effects=True)

    split(q_s)


def store_heads(to: Any, values: Any, *, is_interpreted: bool) -> None:
    """Stores a number for each row of a tile, [64], to [kv_heads, blocks] of global memory."""
    kv_heads, blocks = to.shape
    if is_interpreted:
        to[...] = values.reshape(blocks, kv_heads).T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), W.reduce(1)), return_type=())
    def store(_: Any, to: Any, values: Any) -> None:
        (stride, _), _ = ir.MemRefType(to.type).get_strides_and_offset()
        g, t = lanes.lane_row_and_pair()
        _, warp = lanes.lane_and_warp()
        for half, register in enumerate(values.registers.flatten()):
            value = vector.extract(register, dynamic_position=[], static_position=[0])
            row = lanes.add(lanes.times(warp, 16), g, 8 * half)
            head, block = arith.remui(row, lanes.const(kv_heads)), arith.divui(row, lanes.const(kv_heads))
            offset = lanes.add(lanes.times(head, stride), block)
            at = lanes.ptx("mad.wide.u32 $0, $2, 4, $1;", utils.memref_ptr(to), offset, of=lanes.i64())
            is_mine = arith.cmpi(arith.CmpIPredicate.eq, t, lanes.const(half))
            code = "st.global.f32 [$0], $1;"
            utils.inline_ptx(code, at, value, predicate=is_mine, has_side_effects=True)

    store(to, values)
