"""A computing warpgroup: 64 query rows of an item through all of its keys.

It issues S = Q K^T of a tile of keys together with O += P V of the tile before and does the softmax of S
meanwhile.

A row's probabilities are powers of 2 less its top, which is not the largest score so far but lies above it,
and stays until a score reaches it: no maximum of a tile, nothing rescaled, but where a warp's vote says so.
"""

import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.list_tiles import PART_SHIFT
from pallas_kernels.shared.paged_kv import clear_unseen
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill import votes
from pallas_kernels.varlen_prefill.items import Item, Shape, stage_of
from pallas_kernels.varlen_prefill.lists import num_parts
from pallas_kernels.varlen_prefill.masks import KernelMask, PairTile
from pallas_kernels.varlen_prefill.schedule import key_range
from pallas_kernels.varlen_prefill.tiles import WARPGROUP_ROWS, Tiles

LOG2E = math.log2(math.e)
W = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
M = WARPGROUP_ROWS
LEAN_PARTS = 3  # 16-bit numbers that add up to f32
LEAN_WIDTH = 16  # the tensor core's K
LANE_COLUMNS = 8  # a thread holds two neighbours of each eight columns of a tile
# A row's top lies so many powers of two above its largest score when it is chosen, and serves until a score
# reaches it. bf16 has the exponents of f32; probabilities of f16 must not fall below its own.
ROOM = {jnp.dtype(jnp.bfloat16): 80.0, jnp.dtype(jnp.float16): 4.0}
# With a bias tops rise from tile to tile. 8 x 2k: 480 us with the largest score as the top, 488 with room for
# 40 powers of two, 470 for 80, 461 for 100. In tiles of 128 keys they rise too far: 669 us with the largest,
# 695 with room for 80.
BIASED_ROOM = 100.0
BIASED_KEYS = 64
f32 = jnp.float32


class Edges(enum.Flag):
    """Which ends of what is seen a tile of keys may hold: with none of them there is nothing to mask."""

    NONE = 0
    LOW = enum.auto()
    HIGH = enum.auto()
    BOTH = LOW | HIGH


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
        mask: KernelMask | None,
        mask_g: Any,
        has_alibi: bool,
        interpret: Any,
    ):
        self.p_s, self.columns_s, self.lean_s = p_s, columns_s, lean_s
        self.k_s, self.v_s, self.k_full, self.v_full, self.k_free, self.v_free = ring
        self.tiles, self.shape, self.score, self.dtype = tiles, shape, score, dtype
        self.mask, self.mask_g, self.has_alibi, self.interpret = mask, mask_g, has_alibi, interpret
        self.wg = lax.axis_index("warpgroup")
        self.team, self.rank = team_and_rank(self.wg, tiles)
        self.s_shape = (M, tiles.tile_kv)
        # Scores are scaled inside the exponential.
        self.factor = 1.0
        if score.soft_cap is not None or score.scale > 0:
            self.factor = (score.soft_cap or score.scale) * LOG2E
        # Capped scores may be small enough to need no top at all.
        is_small = score.soft_cap is not None and score.soft_cap * LOG2E <= ROOM[dtype]
        self.has_top = has_alibi or not is_small
        rises_little = dtype == jnp.bfloat16 and tiles.tile_kv <= BIASED_KEYS
        self.keeps_tops = self.has_top and (rises_little or not has_alibi)
        self.room = BIASED_ROOM if has_alibi else ROOM[dtype]
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

    def pair_tile(self, item: Item, entry: Any) -> PairTile:
        """These rows and a tile of keys, as masks are asked about them."""
        return PairTile(
            head=item.head,
            first_query=item["position"] + self.rank * M,
            first_key=item.first_key(entry),
            columns=self.columns,
            shape=self.s_shape,
            interpret=self.interpret,
        )

    def stored(self, item: Item, entry: Any, edges: Edges) -> Any:
        """What the mask has stored of a tile: read early, for it comes from global memory."""
        if edges is Edges.NONE or not self.mask_g:
            return ()
        assert self.mask is not None
        return self.mask.load(self.pair_tile(item, entry), item["req"], self.mask_g)

    def visible(self, item: Item, entry: Any, edges: Edges, stored: Any, s: Any) -> Any:
        """-inf where a query does not see a key."""
        score, mask, first_key = self.score, self.mask, item.first_key(entry)
        has_high = score.causal or score.window[1] is not None or score.chunk_size is not None
        has_parts = self.shape.block_q is not None
        has_low = self.has_low_edge and Edges.LOW in edges
        has_row_low, has_row_high = self.has_window and has_low, has_high or has_parts
        # Ends of the request, or of each row; rows are numbered only where they have some of their own: for a
        # number that nobody uses Pallas finds no layout.
        low, high = 0 - first_key, item["seq_len"] - first_key
        if has_row_low or has_row_high:
            positions = self.positions(item)
            row_low, row_high = (x - first_key for x in key_range(score, positions, item["seq_len"]))
            if has_parts:
                row_high = jnp.where(self.sees_tile(item, entry, positions), row_high, 0)
            low, high = row_low if has_row_low else low, row_high if has_row_high else high
        tile = self.pair_tile(item, entry)
        if mask is not None and mask.is_words:
            words = mask.sees(tile, stored)
            in_range = tile.words_between(jnp.maximum(low, 0 - first_key) if has_low else None, high)
            return tile.masked(s, tuple(a & b for a, b in zip(words, in_range, strict=True)))

        def wide(end: Any) -> Any:
            is_row = end.ndim > 0
            return self.wide(plgpu.layout_cast(end, ROW).astype(f32), s.shape) if is_row else end.astype(f32)

        low, high = wide(low), wide(high)
        keys = self.columns()
        sees = keys < high
        if has_low:
            sees = sees & (keys >= low)
        if mask is not None:
            sees = sees & mask.sees(tile, stored)
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

    def entry(self, item: Item, i: Any, edges: Edges) -> Any:
        """Item.entry where the softmax needs it: read early, for it may come from global memory."""
        return item.entry(i) if edges is not Edges.NONE or self.has_alibi else None

    def softmax(
        self, item: Item, entry: Any, edges: Edges, slope: Any, stored: Any, s: Any, top: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        """The online softmax's step on a tile.

        Args:
            item: The item.
            entry: What Item.entry said of the tile.
            edges: Which ends of what a query sees may be in the tile.
            slope: ALiBi's, or None.
            stored: What Warpgroup.stored said of the tile.
            s: Q K^T.
            top: Of each row; None for an item's first tile.

        Returns:
            Probabilities; their sums, as far as each thread can add them alone; the top; what sums from
            before are to be multiplied by, and whether that is anything but 1 in the warp, if tops are kept.
        """
        s, row_term = self.modified(item, entry, slope, s)
        visible = lambda x: x if edges is Edges.NONE else self.visible(item, entry, edges, stored, x)
        is_first = top is None
        if is_first:
            top = plgpu.layout_cast(jnp.full((M,), -jnp.inf if self.has_top else 0.0, f32), ROW)
        is_due, shrink = jnp.bool_(True), top
        if not self.has_top:
            y = visible(s * self.factor)
        elif is_first or not self.keeps_tops:
            y, top, shrink = self.with_largest_top(visible(s), row_term, top)
        else:
            base = above_infinity(top) if row_term is None else above_infinity(top) - row_term
            y = visible(s * self.factor - self.wide(base, s.shape))
            if self.interpret:
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
        """Scores less a top by the largest that a row has seen, that, and by what sums from before shrink."""
        tile_top = s.max(axis=1) * self.factor + (0.0 if row_term is None else row_term)
        new_top = jnp.maximum(top, tile_top + (self.room if self.keeps_tops else 0.0))
        base = above_infinity(new_top)
        y = s * self.factor - self.wide(base if row_term is None else base - row_term, s.shape)
        return y, new_top, jnp.exp2(top - base)

    def with_new_tops(self, y: Any, top: Any) -> tuple[Any, Any, Any]:
        """Scores less a new top for rows that need one, the tops, by what sums from before shrink.

        Which rows do is for each to say: a row's numbers do not depend on the others of its tile.
        """
        tile_top, base = y.max(axis=1), above_infinity(top)
        is_due = (tile_top >= 0) | (top == -jnp.inf)
        new_top = jnp.where(is_due, tile_top + base + self.room, top)
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

    def scores(self, q_s: Any, step: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Q K^T of the keys of `step`, awaited."""
        stage = self.stage(step)
        plgpu.barrier_wait(self.k_full.at[stage])

        def product(s_ref: Any) -> Any:
            self.issue_scores(s_ref, q_s, stage)
            meanwhile()
            return s_ref[...]

        s = pl.run_scoped(product, plgpu.ACC(self.s_shape, f32))
        plgpu.barrier_arrive(self.k_free.at[stage])
        return s

    def clear_unseen_values(self, item: Item, entry: Any, stage: Any, *, is_low: bool) -> None:
        """Zeros for values that no query of the request sees: a probability of 0 does not hide a NaN.

        Warpgroups do it side by side in the same memory, so what one stores must be right at once: with both
        edges in a tile, a store of the low one that kept the high one's NaN undid another's zeros.
        """
        tile, part = self.tiles.tile_kv, jnp.int32(64)
        first_key = item.first_key(entry)
        begin, end = item["seen"] - first_key, item["seq_len"] - first_key
        is_edge = begin > 0 if is_low else end < tile

        @pl.when(is_edge)
        def _() -> None:
            parts = (0, lax.div(begin + 63, part)) if is_low else (lax.div(end, part), tile // 64)

            @pl.loop(*parts)
            def _(n: Any) -> None:
                at = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=W) + n * 64
                clear_unseen(self.v_s.at[stage], pl.ds(n * 64, 64), lambda _: at, begin, end)

            plgpu.commit_smem()

    def await_values(self, item: Item, entry: Any, step: Any, edges: Edges) -> None:
        """Waits for the values of a step and clears those that no query of the request sees.

        Args:
            item: The item.
            entry: What Item.entry said of the tile; of no meaning without edges.
            step: The tile's.
            edges: Which ends of what the request sees are to be cleared: what `edges_of_values` says.
        """
        stage = self.stage(step)
        plgpu.barrier_wait(self.v_full.at[stage])
        if Edges.LOW in edges and self.has_low_edge:
            self.clear_unseen_values(item, entry, stage, is_low=True)
        if Edges.HIGH in edges:
            self.clear_unseen_values(item, entry, stage, is_low=False)

    def edges_of_values(self, item: Item, edges: Edges, *, is_first: bool) -> Edges:
        """Which ends of what the request sees are in a tile whose values are awaited.

        A list begins with the tile that the request ends in, if that is listed; what is seen may begin in any
        tile that is seen in part. Without lists it begins in the first tile and ends in the last, whose end
        `add_last_values` clears: a compare for each tile before it would be one too many.

        Args:
            item: The item.
            edges: Those of the tile's scores.
            is_first: Whether it is the item's first tile.
        """
        if item.entries_g is None:
            return Edges.LOW if is_first else Edges.NONE
        return Edges.BOTH if is_first else edges & Edges.LOW

    def add_last_values(self, item: Item, accs: Any, p: Any, step: Any, last: Any) -> Any:
        """O + P V of an item's tile `last`, whose values have come with those of `step`; awaited."""
        if item.entries_g is None:
            entry = self.entry(item, last, Edges.HIGH)
            self.clear_unseen_values(item, entry, self.stage(step), is_low=False)
        return self.add_values(accs, p, step)

    def add_values(self, accs: Any, p: Any, step: Any) -> Any:
        """O + P V with the values of `step`, which have come and are clear; awaited."""
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
        self, item: Item, q_s: Any, i: Any, step: Any, slope: Any, carry: Any, edges: Edges
    ) -> Any:
        """Scores of tile i and values of tile i - 1, in flight together; softmax meanwhile."""
        accs, total, top, p = carry
        entry = self.entry(item, i, edges)
        stored = functools.partial(self.stored, item, entry, edges)
        softmax = functools.partial(self.softmax, item, entry, edges, slope)
        of_values = self.edges_of_values(item, edges, is_first=False)
        if self.interpret:
            s = self.scores(q_s, step)
            accs = self.add_values(accs, p, step - 1)
            p, sums, top, shrink, *is_due = softmax(stored(), s, top)
            self.await_values(item, entry, step, of_values)
        else:
            k_stage, v_stage = self.stage(step), self.stage(step - 1)
            plgpu.barrier_wait(self.k_full.at[k_stage])

            def products(refs: Any) -> None:
                acc_refs, result_refs = refs

                def issue(s_ref: Any) -> Any:
                    self.issue_scores(s_ref, q_s, k_stage)
                    for chunk, acc_ref in enumerate(acc_refs):
                        plgpu.wgmma(acc_ref, p, self.v_s.at[v_stage, chunk])
                    meanwhile = stored()
                    return plgpu.wgmma_accumulator_load(s_ref, wait_n=len(acc_refs)), meanwhile

                s, meanwhile = pl.run_scoped(issue, plgpu.ACC(self.s_shape, f32))
                s = lax.optimization_barrier(s)
                plgpu.barrier_arrive(self.k_free.at[k_stage])
                results = softmax(meanwhile, s, top)
                for ref, result in zip(result_refs, results[: len(result_refs)], strict=True):
                    ref[...] = result
                # Its branch keeps ptxas from awaiting P V before the softmax.
                self.await_values(item, entry, step, of_values)

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
    def share(self, item: Item) -> tuple[Any, Any, Any, Any]:
        """Of the tiles [begin, end) are for these rows; before low_edge and from high_edge on with a mask."""
        if item.entries_g is not None:
            low_edge = jnp.maximum(jnp.minimum(item["num_partial"], item.num), 1)
            return jnp.int32(0), low_edge, item.num, item.num
        tile = jnp.int32(self.tiles.tile_kv)
        live = item["position"] + jnp.clip(self.rank * M, item["begin"], item["end"] - 1)
        last = item["position"] + jnp.clip(self.rank * M + (M - 1), item["begin"], item["end"] - 1)
        full_low, _ = key_range(self.score, last, item["seq_len"])
        _, full_high = key_range(self.score, live, item["seq_len"])
        full_low, full_high = jnp.maximum(full_low, 0), jnp.minimum(full_high, item["seq_len"])
        # Later tiles are for the rows of later warpgroups, with a window earlier ones for those of earlier.
        low, _ = key_range(self.score, live, item["seq_len"])
        _, high = key_range(self.score, last, item["seq_len"])
        end = lax.div(jnp.clip(high, 0, item["seq_len"]) + item.skew + (tile - 1), tile) - item.first
        end = jnp.clip(end, 1, item.num)
        begin, low_edge = jnp.int32(0), jnp.int32(1)
        if self.has_window:
            begin = jnp.clip(lax.div(jnp.maximum(low, 0) + item.skew, tile) - item.first, 0, end - 1)
            low_edge = lax.div(full_low + item.skew + (tile - 1), tile) - item.first
            low_edge = jnp.clip(low_edge, begin + 1, end)
        high_edge = lax.div(jnp.maximum(full_high, 0) + item.skew, tile) - item.first
        return begin, low_edge, jnp.clip(high_edge, low_edge, end), end

    def has_work(self, item: Item) -> Any:
        """Whether these rows are some of the item's, and it has keys."""
        first = self.rank * M
        return (item.num > 0) & (first < item["end"]) & (first + M > item["begin"])

    def skip(self, step: Any, first: Any, end: Any) -> None:
        """Lets tiles [first, end) of an item pass, whose first keys are those of `step`."""

        @pl.loop(first, end)
        def _(i: Any) -> None:
            stage = self.stage(step + i)
            for full, free in ((self.k_full, self.k_free), (self.v_full, self.v_free)):
                plgpu.barrier_wait(full.at[stage])
                plgpu.barrier_arrive(free.at[stage])

    def attend(self, item: Item, q_s: Any, step: Any, slope: Any, meanwhile: Callable[[], None]) -> Any:
        """Unnormalised output, top and total of these rows, whose item's first keys are those of `step`.

        `meanwhile` is done beside the first scores.
        """
        has_lists = item.entries_g is not None
        begin, low_edge, high_edge, end = self.share(item)
        zeros = lambda *size: plgpu.layout_cast(jnp.zeros(size, f32), W)

        if self.has_window and not has_lists:
            self.skip(step, jnp.int32(0), begin)
        entry = item.first_entry() + begin
        stored = self.stored(item, entry, Edges.BOTH)
        s = self.scores(q_s, step + begin, meanwhile)
        p, total, top, *_ = self.softmax(item, entry, Edges.BOTH, slope, stored, s, None)
        accs = tuple(zeros(M, self.shape.cut.width) for _ in range(self.shape.cut.chunks))
        carry = accs, total, top, p.astype(self.dtype)
        of_values = self.edges_of_values(item, Edges.BOTH, is_first=True)
        self.await_values(item, entry, step + begin, of_values)

        def loop(first: Any, end: Any, edges: Edges, carry: Any) -> Any:
            def one(i: Any, carry: Any) -> Any:
                return self.both_products(item, q_s, i, step + i, slope, carry, edges)

            return lax.fori_loop(first, end, one, carry)

        if self.has_window or has_lists:
            carry = loop(begin + 1, low_edge, Edges.BOTH, carry)
        carry = loop(low_edge, high_edge, Edges.NONE, carry)
        if not has_lists:
            carry = loop(high_edge, end, Edges.HIGH, carry)
        accs, total, top, p = carry
        total = total.sum(axis=1)
        accs = self.add_last_values(item, accs, p, step + end - 1, end - 1)
        if not has_lists:
            self.skip(step, end, item.num)
        return accs, top, total
