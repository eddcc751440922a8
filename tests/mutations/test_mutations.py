"""Kernels with one fault each: the contract must fail for each of them."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn.implementations.mosaic_gpu import tile_lists
from pallas_kernels.paged_decode import combine
from pallas_kernels.paged_decode.loader import CpAsyncPipeline
from pallas_kernels.paged_decode.span import Span
from pallas_kernels.score_mod import KernelScoreMod
from pallas_kernels.shared import score
from pallas_kernels.shared.layouts import ROW, WARPGROUP_ROWS
from pallas_kernels.shared.memory import PANEL, TokenRows
from pallas_kernels.shared.paged_kv import BlockTableRef
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_backward import dkdv_scores as backward_scores
from pallas_kernels.varlen_backward import dkdv_tile_scheduler as backward_scheduler
from pallas_kernels.varlen_backward import entry as backward_entry
from pallas_kernels.varlen_backward import schedule as backward_schedule
from pallas_kernels.varlen_backward import tile_lists as key_tile_lists
from pallas_kernels.varlen_backward.dkdv_scores import TransposedPairTile
from pallas_kernels.varlen_backward.warp_dkdv_kernel import WarpDkDvMainloop
from pallas_kernels.varlen_backward.warp_dkdv_loader import WarpQueryPipeline
from pallas_kernels.varlen_backward.warp_dq_kernel import WarpDqMainloop
from pallas_kernels.varlen_prefill import entry as prefill_entry
from pallas_kernels.varlen_prefill import schedule as prefill_schedule
from pallas_kernels.varlen_prefill import tile_scheduler
from pallas_kernels.varlen_prefill.loader import Dequantizer
from pallas_kernels.varlen_prefill.tile_scheduler import QueryRows
from pallas_kernels.varlen_prefill.warp_kernel import WarpMainloop
from pallas_kernels.varlen_prefill.warp_loader import WarpPipeline
from tests.mutations import kernels

README = pathlib.Path(__file__).parent / "README.md"
FAILURES = r"is off by|must come out|must be -inf|[nN]ot equal"
pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault of a kernel.

    Attributes:
        fault: Description of the fault, as in README.md.
        check: The check that must fail.
        apply: Function that applies the fault.
    """

    fault: str
    check: Callable[[], None]
    apply: Callable[[pytest.MonkeyPatch], None]


# ------------------------------------------------------------------------------------- both kernels
def key_range(low: int = 0, high: int = 0) -> Callable[[pytest.MonkeyPatch], None]:
    """Shift the ends of the visible key range, clamped to the ends of the request."""
    original = Score.key_range

    def shifted(self, position, seq_len):
        first, end = original(self, position, seq_len)
        end = jnp.where(end > 1, jnp.minimum(end + high, seq_len), end)
        return jnp.maximum(first + low, 0), end

    return lambda patch: patch.setattr(Score, "key_range", shifted)


# ------------------------------------------------------------------------------------- paged_decode
def segments(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Apply `change(segment, shape, reqs)` to each segment of producer and consumer."""
    original = Span.segment

    def mutated(span, *args, **kwargs):
        segment = original(span, *args, **kwargs)
        return dataclasses.replace(segment, **change(segment, span.spec.shape, span.seq_lens.shape[0]))

    return lambda patch: patch.setattr(Span, "segment", mutated)


def fewer_partials(patch: pytest.MonkeyPatch) -> None:
    original = combine.row_splits

    def mutated(*args):
        first, count, first_span = original(*args)
        return first, jnp.where(count > 1, jnp.maximum(count - 1, 2), count), first_span

    patch.setattr(combine, "row_splits", mutated)


def partials_from_the_second(patch: pytest.MonkeyPatch) -> None:
    original = combine.row_splits

    def mutated(*args):
        first, count, first_span = original(*args)
        return jnp.where(count > 2, first + 1, first), count, first_span

    patch.setattr(combine, "row_splits", mutated)


def copies_of_the_tile_before(patch: pytest.MonkeyPatch) -> None:
    original = CpAsyncPipeline.copies_after
    mutated = lambda pipeline, segment, tile_index: original(pipeline, segment, tile_index - 1)
    patch.setattr(CpAsyncPipeline, "copies_after", mutated)


def values_in_the_next_stage(patch: pytest.MonkeyPatch) -> None:
    original = CpAsyncPipeline.release_values
    mutated = lambda pipeline, stage, *args: original(pipeline, 1 - stage, *args)
    patch.setattr(CpAsyncPipeline, "release_values", mutated)


def no_copies_of_the_last_tile(patch: pytest.MonkeyPatch) -> None:
    original = CpAsyncPipeline.load

    def mutated(pipeline, stream, stage, segment, tile_index, copies):
        original(pipeline, stream, stage, segment, tile_index + 1, copies)

    patch.setattr(CpAsyncPipeline, "load", mutated)


# ----------------------------------------------------------------------------------- varlen_prefill
def values_of_the_next_tile(patch: pytest.MonkeyPatch) -> None:
    original = WarpPipeline.wait_second

    def mutated(pipeline, work_tile, i, loads):
        loads = original(pipeline, work_tile, i, loads)
        return loads._replace(second=loads.first)

    patch.setattr(WarpPipeline, "wait_second", mutated)


def no_loads_of_the_last_tile(patch: pytest.MonkeyPatch) -> None:
    original = WarpPipeline._load

    def mutated(pipeline, stages_s, kv_g, work_tile, i, location):
        is_last = i == work_tile.num - 1
        original(pipeline, stages_s, kv_g, work_tile, jnp.where(is_last & (i > 0), i + 1, i), location)

    patch.setattr(WarpPipeline, "_load", mutated)


def tile_range(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Apply `change(first, num)` to the tiles of a work tile."""
    original = tile_scheduler.overlapping_kv_tiles
    return lambda patch: patch.setattr(
        tile_scheduler, "overlapping_kv_tiles", lambda *args: change(*original(*args))
    )


def without_first(first, num):
    return jnp.where(num > 1, first + 1, first), jnp.where(num > 1, num - 1, num)


def entries(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Apply `change(work_tile, i)` to the index of a work tile's i-th key tile."""
    original = tile_scheduler.PrefillWorkTile.entry
    return lambda patch: patch.setattr(
        tile_scheduler.PrefillWorkTile,
        "entry",
        lambda work_tile, i: original(work_tile, change(work_tile, i)),
    )


def blocks_of_the_next_request(patch: pytest.MonkeyPatch) -> None:
    original = BlockTableRef.visible_blocks

    def mutated(table, req, *args, **options):
        reqs = table._table_g.shape[0]
        return original(table, next_of(req, reqs), *args, **options)

    patch.setattr(BlockTableRef, "visible_blocks", mutated)


def splits(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Apply `change(skipped, split_tiles, partial, num_splits)` to the schedule's splits."""
    original = prefill_schedule.split_kv_tiles

    def mutated(*args, **options):
        cut = original(*args, **options)
        return cut._replace(columns=change(*cut.columns))

    return lambda patch: patch.setattr(prefill_schedule, "split_kv_tiles", mutated)


def wider_groups(patch: pytest.MonkeyPatch) -> None:
    original = prefill_entry.PrefillShape
    patch.setattr(
        prefill_entry, "PrefillShape", lambda **fields: original(**fields | {"group": 2 * fields["group"]})
    )


def rows_as_tokens(patch: pytest.MonkeyPatch) -> None:
    def mutated(rows):
        first = rows.work_tile["position"] + rows.rank * rows.tokens
        return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW) + first

    patch.setattr(QueryRows, "positions", mutated)


def first_head_for_all(patch: pytest.MonkeyPatch) -> None:
    original = tile_scheduler.packed_heads

    def mutated(work_tile, spec):
        first, *remaining = original(work_tile, spec)
        return [first, *(tile._replace(head=first.head) for tile in remaining)]

    patch.setattr(tile_scheduler, "packed_heads", mutated)


def first_sink_for_all_rows(patch: pytest.MonkeyPatch) -> None:
    original = QueryRows.load_per_row_of_token

    def mutated(self, values):
        num = self.spec.score.rows_per_token
        return original(self, jnp.repeat(values[...][::num], num))

    patch.setattr(QueryRows, "load_per_row_of_token", mutated)


def shifted_tail(entry: ModuleType) -> Callable[[pytest.MonkeyPatch], None]:
    """Shift the copy of an array's last rows, which is read in place of an incomplete group of 8 rows."""
    original = entry.split_tail

    def mutated(x, num_rows):
        rows, tail = original(x, num_rows)
        return TokenRows(rows, None if tail is None else jnp.roll(tail, 8, axis=0))

    return lambda patch: patch.setattr(entry, "split_tail", mutated)


def scale_of_keys_for_both(patch: pytest.MonkeyPatch) -> None:
    original = Dequantizer.__init__

    def mutated(dequantizer, inputs, *args):
        kv = inputs.kv
        original(dequantizer, inputs._replace(kv=kv._replace(v_scale=kv.k_scale)), *args)

    patch.setattr(Dequantizer, "__init__", mutated)


def without_the_last_columns(patch: pytest.MonkeyPatch) -> None:
    original = Dequantizer.dequantize_stage

    def mutated(dequantizer, *args):
        spec, head = dequantizer.spec, dequantizer.spec.shape.head
        shape = dataclasses.replace(spec.shape, head=head._replace(width=head.width - PANEL))
        dequantizer.spec = dataclasses.replace(spec, shape=shape)
        original(dequantizer, *args)
        dequantizer.spec = spec

    patch.setattr(Dequantizer, "dequantize_stage", mutated)


# -------------------------------------------------------------------------------------------- lists
def codes(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Apply `change(some, every, query_blocks)` to the coverage of tiles [query tiles, heads, tiles]."""
    original = tile_lists.encode_tiles
    mutated = lambda some, every, query_blocks=(): original(*change(some, every, query_blocks))
    return lambda patch: patch.setattr(tile_lists, "encode_tiles", mutated)


def listed(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Apply `change(lists)` to the tile lists."""
    original = tile_lists.make_tile_lists
    mutated = lambda *args, **kwargs: change(original(*args, **kwargs))
    return lambda patch: patch.setattr(tile_lists, "make_tile_lists", mutated)


def without_a_seen_tile(some, every, query_blocks):
    is_first = jnp.cumsum(some, axis=-1) == 1
    return some & ~(is_first & (some.sum(axis=-1, keepdims=True) > 1)), every, query_blocks


# ---------------------------------------------------------------------------------- varlen_backward
def query_tiles(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Apply `change(first, low, high, num)` to the query tiles that see a key tile."""
    original = backward_schedule.visible_query_tiles
    mutated = lambda *args, **kwargs: change(*original(*args, **kwargs))
    return lambda patch: patch.setattr(backward_schedule, "visible_query_tiles", mutated)


def query_range(low: int = 0, high: int = 0) -> Callable[[pytest.MonkeyPatch], None]:
    """Shift the ends of the queries that see a key."""
    original = backward_scores.visible_query_range

    def shifted(*args):
        first, end = original(*args)
        return first + low, end + high

    return lambda patch: patch.setattr(backward_scores, "visible_query_range", shifted)


def dout_of_the_head_before(patch: pytest.MonkeyPatch) -> None:
    original = WarpQueryPipeline.first_step_from
    mutated = lambda pipeline, work_tile, i: original(pipeline, work_tile, jnp.maximum(i - 1, 0))
    patch.setattr(WarpQueryPipeline, "first_step_from", mutated)


def one_head(patch: pytest.MonkeyPatch) -> None:
    original = backward_scheduler.DkDvWorkTile.head
    patch.setattr(backward_scheduler.DkDvWorkTile, "head", lambda work_tile, i: original(work_tile, i * 0))


def first_entries_for_all_splits(patch: pytest.MonkeyPatch) -> None:
    original = backward_scheduler.DkDvWorkTile._steps_of_split
    mutated = lambda work_tile, steps: original(work_tile, steps)._replace(entry=steps.entry)
    patch.setattr(backward_scheduler.DkDvWorkTile, "_steps_of_split", mutated)


def swapped_bits(patch: pytest.MonkeyPatch) -> None:
    original = key_tile_lists.encode_tiles
    mutated = lambda some, every, warpgroups=(): original(some, every, tuple(warpgroups)[::-1])
    patch.setattr(key_tile_lists, "encode_tiles", mutated)


def rows_from(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Apply `change(first)` to the row from which a mask's arrays are read for key-major rows."""
    original = TransposedPairTile.load_rows
    mutated = lambda tile, ref, index, first: original(tile, ref, index, change(first))
    return lambda patch: patch.setattr(TransposedPairTile, "load_rows", mutated, raising=False)


def queries_codes(patch: pytest.MonkeyPatch) -> None:
    original = tile_lists.plan_mask

    def mutated(*args, **kwargs):
        with pytest.MonkeyPatch.context() as inner:
            codes(without_a_seen_tile)(inner)
            return original(*args, **kwargs)

    patch.setattr(tile_lists, "plan_mask", mutated)


def fewer(first, low, high, num):
    return (
        first,
        jnp.minimum(low, num - 1),
        jnp.where(num > 1, jnp.maximum(high - 1, 0), high),
        jnp.where(num > 1, num - 1, num),
    )


backward_lists = kernels.check_backward_lists
backward_blocks = kernels.check_backward_blocks
decode, in_splits = kernels.check_decode, functools.partial(kernels.check_decode, split_kv=64)
cp_async = functools.partial(kernels.check_decode, sizes=kernels.CP_ASYNC)
decode_window = functools.partial(kernels.check_decode, kernels.WINDOW)
prefill, lists = kernels.check_prefill, kernels.check_lists
per_warp = functools.partial(kernels.check_prefill, sizes=kernels.PER_WARP)
prefill_window = functools.partial(kernels.check_prefill, kernels.WINDOW)
backward = kernels.check_backward
backward_window = functools.partial(kernels.check_backward, kernels.WINDOW)
queries = functools.partial(kernels.check_backward, deterministic=True)
per_warp_backward = functools.partial(kernels.check_backward, sizes=kernels.PER_WARP_BACKWARD)
next_of = lambda x, count: jax.lax.rem(x + 1, jnp.int32(count))


# ------------------------------------------------------------------------------------- score functions
def positions_of_next_keys(patch: pytest.MonkeyPatch) -> None:
    original = tile_scheduler.KvTile.score_tile

    def mutated(tile, column_indices):
        pairs = original(tile, column_indices)
        return pairs._replace(key=pairs.key._replace(first=pairs.key.first + 1))

    patch.setattr(tile_scheduler.KvTile, "score_tile", mutated)


def derivatives_of_one(patch: pytest.MonkeyPatch) -> None:
    original = KernelScoreMod.apply_with_derivative
    mutated = lambda mod, s, *rest: (original(mod, s, *rest)[0], jnp.ones_like(s))
    patch.setattr(KernelScoreMod, "apply_with_derivative", mutated)


MUTATIONS = {
    "decode-last-tile": Mutation(
        "the last tile of a request in a span is not read",
        decode,
        segments(lambda s, *_: {"num_tiles": jnp.where(s.num_tiles > 1, s.num_tiles - 1, s.num_tiles)}),
    ),
    "decode-tile-before": Mutation(
        "a span starts one tile too early and ends one tile too early",
        decode,
        segments(lambda s, *_: {"first_tile": jnp.maximum(s.first_tile - 1, 0)}),
    ),
    "decode-table": Mutation(
        "a request reads the blocks of the next request",
        decode,
        segments(lambda s, shape, reqs: {"request": next_of(s.request, reqs)}),
    ),
    "decode-kv-head": Mutation(
        "a KV head reads the keys of the next KV head",
        decode,
        segments(lambda s, shape, _: {"kv_head": next_of(s.kv_head, shape.kv_heads)}),
    ),
    "decode-end": Mutation("the last visible key of each query is masked out", decode, key_range(high=-1)),
    "decode-window": Mutation("the window is one key too wide", decode_window, key_range(low=-1)),
    "decode-narrow-window": Mutation("the window is one key too narrow", decode_window, key_range(low=1)),
    "combine-fewer": Mutation("the combine step omits the last span of a request", decode, fewer_partials),
    "combine-fewer-splits": Mutation(
        "the combine step omits the last split of a request", in_splits, fewer_partials
    ),
    "combine-shifted": Mutation(
        "the combine step starts with a request's second split and ends with a split of another request",
        in_splits,
        partials_from_the_second,
    ),
    "cp-async-tile-before": Mutation(
        "a stage is filled again with the tile that precedes the right one",
        cp_async,
        copies_of_the_tile_before,
    ),
    "cp-async-stage": Mutation(
        "values are loaded into the stage of other values", cp_async, values_in_the_next_stage
    ),
    "cp-async-last-tile": Mutation(
        "the last tile of a request in a span is not loaded", cp_async, no_copies_of_the_last_tile
    ),
    "per-warp-values": Mutation(
        "a stage of values is filled with those of the next tile", per_warp, values_of_the_next_tile
    ),
    "per-warp-last-tile": Mutation(
        "the last KV tile of a work tile is not loaded", per_warp, no_loads_of_the_last_tile
    ),
    "per-warp-nan": Mutation(
        "values that no query attends to are not zeroed",
        per_warp,
        lambda patch: patch.setattr(WarpMainloop, "clear_values", lambda *_: None),
    ),
    "prefill-last-tile": Mutation(
        "the last KV tile of a work tile is not read",
        prefill,
        tile_range(lambda first, num: (first, jnp.where(num > 1, num - 1, num))),
    ),
    "prefill-first-tile": Mutation(
        "the first KV tile of a work tile is not read",
        prefill,
        tile_range(without_first),
    ),
    "prefill-double-tile": Mutation(
        "a work tile reads its first KV tile twice and never its second",
        prefill,
        entries(lambda work_tile, i: jnp.where(i == 1, 0, i)),
    ),
    "prefill-end": Mutation("the last visible key of each query is masked out", prefill, key_range(high=-1)),
    "prefill-future": Mutation("each query attends to the key after its own", prefill, key_range(high=1)),
    "prefill-window": Mutation("the window is one key too wide", prefill_window, key_range(low=-1)),
    "prefill-narrow-window": Mutation("the window is one key too narrow", prefill_window, key_range(low=1)),
    "prefill-table": Mutation(
        "a request reads the blocks of the next request", prefill, blocks_of_the_next_request
    ),
    "prefill-tail": Mutation(
        "the copy of the last rows is one group of 8 rows off", prefill, shifted_tail(prefill_entry)
    ),
    "prefill-kv-head": Mutation("query heads read the keys of another KV head", prefill, wider_groups),
    "split-begin": Mutation(
        "all splits but the first start one tile too late",
        kernels.check_splits,
        splits(lambda skipped, *rest: (jnp.where(skipped > 0, skipped + 1, 0), *rest)),
    ),
    "split-short": Mutation(
        "the last tile of each split is not read",
        kernels.check_splits,
        splits(lambda skipped, tiles, *rest: (skipped, jnp.where(rest[1] > 1, tiles - 1, tiles), *rest)),
    ),
    "split-fewer": Mutation(
        "the combine kernel omits the last split of a query tile",
        kernels.check_splits,
        splits(lambda skipped, tiles, partial, num: (skipped, tiles, partial, jnp.maximum(num - 1, 1))),
    ),
    "packed-positions": Mutation(
        "the rows of packed heads are numbered as consecutive tokens",
        kernels.check_packed_heads,
        rows_as_tokens,
    ),
    "packed-first-head": Mutation(
        "all packed heads use the slope and the sink of the first one",
        kernels.check_packed_heads,
        first_head_for_all,
    ),
    "prefill-rows": Mutation(
        "rows of a token have different positions",
        kernels.check_prefill_rows,
        lambda patch: patch.setattr(score, "floor_div", lambda position, size: position),
    ),
    "prefill-row-sink": Mutation(
        "all rows of a token use its first sink", kernels.check_prefill_rows, first_sink_for_all_rows
    ),
    "dequantize-scale": Mutation(
        "values are dequantized with the scale of the keys", kernels.check_quantized, scale_of_keys_for_both
    ),
    "dequantize-columns": Mutation(
        "the last 64 columns of keys and values are not dequantized",
        kernels.check_quantized,
        without_the_last_columns,
    ),
    "list-lost-tile": Mutation("a visible tile is missing from a list", lists, codes(without_a_seen_tile)),
    "list-double-tile": Mutation(
        "a list names one tile twice, in place of another",
        lists,
        listed(lambda x: x._replace(entries=x.entries.at[:, 1:].set(x.entries[:, :1]))),
    ),
    "list-other-head": Mutation(
        "a head uses the list of another head",
        lists,
        codes(lambda some, every, query_blocks: tuple(
            jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), (some, every, tuple(query_blocks)))
        )),
    ),
    "list-full": Mutation(
        "partial tiles are not masked",
        lists,
        codes(lambda some, _, query_blocks: (some, some, query_blocks)),
    ),
    "list-other-block": Mutation(
        "the query blocks of a query tile attend to each other's tiles",
        lists,
        codes(lambda some, every, query_blocks: (some, every, query_blocks[::-1])),
    ),
    "backward-last-tile": Mutation(
        "the last query tile of a work tile is not read", backward, query_tiles(fewer)
    ),
    "backward-first-tile": Mutation(
        "the first query tile of a work tile is not read",
        backward,
        query_tiles(lambda first, low, high, num: (
            jnp.where(num > 1, first + 1, first), jnp.where(num > 1, jnp.maximum(low - 1, 0), low), high,
            jnp.where(num > 1, num - 1, num),
        )),
    ),
    "backward-missing-block": Mutation(
        "a block that a tile lacks is computed as the list's first one",
        backward_blocks,
        lambda patch: patch.setattr(
            backward_scores.QueryTile,
            "run_starts",
            lambda tile: tuple(map(tile.work_tile.position, tile.runs)),
        ),
    ),
    "backward-rows": Mutation(
        "rows of a token have different positions",
        kernels.check_query_rows,
        lambda patch: patch.setattr(score, "floor_div", lambda position, size: position),
    ),
    "backward-split": Mutation(
        "each split of a list starts with the first entry",
        kernels.check_query_rows,
        first_entries_for_all_splits,
    ),
    "backward-full": Mutation(
        "the partial tiles at both ends are not masked",
        backward,
        query_tiles(lambda first, low, high, num: (first, low * 0, high * 0, num)),
    ),
    "backward-future": Mutation("each key is visible to the query before it", backward, query_range(low=-1)),
    "backward-end": Mutation("each key is masked out for its own query", backward, query_range(low=1)),
    "backward-window": Mutation("the window is one key too wide", backward_window, query_range(high=1)),
    "backward-narrow-window": Mutation(
        "the window is one key too narrow", backward_window, query_range(high=-1)
    ),
    "backward-tail": Mutation(
        "the copies of the last rows are one group of 8 rows off", backward, shifted_tail(backward_entry)
    ),
    "dq-last-tile": Mutation(
        "the last KV tile of a work tile is not read",
        queries,
        tile_range(lambda first, num: (first, jnp.where(num > 1, num - 1, num))),
    ),
    "dq-end": Mutation("the last visible key of each query is masked out", queries, key_range(high=-1)),
    "dq-future": Mutation("each query attends to the key after its own", queries, key_range(high=1)),
    "per-warp-backward-dout": Mutation(
        "dO of a head's first step is that of the head before", per_warp_backward, dout_of_the_head_before
    ),
    "per-warp-backward-nan": Mutation(
        "queries and dO of other requests are not zeroed",
        per_warp_backward,
        lambda patch: patch.setattr(WarpDkDvMainloop, "clear_queries", lambda *_: None),
    ),
    "per-warp-dq-nan": Mutation(
        "keys that no query attends to are not zeroed",
        per_warp_backward,
        lambda patch: patch.setattr(WarpDqMainloop, "clear_keys", lambda *_: None),
    ),
    "backward-head": Mutation("one query head of each group is used for all", backward, one_head),
    "backward-warpgroup-bits": Mutation(
        "a warpgroup skips the tiles that the other warpgroup does not need", backward_lists, swapped_bits
    ),
    "backward-distance": Mutation(
        "each key is visible to the queries one position after a slash",
        functools.partial(backward_lists, "vertical_slash"),
        rows_from(lambda first: first + 1),
    ),
    "dq-list": Mutation(
        "a visible tile is missing from a list of the dq kernel", backward_lists, queries_codes
    ),
    "score-mod-key": Mutation(
        "a score function gets the position of the next key", kernels.check_score_mod, positions_of_next_keys
    ),
    "score-mod-derivative": Mutation(
        "the derivative of a score function is 1", kernels.check_score_mod_gradients, derivatives_of_one
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=name)
        for name, check in {
            "decode": decode,
            "in_splits": in_splits,
            "cp_async": cp_async,
            "per_warp": per_warp,
            "per_warp_lists": functools.partial(kernels.check_lists, kernels.PER_WARP),
            "decode_window": decode_window,
            "prefill": prefill,
            "prefill_window": prefill_window,
            "splits": kernels.check_splits,
            "packed_heads": kernels.check_packed_heads,
            "prefill_rows": kernels.check_prefill_rows,
            "quantized": kernels.check_quantized,
            "lists": lists,
            "backward": backward,
            "backward_window": backward_window,
            "queries": queries,
            "per_warp_backward": per_warp_backward,
            "backward_lists": backward_lists,
            "query_rows": kernels.check_query_rows,
            "score_mod": kernels.check_score_mod,
            "score_mod_gradients": kernels.check_score_mod_gradients,
        }.items()
    ],
)
def test_unchanged_kernels_pass(check):
    check()


@pytest.mark.parametrize("name", MUTATIONS)
def test_contract_fails_for_each_mutation(monkeypatch, name):
    mutation = MUTATIONS[name]
    mutation.apply(monkeypatch)
    jax.clear_caches()
    with pytest.raises(AssertionError, match=FAILURES):
        mutation.check()


def test_the_readme_lists_all_mutations():
    text = README.read_text()
    assert [name for name, m in MUTATIONS.items() if f"| {name} | {m.fault} |" not in text] == []
