"""The prefill kernel: each thread block works through its share of (tile of queries, head), longest first.

One warp loads keys and values into a ring of stages; two or three warpgroups compute, 64 query rows each.
Each issues S = Q K^T of a tile of keys together with O += P V of the tile before and does the softmax of S
meanwhile. Making the warpgroups issue in turn measured 1 to 5 % slower on an H200, so they do not.

A row's probabilities are powers of 2 less its top, which is not the largest score so far but lies above it,
and stays until a score reaches it: no maximum of a tile, nothing rescaled, but where a warp's vote says so.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import HeadCut
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.store import store_unoptimized
from pallas_kernels.shared.tma import padded_slice
from pallas_kernels.varlen_prefill import votes
from pallas_kernels.varlen_prefill.lists import ITEM_COLUMNS, PART_SHIFT, TileLists, num_parts
from pallas_kernels.varlen_prefill.schedule import (
    ALIGN,
    COLUMNS,
    TABLE_WIDTH,
    Schedule,
    key_range,
    kv_tile_range,
    tile_range,
)
from pallas_kernels.varlen_prefill.tiles import WARPGROUP_ROWS, Tiles

LOG2E = math.log2(math.e)
W = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
M = WARPGROUP_ROWS
BLOCKS_AT_ONCE = 8
LEAN_PARTS = 3  # 16-bit numbers that add up to f32
LEAN_WIDTH = 16  # the tensor core's K
LANE_COLUMNS = 8  # a thread holds two neighbours of each eight columns of a tile
# A row's top lies so many powers of two above its largest score when it is chosen, and serves until a score
# reaches it. bf16 has the exponents of f32; probabilities of f16 must not fall below its own.
ROOM = {jnp.dtype(jnp.bfloat16): 40.0, jnp.dtype(jnp.float16): 4.0}
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static about a call besides the tiles.

    Attributes:
        q_heads: Query heads.
        group: Query heads of a kv head.
        cut: The cut of head_dim.
        block_size: Tokens of a cache block; None where keys are packed.
        is_hnd: Blocks are [kv_heads, block_size, head_dim].
        heads_at_once: Query heads whose keys and values are read side by side, where there are no lists.
        block_q: Queries of a block of queries, where lists tell the blocks of an item apart.
    """

    q_heads: int
    group: int
    cut: HeadCut
    block_size: int | None
    is_hnd: bool
    heads_at_once: int
    block_q: int | None = None


class Item:
    """A tile of queries of one head; traced scalars. Keys of tile i begin at position i * tile_kv - skew.

    `item["position"]` is a column of the schedule: in a register if the caller has it there, else read anew
    at every use.

    Attributes:
        head: Query head.
        low: First key that some query of the tile sees.
        high: One past the last.
        first: First tile of keys, where there are no lists.
        num: Tiles of keys.
        skew: Rows by which tiles of keys begin before the request's first key.
    """

    def __init__(
        self,
        number: Any,
        head: Any,
        column: Callable[[str], Any],
        entries_g: Any,
        score: Score,
        tiles: Tiles,
        shape: Shape,
    ):
        self.number, self.column, self.entries_g, self.tile_kv = number, column, entries_g, tiles.tile_kv
        has_lists = entries_g is not None
        self.head = head
        position = column("position")
        first, last = position + column("begin"), position + (column("end") - 1)
        self.low, self.high = tile_range(score, first, last, column("seq_len"))
        is_packed = shape.block_size is None
        self.skew = lax.rem(column("kv_start"), jnp.int32(ALIGN)) if is_packed else position * 0
        self.first, self.num = kv_tile_range(self.low, self.high, self.skew, tiles.tile_kv)
        if has_lists:
            self.num = column("num")

    def entry(self, i: Any) -> Any:
        """What the list says of the item's tile i; where there is none, the tile's number."""
        return self.first + i if self.entries_g is None else self.entries_g[self.number, i]

    def tile_of(self, entry: Any) -> Any:
        """The tile's number."""
        return entry if self.entries_g is None else entry & ((1 << PART_SHIFT) - 1)

    def first_key(self, entry: Any) -> Any:
        """Position of the first key of a tile."""
        return self.tile_of(entry) * self.tile_kv - self.skew

    def __getitem__(self, name: str) -> Any:
        return self.column(name)


def rounds_of(num_items: Any, tiles: Tiles, team: Any) -> tuple[Any, Callable]:
    """How many items this team has, and the function from their place among these to their number.

    Teams take items in turn, every other round in the opposite order, so that their shares are equal.
    """
    worker, workers = lax.axis_index("cta") * tiles.teams + team, jnp.int32(tiles.workers)
    full_rounds = lax.div(num_items, workers)
    place = lambda r: r * workers + jnp.where(lax.rem(r, jnp.int32(2)) == 0, worker, workers - 1 - worker)
    rounds = full_rounds + (place(full_rounds) < num_items).astype(jnp.int32)
    return rounds, place


def row_and_head(number: Any, num_rows: Any, shape: Shape) -> tuple[Any, Any]:
    """Which row of the schedule and which head an item is, where there are no lists.

    Heads of a row follow each other, so that thread blocks at work share keys in L2: as many heads as fit it,
    then all rows for the next ones, in the opposite order, so that lengths do not jump and shares stay equal.
    The last heads end with the shortest row.
    """
    at_once = jnp.int32(shape.heads_at_once)
    if shape.heads_at_once == shape.q_heads:
        return lax.div(number, at_once), lax.rem(number, at_once)
    per_part, parts = num_rows * at_once, shape.q_heads // shape.heads_at_once
    part = sum((number >= n * per_part).astype(jnp.int32) for n in range(1, parts))
    rest = number - part * per_part
    row, is_turned = lax.div(rest, at_once), lax.rem(parts - 1 - part, jnp.int32(2)) == 1
    return jnp.where(is_turned, num_rows - 1 - row, row), part * at_once + lax.rem(rest, at_once)


# ------------------------------------------------------------------------------------------ loading
def aligned(row: Any) -> Any:
    """A row that 8 divides, so that the compiler sees it; multiple_of is not for a single warp."""
    return lax.div(row, jnp.int32(ALIGN)) * ALIGN


def stage_of(step: Any, tiles: Tiles, team: Any) -> Any:
    """Where a team has the keys and values of a step."""
    stage = lax.rem(step, jnp.int32(tiles.stages))
    return stage if tiles.teams == 1 else stage + team * tiles.stages


def make_kv_loader(
    k_g: Any, v_g: Any, table_g: Any, ring: Any, tiles: Tiles, shape: Shape, team: int
) -> Callable:
    """The function that fills the next stage: `load(item, tile, step, between)`; between follows the keys."""
    k_s, v_s, k_full, v_full, k_free, v_free = ring
    tile, cut, size = tiles.tile_kv, shape.cut, shape.block_size

    def packed_windows(item: Item, index: Any, kv_head: Any, begin: Any, count: int) -> list[tuple[Any, Any]]:
        rows = pl.ds(aligned(item["kv_start"] - item.skew + index * tile), tile)  # past the end: zeros
        return [((rows, kv_head), pl.ds(0, tile))]

    def paged_windows(item: Item, index: Any, kv_head: Any, begin: Any, count: int) -> list[tuple[Any, Any]]:
        assert size is not None
        rows, first_key = min(tile, size), index * tile
        # Keys that no query sees may have no block: the nearest that one does see stands in.
        low, high = lax.div(item.low, jnp.int32(size)), lax.div(item.high - 1, jnp.int32(size))
        column = lax.div(first_key, jnp.int32(size))
        blocks = [table_g[item["req"], jnp.clip(column + (begin + j), low, high)] for j in range(count)]
        part = lax.div(lax.rem(first_key, jnp.int32(size)), jnp.int32(rows))
        tokens = pl.ds(0, rows)
        at = lambda block: (block, kv_head, part, tokens) if shape.is_hnd else (block, part, tokens, kv_head)
        return [(at(block), pl.ds((begin + j) * rows, rows)) for j, block in enumerate(blocks)]

    windows_of = packed_windows if size is None else paged_windows
    num_windows = 1 if size is None else max(tile // size, 1)

    def load(item: Item, index: Any, step: Any, between: Callable | None = None) -> None:
        stage = stage_of(step, tiles, team)
        kv_head = lax.div(item.head, jnp.int32(shape.group))
        columns = padded_slice(cut.width, cut.chunk, stage * 0)
        # Block ids together and before the wait, so that their latencies overlap; as many as registers hold.
        at_once = min(num_windows, BLOCKS_AT_ONCE)
        for kv_g, smem, full, free in ((k_g, k_s, k_full, k_free), (v_g, v_s, v_full, v_free)):
            wait = functools.partial(plgpu.barrier_wait, free.at[stage])

            def copy(windows: Any, kv_g: Any = kv_g, smem: Any = smem, full: Any = full) -> None:
                for index, rows in windows:
                    for chunk in range(cut.chunks):
                        source = kv_g.at[(*index, chunk, columns) if cut.is_padded else index]
                        plgpu.copy_gmem_to_smem(source, smem.at[stage, chunk, rows], full.at[stage])

            if num_windows == at_once:
                if kv_g is k_g:
                    windows = windows_of(item, index, kv_head, 0, at_once)
                pl.when(step >= tiles.stages)(wait)
                copy(windows)
            else:
                pl.when(step >= tiles.stages)(wait)

                # A bound that the compiler does not see through: unrolled, ids would not fit the registers.
                @pl.loop(0, num_windows // at_once + jnp.minimum(step, 0))
                def _(n: Any, copy: Any = copy) -> None:
                    copy(windows_of(item, index, kv_head, n * at_once, at_once))

            if between is not None and kv_g is k_g:
                between()

    return load


def make_query_loader(refs: Any, tiles: Tiles, shape: Shape, team: int) -> Callable:
    """The function that loads an item's queries and columns, `load(item, row of the table, nth)`."""
    q_g, table_g, q_s, item_s, q_full, q_free = refs
    cut = shape.cut

    def load(item: Item, table_row: Any, nth: Any) -> None:
        buffer = lax.rem(nth, jnp.int32(tiles.query_buffers))
        columns = padded_slice(cut.width, cut.chunk, nth * 0)
        for rank in range(tiles.team_size):
            wg = team * tiles.team_size + rank
            nth_barrier = wg * tiles.query_buffers + buffer
            pl.when(nth >= tiles.query_buffers)(functools.partial(plgpu.barrier_wait, q_free.at[nth_barrier]))
            rows = pl.ds(aligned(item["first_row"] + rank * M), M)
            for chunk in range(cut.chunks):
                index = (rows, item.head, chunk, columns) if cut.is_padded else (rows, item.head)
                plgpu.copy_gmem_to_smem(q_g.at[index], q_s.at[wg, buffer, chunk], q_full.at[nth_barrier])
            plgpu.copy_gmem_to_smem(table_g.at[table_row], item_s.at[wg, buffer], q_full.at[nth_barrier])

    return load


# ------------------------------------------------------------------------------------------ computing
def team_and_rank(wg: Any, tiles: Tiles) -> tuple[Any, Any]:
    """Which team a warpgroup is in, and which of the item's rows are its: 64 from rank * 64 on."""
    return (wg * 0, wg) if tiles.teams == 1 else (wg, wg * 0)


def above_infinity(top: Any) -> Any:
    """The top, or 0 for rows that have seen no key yet, whose top is -inf."""
    return jnp.where(top == -jnp.inf, 0.0, top)


class Warpgroup:
    """What one warpgroup computes: 64 query rows of an item."""

    def __init__(
        self,
        p_s: Any,
        columns_s: Any,
        lean_s: Any,
        ring: Any,
        *,
        tiles: Tiles,
        shape: Shape,
        score: Score,
        dtype: Any,
        mask: Callable[[Any, Any, Any], Any] | None,
        has_alibi: bool,
        interpret: Any,
    ):
        self.p_s, self.columns_s, self.lean_s = p_s, columns_s, lean_s
        self.k_s, self.v_s, self.k_full, self.v_full, self.k_free, self.v_free = ring
        self.tiles, self.shape, self.score, self.dtype = tiles, shape, score, dtype
        self.mask, self.has_alibi, self.interpret = mask, has_alibi, interpret
        self.wg = lax.axis_index("warpgroup")
        self.team, self.rank = team_and_rank(self.wg, tiles)
        self.s_shape = (M, tiles.tile_kv)
        # Scores are scaled inside the exponential.
        self.factor = 1.0
        if score.soft_cap is not None or score.scale > 0:
            self.factor = (score.soft_cap or score.scale) * LOG2E
        # Capped scores may be small enough to need no top at all. With a bias tops rise from tile to tile,
        # so that keeping an old one loses: 545 -> 572 us.
        is_small = score.soft_cap is not None and score.soft_cap * LOG2E <= 2 * ROOM[dtype]
        self.has_top = has_alibi or not is_small
        self.keeps_tops = self.has_top and not has_alibi
        self.has_window = score.window[0] is not None or score.chunk_size is not None
        self.has_low_edge = self.has_window or shape.block_size is None

    def wide(self, x: Any, shape: tuple[int, int]) -> Any:
        """One value a row to a tile."""
        return lax.broadcast_in_dim(x, shape, [0])

    def stage(self, step: Any) -> Any:
        """Where the keys and values of a step are."""
        return stage_of(step, self.tiles, self.team)

    # -------------------------------------------------------------------------- scores
    def positions(self, item: Item) -> Any:
        """Position of each row."""
        first = item["position"] + self.rank * M
        return plgpu.broadcasted_iota(jnp.int32, (M,), 0, layout=ROW) + first

    def columns(self) -> Any:
        """Number of each key in its tile, f32. Read, or the compiler keeps them all in registers."""
        column = plgpu.load(self.columns_s.at[self.wg], layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(column, self.s_shape, [1])

    def visible(self, item: Item, entry: Any, s: Any) -> Any:
        """-inf where a query does not see a key."""
        score, first_key = self.score, item.first_key(entry)
        low, high = (x.astype(f32) for x in (0 - first_key, item["seq_len"] - first_key))
        has_high = score.causal or score.window[1] is not None or score.chunk_size is not None
        has_parts = self.shape.block_q is not None
        if has_high or has_parts or self.has_window:
            positions = self.positions(item)
            row_low, row_high = (x - first_key for x in key_range(score, positions, item["seq_len"]))
            if has_parts:
                row_high = jnp.where(self.sees_tile(item, entry, positions), row_high, 0)
            row_low, row_high = (plgpu.layout_cast(x, ROW).astype(f32) for x in (row_low, row_high))
            low = self.wide(row_low, s.shape) if self.has_window else low
            high = self.wide(row_high, s.shape) if has_high or has_parts else high
        keys = self.columns()
        sees = keys < high
        if self.has_low_edge:
            sees = sees & (keys >= low)
        if self.mask is not None:
            positions = self.wide(self.positions(item), s.shape)
            sees = sees & self.mask(item.head, positions, keys.astype(jnp.int32) + first_key)
        return jnp.where(sees, s, -jnp.inf)

    def sees_tile(self, item: Item, entry: Any, positions: Any) -> Any:
        """Whether the block of queries that a position is in sees any of the tile's keys."""
        block, bits = self.shape.block_q, lax.shift_right_logical(entry, jnp.int32(PART_SHIFT))
        assert block is not None
        first = lax.div(jnp.maximum(item["position"] + item["begin"], 0), jnp.int32(block))
        sees = positions * 0 + (bits & 1)
        for part in range(1, num_parts(self.tiles.tile_q, block)):
            bit = lax.shift_right_logical(bits, jnp.int32(part)) & 1
            sees = jnp.where(positions >= (first + part) * block, bit, sees)
        return sees > 0

    def modified(self, item: Item, entry: Any, slope: Any, s: Any) -> tuple[Any, Any]:
        """Soft-capped and biased but for a factor that comes later, and a term of each row."""
        score = self.score
        if score.soft_cap is not None:
            s = jnp.tanh(s * (score.scale / score.soft_cap))
        if self.factor == 1.0:
            s = s * ((score.soft_cap or score.scale) * LOG2E)
        if not self.has_alibi:
            return s, None
        first, lean = (self.positions(item) - item.first_key(entry)).astype(f32), slope * (1 / self.factor)
        if score.sqrt_alibi:
            distances = jnp.maximum(self.wide(first, s.shape) - self.columns(), 0.0)
            return s - jnp.sqrt(distances) * lean, None
        return s if self.lean_s is not None else s + self.columns() * lean, first * -slope

    def entry(self, item: Item, i: Any, *, masked: bool) -> Any:
        """Item.entry where the softmax needs it: read early, for it may come from global memory."""
        return item.entry(i) if masked or self.has_alibi else None

    def softmax(
        self, item: Item, entry: Any, slope: Any, s: Any, top: Any, *, masked: bool
    ) -> tuple[Any, Any, Any, Any, Any]:
        """The online softmax's step on a tile.

        Args:
            item: The item.
            entry: What Item.entry said of the tile.
            slope: ALiBi's, or None.
            s: Q K^T.
            top: Of each row; None for an item's first tile.
            masked: Whether there are keys that some query does not see.

        Returns:
            Probabilities; their sums, as far as each thread can add them alone; the top; what sums from
            before are to be multiplied by, and whether that is anything but 1 in the warp, if tops are kept.
        """
        s, row_term = self.modified(item, entry, slope, s)
        visible = lambda x: self.visible(item, entry, x) if masked else x
        is_first = top is None
        if is_first:
            top = plgpu.layout_cast(jnp.full((M,), -jnp.inf if self.has_top else 0.0, f32), ROW)
        is_due, shrink = jnp.bool_(True), top
        if not self.has_top:
            y = visible(s * self.factor)
        elif not self.keeps_tops:
            y, top, shrink = self.with_largest_top(visible(s), row_term, top)
        else:
            y = visible(s * self.factor - self.wide(above_infinity(top), s.shape))
            if is_first or self.interpret:
                y, top, shrink = self.with_new_tops(y, top)
            else:
                is_due = votes.is_due(y, top)
                y, top, shrink = lax.cond(is_due, self.with_new_tops, lambda y, top: (y, top, top), y, top)
        p = jnp.exp2(y)
        sums = p[:, :LANE_COLUMNS]
        for at in range(LANE_COLUMNS, p.shape[1], LANE_COLUMNS):
            sums = sums + p[:, at : at + LANE_COLUMNS]
        if self.keeps_tops and not is_first and not self.interpret:
            is_due = votes.after_sums(is_due, sums)
        return p, sums, top, shrink, is_due

    def with_largest_top(self, s: Any, row_term: Any, top: Any) -> tuple[Any, Any, Any]:
        """Scores less the largest that a row has seen, that, and by what sums from before shrink."""
        new_top = jnp.maximum(top, s.max(axis=1) * self.factor + (0.0 if row_term is None else row_term))
        base = above_infinity(new_top)
        y = s * self.factor - self.wide(base if row_term is None else base - row_term, s.shape)
        return y, new_top, jnp.exp2(top - base)

    def with_new_tops(self, y: Any, top: Any) -> tuple[Any, Any, Any]:
        """Scores less a new top for rows that need one, the tops, by what sums from before shrink.

        Which rows do is for each to say: a row's numbers do not depend on the others of its tile.
        """
        tile_top, base = y.max(axis=1), above_infinity(top)
        is_due = (tile_top >= 0) | (top == -jnp.inf)
        new_top = jnp.where(is_due, tile_top + base + ROOM[self.dtype], top)
        new_base = above_infinity(new_top)
        return y - self.wide(new_base - base, y.shape), new_top, jnp.exp2(top - new_base)

    # -------------------------------------------------------------------------- products
    def lean(self, slope: Any) -> None:
        """Makes the tensor core add a head's slope times the column to scores; the slope as 16-bit parts."""
        leans = self.lean_s[0].at[self.wg]
        rest, tile = slope * (1 / self.factor), plgpu.layout_cast(jnp.zeros(leans.shape, f32), W)
        at = plgpu.broadcasted_iota(jnp.int32, leans.shape, 1, layout=W)
        for part in range(LEAN_PARTS):
            rounded = rest.astype(self.dtype).astype(f32)
            rest, tile = rest - rounded, jnp.where(at == part, rounded, tile)
        leans[...] = tile.astype(self.dtype)
        plgpu.commit_smem()

    def issue_scores(self, s_ref: Any, q_s: Any, stage: Any) -> None:
        """Begins S += Q K^T."""
        for chunk in range(self.shape.cut.chunks):
            plgpu.wgmma(s_ref, q_s.at[chunk], self.k_s.at[stage, chunk].T)
        if self.lean_s is not None:
            leans, columns = (ref.at[self.wg] for ref in self.lean_s)
            plgpu.wgmma(s_ref, leans, columns.T)

    def scores(self, q_s: Any, step: Any) -> Any:
        """Q K^T of the keys of `step`, awaited."""
        stage = self.stage(step)
        plgpu.barrier_wait(self.k_full.at[stage])

        def product(s_ref: Any) -> Any:
            self.issue_scores(s_ref, q_s, stage)
            return s_ref[...]

        s = pl.run_scoped(product, plgpu.ACC(self.s_shape, f32))
        plgpu.barrier_arrive(self.k_free.at[stage])
        return s

    def clear_unseen_values(self, item: Item, entry: Any, stage: Any, *, is_low: bool) -> None:
        """Zeros for values that no query of the request sees: a probability of 0 does not hide a NaN.

        Warpgroups do it side by side in the same memory, so what one stores must be right at once: with both
        edges in a tile, a store of the low one that kept the high one's NaN undid another's zeros.
        """
        tile, cut, part = self.tiles.tile_kv, self.shape.cut, jnp.int32(64)
        first_key = item.first_key(entry)
        begin, end = item["seen"] - first_key, item["seq_len"] - first_key
        is_edge = begin > 0 if is_low else end < tile

        @pl.when(is_edge)
        def _() -> None:
            parts = (0, lax.div(begin + 63, part)) if is_low else (lax.div(end, part), tile // 64)

            @pl.loop(*parts)
            def _(n: Any) -> None:
                at = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=W) + n * 64
                for chunk in range(cut.chunks):
                    for column in range(0, cut.width, 64):
                        here = self.v_s.at[stage, chunk, pl.ds(n * 64, 64), pl.ds(column, 64)]
                        v = plgpu.load(here, layout=W)
                        here[...] = jnp.where((at >= begin) & (at < end), v, jnp.zeros_like(v))

            plgpu.commit_smem()

    def await_values(self, step: Any) -> None:
        """Waits for the values of a step."""
        plgpu.barrier_wait(self.v_full.at[self.stage(step)])

    def add_values(self, accs: Any, p: Any, step: Any) -> Any:
        """O + P V with the values of `step`, which have come; awaited."""
        stage = self.stage(step)
        if self.interpret:  # which has neither accumulators with a past nor operands in registers
            p_s = self.p_s.at[self.wg]
            p_s[...] = p
            plgpu.commit_smem()

            def product(ref: Any, chunk: int) -> Any:
                plgpu.wgmma(ref, p_s, self.v_s.at[stage, chunk])
                return ref[...]

            new = [
                acc
                + pl.run_scoped(
                    functools.partial(product, chunk=chunk), plgpu.ACC((M, self.shape.cut.width), f32)
                )
                for chunk, acc in enumerate(accs)
            ]
        else:

            def issue(refs: Any) -> None:
                for chunk, ref in enumerate(refs):
                    plgpu.wgmma(ref, p, self.v_s.at[stage, chunk])

            new = list(pl.run_state(issue)(tuple(plgpu.ACC.init(acc) for acc in accs)))
        plgpu.barrier_arrive(self.v_free.at[stage])
        return tuple(new)

    def both_products(
        self, item: Item, q_s: Any, i: Any, step: Any, slope: Any, carry: Any, *, masked: bool
    ) -> Any:
        """Scores of tile i and values of tile i - 1, in flight together; softmax meanwhile."""
        accs, total, top, p = carry
        entry = self.entry(item, i, masked=masked)
        softmax = functools.partial(self.softmax, item, entry, slope, masked=masked)
        if self.interpret:
            s = self.scores(q_s, step)
            accs = self.add_values(accs, p, step - 1)
            p, sums, top, shrink, *is_due = softmax(s, top)
            self.await_values(step)
        else:
            k_stage, v_stage = self.stage(step), self.stage(step - 1)
            plgpu.barrier_wait(self.k_full.at[k_stage])

            def products(refs: Any) -> None:
                acc_refs, result_refs = refs

                def issue(s_ref: Any) -> Any:
                    self.issue_scores(s_ref, q_s, k_stage)
                    for chunk, acc_ref in enumerate(acc_refs):
                        plgpu.wgmma(acc_ref, p, self.v_s.at[v_stage, chunk])
                    return plgpu.wgmma_accumulator_load(s_ref, wait_n=len(acc_refs))

                s = pl.run_scoped(issue, plgpu.ACC(self.s_shape, f32))
                s = lax.optimization_barrier(s)
                plgpu.barrier_arrive(self.k_free.at[k_stage])
                results = softmax(s, top)
                for ref, result in zip(result_refs, results[: len(result_refs)], strict=True):
                    ref[...] = result
                # Its branch keeps ptxas from awaiting P V before the softmax.
                self.await_values(step)

            start = tuple(plgpu.ACC.init(acc) for acc in accs)
            zeros = plgpu.layout_cast(jnp.zeros(self.s_shape, f32), W)
            room = zeros, zeros[:, :LANE_COLUMNS], top, top, *([jnp.bool_(False)] if self.keeps_tops else [])
            accs, (p, sums, top, shrink, *is_due) = pl.run_state(products)((start, room))
            plgpu.barrier_arrive(self.v_free.at[v_stage])

        def shrunk(*sums: Any) -> Any:
            return tuple(x * self.wide(shrink, x.shape) for x in sums)

        if self.keeps_tops:
            *accs, total = lax.cond(is_due[0], shrunk, lambda *sums: sums, *accs, total)
        elif self.has_top:
            *accs, total = shrunk(*accs, total)
        return tuple(accs), total + sums, top, p.astype(self.dtype)

    # -------------------------------------------------------------------------- an item
    def edges(self, item: Item) -> tuple[Any, Any, Any]:
        """Of the tiles [0, low_edge) and [high_edge, num) need a mask; from num on no row needs them."""
        if item.entries_g is not None:
            return jnp.maximum(jnp.minimum(item["num_partial"], item.num), 1), item.num, item.num
        tile = jnp.int32(self.tiles.tile_kv)
        live = item["position"] + jnp.clip(self.rank * M, item["begin"], item["end"] - 1)
        last = item["position"] + jnp.clip(self.rank * M + (M - 1), item["begin"], item["end"] - 1)
        full_low, _ = key_range(self.score, last, item["seq_len"])
        _, full_high = key_range(self.score, live, item["seq_len"])
        full_low, full_high = jnp.maximum(full_low, 0), jnp.minimum(full_high, item["seq_len"])
        low_edge = jnp.int32(1)
        if self.has_window:
            low_edge = jnp.maximum(lax.div(full_low + item.skew + (tile - 1), tile) - item.first, 1)
        # Later tiles are for the rows of later warpgroups.
        _, high = key_range(self.score, last, item["seq_len"])
        num = lax.div(jnp.clip(high, 0, item["seq_len"]) + item.skew + (tile - 1), tile) - item.first
        is_live = (self.rank * M < item["end"]) & (self.rank * M + M > item["begin"])
        num = jnp.where(is_live, jnp.clip(num, 1, item.num), 1)
        low_edge = jnp.minimum(low_edge, num)
        high_edge = lax.div(jnp.maximum(full_high, 0) + item.skew, tile) - item.first
        return low_edge, jnp.clip(high_edge, low_edge, num), num

    def attend(self, item: Item, q_s: Any, step: Any, slope: Any, between: Callable) -> Any:
        """Unnormalised output, top and total of an item with keys, whose first keys are those of `step`."""
        has_lists = item.entries_g is not None
        low_edge, high_edge, num = self.edges(item)
        zeros = lambda *size: plgpu.layout_cast(jnp.zeros(size, f32), W)
        entry = self.entry(item, jnp.int32(0), masked=True)
        s = self.scores(q_s, step)
        between()
        p, total, top, *_ = self.softmax(item, entry, slope, s, None, masked=True)
        accs = tuple(zeros(M, self.shape.cut.width) for _ in range(self.shape.cut.chunks))
        carry = accs, total, top, p.astype(self.dtype)
        self.await_values(step)
        if has_lists:  # a list begins with the tile in which the request ends, if that is in it
            self.clear_unseen_values(item, entry, self.stage(step), is_low=False)
        elif self.has_low_edge:
            self.clear_unseen_values(item, entry, self.stage(step), is_low=True)

        def loop(begin: Any, end: Any, carry: Any, *, masked: bool) -> Any:
            def one(i: Any, carry: Any) -> Any:
                return self.both_products(item, q_s, i, step + i, slope, carry, masked=masked)

            return lax.fori_loop(begin, end, one, carry)

        if self.has_window or has_lists:
            carry = loop(jnp.int32(1), low_edge, carry, masked=True)
        carry = loop(low_edge, high_edge, carry, masked=False)
        if not has_lists:
            carry = loop(high_edge, num, carry, masked=True)
        accs, total, top, p = carry
        total = total.sum(axis=1)
        if not has_lists:
            last = self.entry(item, num - 1, masked=True)
            self.clear_unseen_values(item, last, self.stage(step + num - 1), is_low=False)
        accs = self.add_values(accs, p, step + num - 1)
        if has_lists:
            return accs, top, total

        @pl.loop(num, item.num)
        def skip(i: Any) -> None:
            stage = self.stage(step + i)
            for full, free in ((self.k_full, self.k_free), (self.v_full, self.v_free)):
                plgpu.barrier_wait(full.at[stage])
                plgpu.barrier_arrive(free.at[stage])

        return accs, top, total


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
    mask: Callable[[Any, Any, Any], Any] | None,
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
        mask: Which keys a query sees besides, in tiles that need a mask: of head and positions, elementwise.
        tiles: The kernel's static sizes.
        return_lse: Whether the second result is wanted.
        interpret: Interpret-mode parameters, or None for a GPU.

    Returns:
        Output like query, and f32 [tiles, q_heads, tile_q], tiles in the order of the tokens, or None.
    """
    cut, dtype, wgs, stages = shape.cut, query.dtype, tiles.warpgroups, tiles.stages
    size, buffers = shape.block_size, tiles.query_buffers
    per_stage = (1 if size is None else max(tiles.tile_kv // size, 1)) * cut.chunks
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
            load_kv = make_kv_loader(k_g, v_g, blocks_g, ring, tiles, shape, team)
            load_query = make_query_loader((q_g, table_g, q_s, item_s, q_full, q_free), tiles, shape, team)

            def load_item(nth: Any, step: Any) -> Any:
                number = number_of(nth)
                table_row, head = number, None
                if lists is None:
                    table_row, head = row_and_head(number, num_rows, shape)
                columns = {name: table_g[table_row, i] for i, name in enumerate(names)}
                item = make_item(number, columns.get("head", head), columns.__getitem__)

                tile = lambda i: item.tile_of(item.entry(i))

                def load_next(i: Any, index: Any) -> Any:
                    following = tile(jnp.minimum(i + 1, item.num - 1))
                    load_kv(item, index, step + i)
                    return following

                @pl.when(item.num > 0)
                def _() -> None:
                    # Keys before queries: the ring has room while the queries of the item before are in use.
                    load_kv(item, tile(jnp.int32(0)), step, lambda: load_query(item, table_row, nth))
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
                item = make_item(number, head, column)
                slope = None if slopes_g is None else slopes_g[item.head]
                if lean_s is not None:
                    group.lean(slope)
                row = lambda value: plgpu.layout_cast(jnp.full((M,), value, f32), ROW)
                zeros = lambda: plgpu.layout_cast(jnp.zeros((M, cut.width), f32), W)

                def release_last() -> None:
                    if buffers > 1:
                        pl.when(nth >= 1)(lambda: release(nth - 1))

                def with_keys() -> Any:
                    return group.attend(item, q_s.at[wg, buffer], step, slope, release_last)

                def without_keys() -> Any:
                    release_last()
                    return tuple(zeros() for _ in range(cut.chunks)), row(-jnp.inf), row(0.0)

                accs, top, total = lax.cond(item.num > 0, with_keys, without_keys)
                if sinks_g is not None:
                    sink = jnp.where(item["seq_len"] > 0, sinks_g[item.head], -jnp.inf)
                    new_top = jnp.maximum(top, sink)
                    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                    shrink = jnp.exp2(top - base)
                    total = total * shrink + jnp.exp2(sink - base)
                    accs = tuple(acc * group.wide(shrink, acc.shape) for acc in accs)
                    top = new_top
                inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
                if lse_g is not None:
                    lse = (top + jnp.log2(total)) * math.log(2)
                    lse_g[item["number"], item.head, pl.ds(pl.multiple_of(group.rank * M, M), M)] = lse
                out = tuple((acc * group.wide(inverse, acc.shape)).astype(dtype) for acc in accs)
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
        lean = [swizzled((wgs, rows, LEAN_WIDTH), dtype, LEAN_WIDTH) for rows in (M, tiles.tile_kv)]
    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(query.shape, dtype), lse_type),
        scratch_types=[
            plgpu.RefUnion((swizzled(tokens, dtype),), (plgpu.SMEM(tokens, dtype),)),
            plgpu.SMEM((wgs, buffers, TABLE_WIDTH), jnp.int32),
            swizzled(keys, dtype),
            swizzled(keys, dtype),
            swizzled((wgs, M, tiles.tile_kv), dtype) if interpret else None,
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
    return kernel(query, key, value, block_table, slopes, sinks, *items)


def swizzled(shape: tuple[int, ...], dtype: Any, width: int = 64) -> Any:
    """Shared memory that TMA fills and the tensor core reads: swizzled tiles of 8 rows, `width` wide."""
    transforms = (plgpu.TilingTransform((ALIGN, width)), plgpu.SwizzleTransform(2 * width))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)
