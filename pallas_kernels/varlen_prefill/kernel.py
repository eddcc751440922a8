"""The prefill kernel: each thread block works through its share of (tile of queries, head), longest first.

One warp loads keys and values into a ring of stages; two or three warpgroups compute, 64 query rows each.
Making the warpgroups issue in turn measured 1 to 5 % slower on an H200, so they do not.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.dequant import swizzled_smem
from pallas_kernels.shared.paged_kv import BlockTable
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import normalized
from pallas_kernels.shared.store import store_unoptimized
from pallas_kernels.shared.tma import padded_slice
from pallas_kernels.varlen_prefill.items import Item, Shape, aligned, rounds_of, row_and_head, stage_of
from pallas_kernels.varlen_prefill.lists import ITEM_COLUMNS, TileLists
from pallas_kernels.varlen_prefill.loader import BLOCKS_AT_ONCE, make_kv_loader, make_query_loader
from pallas_kernels.varlen_prefill.masks import KernelMask
from pallas_kernels.varlen_prefill.schedule import COLUMNS, TABLE_WIDTH, Schedule
from pallas_kernels.varlen_prefill.tiles import Tiles
from pallas_kernels.varlen_prefill.warpgroup import COLUMN, LEAN_PARTS, LEAN_WIDTH, ROW, M, W, Warpgroup, f32


def store_rows(item: Item, rank: Any, o_tiled: Any, o_plain: Any, o_g: Any, accs: Any, shape: Shape) -> None:
    """Writes a warpgroup's live rows: in one piece if all are, else in powers of two."""
    cut = shape.cut
    first = item["first_row"] + rank * M
    begin, end = (jnp.clip(row - rank * M, 0, M) for row in (item["begin"], item["end"]))
    num = jnp.maximum(end - begin, 0)
    columns = padded_slice(cut.width, cut.chunk, first * 0)

    def target(rows: Any, chunk: int) -> Any:
        index = (rows, item.head, chunk, columns) if cut.is_padded else (rows, item.head)
        return o_g.at[index]

    @pl.when(num == M)
    def _() -> None:
        for chunk, acc in enumerate(accs):
            o_tiled[chunk] = acc
        plgpu.commit_smem()
        for chunk in range(cut.chunks):
            rows = pl.ds(aligned(first), M)
            plgpu.copy_smem_to_gmem(o_tiled.at[chunk], target(rows, chunk))

    @pl.when((num > 0) & (num < M))
    def _() -> None:
        for chunk, acc in enumerate(accs):
            store_unoptimized(o_plain.at[chunk], acc)
        plgpu.commit_smem()
        offset, size = begin, M // 2
        while size:
            piece = pl.ds(offset, size)

            @pl.when((num & size) != 0)
            def _(piece: Any = piece, offset: Any = offset, size: int = size) -> None:
                for chunk in range(cut.chunks):
                    plgpu.copy_smem_to_gmem(
                        o_plain.at[chunk, piece], target(pl.ds(first + offset, size), chunk)
                    )

            offset, size = offset + (num & size), size // 2


def prefill(
    query: Any,
    key: Any,
    value: Any,
    block_table: Any,
    slopes: Any,
    sinks: Any,
    schedule: Schedule,
    lists: TileLists | None,
    *,
    shape: Shape,
    score: Score,
    mask: KernelMask | None,
    tiles: Tiles,
    return_lse: bool,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Output, and the log-sum-exp of every row of every tile.

    Args:
        query: [tokens, q_heads, head_dim], or [..., chunks, chunk] where the head is cut; 8 divides tokens.
        key: Packed: like query, with kv_heads. Paged: [blocks, parts, block_size / parts, kv_heads,
            head_dim], HND [blocks, kv_heads, parts, block_size / parts, head_dim], head_dim cut likewise.
        value: As key.
        block_table: Blocks of each request; None where keys are packed.
        slopes: ALiBi slopes times log2(e), [q_heads] f32, or None.
        sinks: Times log2(e), [q_heads] f32, or None.
        schedule: The tiles.
        lists: The items and their tiles of keys; None = every tile that the score's mask leaves.
        shape: The call's static sizes.
        score: The layer.
        mask: Which keys a query sees besides, in tiles that need a mask.
        tiles: The kernel's static sizes.
        return_lse: Whether the second result is wanted.
        interpret: Interpret-mode parameters, or None for a GPU.

    Returns:
        Output like query, and f32 [tiles, q_heads, tile_q], tiles in the order of the tokens, or None.
    """
    cut, dtype, wgs, stages = shape.cut, query.dtype, tiles.warpgroups, tiles.stages
    size, buffers = shape.block_size, tiles.query_buffers
    per_stage = (1 if size is None else shape.in_cache(tiles.tile_kv).copies) * cut.chunks
    # Of 65536 registers: many copies a stage take more to load, narrow heads less to compute.
    is_light = per_stage > BLOCKS_AT_ONCE or cut.padded_dim <= 64
    has_parts = shape.heads_at_once != shape.q_heads
    load_registers, compute_registers = (40, 232) if is_light or lists or has_parts else (24, 240)
    if wgs == 3:
        load_registers, compute_registers = 32, 160
    # What a thread has at the start; asked for more in all, the warpgroups would wait for it for ever.
    at_start = 65536 // (128 * (wgs + 1)) // 8 * 8
    assert load_registers + wgs * compute_registers <= (wgs + 1) * at_start

    def body(  # type: ignore[no-untyped-def]
        q_g,  # [tokens, q_heads, head_dim]
        k_g,
        v_g,
        blocks_g,  # [reqs, max_blocks] or None
        slopes_g,  # [q_heads] or None
        sinks_g,  # [q_heads] or None
        table_g,  # [tiles, columns], with lists [items, columns]
        live_g,  # [1]
        entries_g,  # [items, max_list] or None
        mask_g,  # the mask's arrays
        o_g,  # [tokens, q_heads, head_dim]
        lse_g,  # [tiles, q_heads, tile_q] or None
        q_s,  # [warpgroups, query_buffers, chunks, 64, width] in SMEM: swizzled, and plain for few rows
        item_s,  # [warpgroups, query_buffers, columns] in SMEM
        k_s,  # [teams * stages, chunks, tile_kv, width] in SMEM
        v_s,
        p_s,  # [warpgroups, 64, tile_kv] in SMEM, or None
        columns_s,  # [warpgroups, tile_kv] in SMEM: 0, 1, 2...
        lean_s,  # ALiBi's slope [warpgroups, 64, 16] and columns [warpgroups, tile_kv, 16] in SMEM, or None
        q_full,
        q_free,
        k_full,
        v_full,
        k_free,
        v_free,
    ):
        wg = lax.axis_index("warpgroup")
        ring = (k_s, v_s, k_full, v_full, k_free, v_free)
        (q_s,), (o_plain,) = q_s
        num_rows = live_g[0]
        num_items = num_rows * (1 if lists is not None else shape.q_heads)
        make_item = functools.partial(Item, entries_g=entries_g, score=score, tiles=tiles, shape=shape)
        names = COLUMNS if lists is None else (*COLUMNS, *ITEM_COLUMNS)

        def load_share(team: int) -> None:
            rounds, number_of = rounds_of(num_items, tiles, team)
            blocks = None if size is None else BlockTable(blocks_g, size)
            load_kv = make_kv_loader(k_g, v_g, blocks, ring, tiles, shape, team)
            load_query = make_query_loader((q_g, table_g, q_s, item_s, q_full, q_free), tiles, shape, team)

            def load_item(nth: Any, step: Any) -> Any:
                number = number_of(nth)
                table_row, head = number, None
                if lists is None:
                    table_row, head = row_and_head(number, num_rows, shape)
                columns = {name: table_g[table_row, i] for i, name in enumerate(names)}
                item = make_item(columns.get("head", head), columns.__getitem__)

                tile, first = lambda i: item.tile_of(item.entry(i)), item.tile_of(item.first_entry())

                def load_next(i: Any, index: Any) -> Any:
                    following = tile(jnp.minimum(i + 1, item.num - 1))
                    load_kv(item, index, step + i)
                    return following

                @pl.when(item.num > 0)
                def _() -> None:
                    # Keys before queries: the ring has room while the queries of the item before are in use.
                    load_kv(item, first, step, lambda: load_query(item, table_row, nth))
                    if lists is not None and per_stage < BLOCKS_AT_ONCE:
                        # Read a step ahead, where registers allow it: a list is in global memory.
                        lax.fori_loop(1, item.num, load_next, tile(jnp.minimum(1, item.num - 1)))
                    else:
                        pl.loop(1, item.num)(lambda i: load_kv(item, tile(i), step + i))

                pl.when(item.num == 0)(lambda: load_query(item, table_row, nth))
                return step + item.num

            steps = lax.fori_loop(0, rounds, load_item, rounds * 0)
            # Interpret mode insists that every completion is awaited; to the hardware it is all one.
            if interpret:

                @pl.loop(jnp.maximum(steps - stages, 0), steps)
                def _(i: Any) -> None:
                    plgpu.barrier_wait(k_free.at[stage_of(i, tiles, team)])
                    plgpu.barrier_wait(v_free.at[stage_of(i, tiles, team)])

                @pl.loop(jnp.maximum(rounds - buffers, 0), jnp.maximum(rounds - (buffers - 1), 0))
                def _(nth: Any) -> None:
                    for rank in range(tiles.team_size):
                        w = team * tiles.team_size + rank
                        plgpu.barrier_wait(q_free.at[w * buffers + lax.rem(nth, jnp.int32(buffers))])

        def compute_share() -> None:
            group = Warpgroup(
                p_s,
                columns_s,
                lean_s,
                ring,
                tiles=tiles,
                shape=shape,
                score=score,
                dtype=dtype,
                mask=mask,
                mask_g=mask_g,
                has_alibi=slopes_g is not None,
                interpret=interpret,
            )
            rounds, number_of = rounds_of(num_items, tiles, group.team)
            columns_s[wg] = plgpu.broadcasted_iota(jnp.int32, (tiles.tile_kv,), 0, layout=COLUMN).astype(f32)
            if lean_s is not None:
                iota = [
                    plgpu.broadcasted_iota(jnp.int32, lean_s[1].shape[1:], axis, layout=W) for axis in (0, 1)
                ]
                lean_s[1][wg] = jnp.where(iota[1] < LEAN_PARTS, iota[0], 0).astype(f32).astype(dtype)
            plgpu.commit_smem()

            def release(nth: Any) -> None:
                """Gives the buffer of item nth back, when its output has left."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free.at[wg * buffers + lax.rem(nth, jnp.int32(buffers))])

            def compute_item(nth: Any, step: Any) -> Any:
                buffer = lax.rem(nth, jnp.int32(buffers))
                plgpu.barrier_wait(q_full.at[wg * buffers + buffer])
                mine = item_s.at[wg, buffer]
                number, column = number_of(nth), lambda name: mine[names.index(name)]
                head = row_and_head(number, num_rows, shape)[1] if lists is None else column("head")
                item = make_item(head, column)
                slope = None if slopes_g is None else slopes_g[item.head]
                if lean_s is not None:
                    group.lean(slope)
                row = lambda value: plgpu.layout_cast(jnp.full((M,), value, f32), ROW)
                zeros = lambda: plgpu.layout_cast(jnp.zeros((M, cut.width), f32), W)

                def release_last() -> None:
                    if buffers > 1:
                        pl.when(nth >= 1)(lambda: release(nth - 1))

                def work() -> Any:
                    return group.attend(item, q_s.at[wg, buffer], step, slope, release_last)

                def rest() -> Any:
                    release_last()
                    group.skip(step, jnp.int32(0), item.num)
                    return tuple(zeros() for _ in range(cut.chunks)), row(-jnp.inf), row(0.0)

                accs, top, total = lax.cond(group.has_work(item), work, rest)
                sink = None
                if sinks_g is not None:
                    sink = jnp.where(item["seq_len"] > 0, sinks_g[item.head], -jnp.inf)
                factor, lse = normalized(top, total, sink)
                if lse_g is not None:
                    lse_g[item["number"], item.head, pl.ds(pl.multiple_of(group.rank * M, M), M)] = lse
                out = tuple((acc * group.wide(factor, acc.shape)).astype(dtype) for acc in accs)
                store_rows(item, group.rank, q_s.at[wg, buffer], o_plain.at[wg, buffer], o_g, out, shape)
                if buffers == 1:
                    release(nth)
                return step + item.num

            lax.fori_loop(0, rounds, compute_item, jnp.int32(0) * rounds)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == wgs)
        def _() -> None:
            plgpu.set_max_registers(load_registers, action="decrease")

            @plgpu.warp_map
            def _(warp: Any) -> None:
                for team in range(tiles.teams):
                    pl.when(warp == team)(functools.partial(load_share, team))

        @pl.when(wg < wgs)
        def _() -> None:
            plgpu.set_max_registers(compute_registers, action="increase")
            compute_share()

    tokens = (wgs, buffers, cut.chunks, M, cut.width)
    all_stages = tiles.teams * stages
    keys = (all_stages, cut.chunks, tiles.tile_kv, cut.width)
    num_tiles = schedule.table.shape[0]
    lse_type = jax.ShapeDtypeStruct((num_tiles, shape.q_heads, tiles.tile_q), f32) if return_lse else None
    lean = None
    # What a soft cap would cap, too, or is no multiple of the column, is added outside of the tensor core. So
    # are all biases in interpret mode, which runs short of threads where warpgroups do more between barriers.
    is_linear = slopes is not None and score.soft_cap is None and score.scale > 0 and not score.sqrt_alibi
    if is_linear and not interpret:
        lean = [
            swizzled_smem((wgs, rows, LEAN_WIDTH), dtype, width=LEAN_WIDTH) for rows in (M, tiles.tile_kv)
        ]
    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(query.shape, dtype), lse_type),
        scratch_types=[
            plgpu.RefUnion((swizzled_smem(tokens, dtype),), (plgpu.SMEM(tokens, dtype),)),
            plgpu.SMEM((wgs, buffers, TABLE_WIDTH), jnp.int32),
            swizzled_smem(keys, dtype),
            swizzled_smem(keys, dtype),
            swizzled_smem((wgs, M, tiles.tile_kv), dtype) if interpret else None,
            plgpu.SMEM((wgs, tiles.tile_kv), f32),
            lean,
            plgpu.Barrier(num_arrivals=cut.chunks + 1, num_barriers=wgs * buffers),
            plgpu.Barrier(num_barriers=wgs * buffers),
            plgpu.Barrier(num_arrivals=per_stage, num_barriers=all_stages),
            plgpu.Barrier(num_arrivals=per_stage, num_barriers=all_stages),
            plgpu.Barrier(num_arrivals=tiles.team_size, num_barriers=all_stages),
            plgpu.Barrier(num_arrivals=tiles.team_size, num_barriers=all_stages),
        ],
        grid=(tiles.ctas,),
        grid_names=("cta",),
        num_threads=wgs + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="varlen_prefill",
        interpret=interpret,
    )
    items = (schedule.table, schedule.num_live, None) if lists is None else lists
    return kernel(query, key, value, block_table, slopes, sinks, *items, () if mask is None else mask.arrays)
