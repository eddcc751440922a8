"""The query tiles of a step and their KV splits, the longest first: computed on the device once per step."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.checks import require
from pallas_kernels.shared.arithmetic import sort_ranks, sorts_before
from pallas_kernels.shared.memory import ALIGN
from pallas_kernels.shared.score import Score, ScoreMask
from pallas_kernels.varlen_prefill.sizes import PrefillSizes


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PrefillScheduleKey:
    """Static arguments that a schedule was built for. A call with other arguments cannot use the schedule.

    Attributes:
        num_tokens: Number of query tokens, including padding.
        mask: Causality, window, chunk size and rows per token, see Score.mask.
        sizes: Tile sizes of the kernel.
        q_heads: Number of query heads if KV splits are enabled; else None, and the schedule serves any number
            of heads.
        has_lists: Whether the call has tile lists.
        is_packed: Whether keys are packed instead of in a paged cache.
        list_block_size: Number of keys per entry of the tile lists if several entries fill a tile; None if an
            entry is a tile, and for the schedule itself.
        block_q: Number of queries, in rows, per block of queries if entries of the tile lists say which
            blocks attend to them; None if they do not, and for the schedule itself.
    """

    num_tokens: int
    mask: ScoreMask
    sizes: PrefillSizes
    q_heads: int | None
    has_lists: bool
    is_packed: bool
    list_block_size: int | None = None
    block_q: int | None = None


class SplitTiles(NamedTuple):
    """The query tiles whose keys are split.

    Attributes:
        num_valid: Number of split query tiles.
        rows: Row in the schedule's table of each query tile's first split.
    """

    num_valid: Int32[Array, " 1"]
    rows: Int32[Array, " max_split_tiles"]


class PrefillSchedule(NamedTuple):
    """The query tiles of a step, shared by the layers with the same mask.

    Attributes:
        table: One row per query tile with COLUMNS; with KV splits one row per split, extended by
            SPLIT_COLUMNS. Rows are sorted longest first; if tile lists are to be built, which
            determine the duration, they are in token order. Rows from `num_valid` on are 0.
        num_valid: Number of valid rows.
        first_tiles: Index (in token order) of each request's first query tile; the padding after the last
            request counts as one more request.
        split_tiles: The query tiles whose keys are split; None without KV splits.
        built_for: Static arguments that the schedule was built for.
    """

    table: Int32[Array, "tiles columns"]
    num_valid: Int32[Array, " 1"]
    first_tiles: Int32[Array, " bounds"]
    split_tiles: SplitTiles | None
    built_for: PrefillScheduleKey


def schedule_key(
    num_tokens: int,
    score: Score,
    sizes: PrefillSizes,
    q_heads: int | None,
    *,
    has_lists: bool,
    is_packed: bool,
) -> PrefillScheduleKey:
    """Return the static arguments that the schedule of a call must be built for."""
    split_heads = q_heads if sizes.max_splits > 1 else None
    return PrefillScheduleKey(num_tokens, score.mask, sizes, split_heads, has_lists, is_packed)


# Columns of a query tile in the table:
COLUMNS = (
    "req",
    "first_row",  # row of the queries at which the tile starts
    "begin",  # first valid row of the tile, relative to first_row
    "end",  # one past the last valid row, relative to first_row
    "position",  # position of first_row in its request
    "seq_len",
    "first_visible_key",  # first key that any query of the request attends to
    "kv_start",  # row of the request's first key if keys are packed
)
# Columns of a work tile in the table of tile lists, after the columns of its query tile:
LIST_COLUMNS = (
    "head",
    "list",  # row of `entries` that holds the work tile's list
    "first_entry",  # first entry of the list
    "num",  # number of tiles in the list
    "num_partial",  # number of partial tiles, which come first
)
# The same columns if several entries fill a tile: the first tile has fewer entries than the others if their
# number is not a multiple.
PACKED_LIST_COLUMNS = tuple("num_missing" if name == "first_entry" else name for name in LIST_COLUMNS)
TABLE_WIDTH = 32  # 128 bytes, the alignment that TMA needs


FEW_REQUESTS = 8
# XLA recomputes the sort order for each column that it permutes: for 258 rows that takes 8 us, otherwise 1
# us.
MAX_RECOMPUTED_ROWS = 160
L2_BYTES = 36 * 10**6  # keys and values that stay in the 50 MB of an H100 or H200 besides everything else


def heads_per_l2_group(q_heads: int, kv_heads: int, *, kv_bytes: int, rows: int, sizes: PrefillSizes) -> int:
    """Return the number of query heads to process together.

    This halves the number of KV heads until their keys fit in L2, as long as all thread blocks have work.

    Args:
        q_heads: Number of query heads.
        kv_heads: Number of KV heads of the layer.
        kv_bytes: Bytes of one KV head's keys and values, of all requests together.
        rows: Maximum number of rows of the schedule.
        sizes: Tile sizes of the kernel.
    """
    kv_heads_per_group = kv_heads
    tiles_per_kv_head = rows * (q_heads // kv_heads) // sizes.pack_gqa
    while (
        kv_heads_per_group % 2 == 0
        and kv_heads_per_group * kv_bytes > L2_BYTES
        and tiles_per_kv_head * (kv_heads_per_group // 2) >= 4 * sizes.ctas
    ):
        kv_heads_per_group //= 2
    return kv_heads_per_group * (q_heads // kv_heads)


def max_tiles(num_tokens: int, reqs: int, tile_tokens: int) -> int:
    """Return an upper bound on the query tiles of `reqs` requests with `num_tokens` tokens in total."""
    return (num_tokens + (ALIGN - 1) * (reqs + 1)) // tile_tokens + reqs + 1


def max_table_rows(num_tokens: int, reqs: int, *, q_heads: int, sizes: PrefillSizes) -> int:
    """Return the number of rows of a schedule's table: query tiles, and splits if they are enabled."""
    extra = max_split_outputs(q_heads, sizes) if sizes.max_splits > 1 else 0
    return max_tiles(num_tokens, reqs, sizes.tile_tokens) + extra


def make_schedule(
    query_start_loc: Int[Array, " bounds"],
    seq_lens: Int[Array, " reqs"],
    kv_start_loc: Int[Array, " reqs"] | None = None,
    *,
    num_tokens: int,
    score: Score,
    sizes: PrefillSizes,
    q_heads: int | None = None,
    has_lists: bool = False,
) -> PrefillSchedule:
    """Build the schedule of a step: query tiles for the tokens of each request, and for the padding.

    Tiles of padding have no keys. If a request's tokens do not fill its tiles, the first warpgroups of its
    first tile have no rows: with a causal mask, this is the shortest tile.

    Args:
        query_start_loc: Index of each request's first token, and one past the last token; starts with 0.
        seq_lens: Number of keys of each request.
        kv_start_loc: First key of each request if keys are packed; None for a paged cache.
        num_tokens: Number of query tokens, including padding. Static.
        score: Mask of the layer, which determines the duration of a tile. Static.
        sizes: Tile sizes of the kernel. Static.
        q_heads: Number of query heads; required if sizes.max_splits is not 1. Static.
        has_lists: Whether tile lists will be built for the schedule. Tiles then start where the request
            starts, as the blocks of masks do. Static.

    Raises:
        ValueError: If q_heads is missing, or KV splits are combined with tile lists.
    """
    may_split = sizes.max_splits > 1
    require(not (may_split and has_lists), "max_splits", "be 1 with tile lists", sizes.max_splits)
    if may_split and q_heads is None:
        raise ValueError(
            f"max_splits={sizes.max_splits} requires q_heads, the number of query heads. Pass it."
        )
    tiles = _query_tiles(
        query_start_loc, seq_lens, kv_start_loc,
        num_tokens=num_tokens, score=score, sizes=sizes, has_lists=has_lists,
    )  # fmt: skip
    built_for = schedule_key(
        num_tokens, score, sizes, q_heads, has_lists=has_lists, is_packed=kv_start_loc is not None
    )
    if q_heads is not None and may_split:
        splits = choose_num_splits(tiles.kv_tiles, tiles.is_valid, q_heads=q_heads, sizes=sizes)
        rows = max_table_rows(num_tokens, seq_lens.shape[0], q_heads=q_heads, sizes=sizes)
        kv_splits = split_kv_tiles(tiles.kv_tiles, splits, rows=rows)
        columns = [*[column[kv_splits.tile] for column in tiles.columns], *kv_splits.columns]
        table, table_rows = _table(columns, kv_splits.is_valid, kv_splits.num_tiles)
        max_split_tiles = max_split_outputs(q_heads, sizes) // 2
        split_tiles = find_split_tiles(kv_splits, table_rows, max_tiles=max_split_tiles)
        num_valid = splits.sum(dtype=jnp.int32)[None]
        return PrefillSchedule(table, num_valid, tiles.first_tiles, split_tiles, built_for)
    table, _ = _table(tiles.columns, tiles.is_valid, None if has_lists else tiles.kv_tiles)
    return PrefillSchedule(table, tiles.num_valid, tiles.first_tiles, None, built_for)


class QueryTileTable(NamedTuple):
    """The query tiles of a step in token order.

    Attributes:
        columns: Values of each tile, one array per name in COLUMNS.
        is_valid: Whether each tile exists.
        num_valid: Number of tiles.
        kv_tiles: Number of KV tiles that each query tile attends to.
        first_tiles: Index of each request's first tile, see PrefillSchedule.
    """

    columns: list[Int32[Array, " tiles"]]
    is_valid: Bool[Array, " tiles"]
    num_valid: Int32[Array, " 1"]
    kv_tiles: Int32[Array, " tiles"]
    first_tiles: Int32[Array, " bounds"]


def _query_tiles(
    query_start_loc: Int[Array, " bounds"],
    seq_lens: Int[Array, " reqs"],
    kv_start_loc: Int[Array, " reqs"] | None,
    *,
    num_tokens: int,
    score: Score,
    sizes: PrefillSizes,
    has_lists: bool,
) -> QueryTileTable:
    """Return the query tiles of a step; see make_schedule for the arguments."""
    reqs, tile = seq_lens.shape[0], sizes.tile_tokens
    # The padding after the last request is one more request, without keys.
    starts = query_start_loc.astype(jnp.int32)
    ends = jnp.concatenate([starts[1:], jnp.full((1,), num_tokens, jnp.int32)])
    keys = jnp.concatenate([seq_lens.astype(jnp.int32), jnp.zeros(1, jnp.int32)])
    kv_starts = jnp.zeros(reqs + 1, jnp.int32)
    if kv_start_loc is not None:
        kv_starts = jnp.concatenate([kv_start_loc.astype(jnp.int32), jnp.zeros(1, jnp.int32)])
    aligned = starts // ALIGN * ALIGN
    counts = jnp.where(ends > starts, (ends - aligned + tile - 1) // tile, 0)
    last_tiles = jnp.cumsum(counts, dtype=jnp.int32)
    first_tiles = last_tiles - counts
    first_rows = aligned
    if not has_lists:
        # Move tiles up so that the last one is full; whole warpgroups of the first stay empty.
        warpgroup = sizes.warpgroup_tokens
        first_rows = aligned - (counts * tile - (ends - aligned)) // warpgroup * warpgroup
    number = jnp.arange(max_tiles(num_tokens, reqs, tile), dtype=jnp.int32)
    # The request of each tile: the number of requests whose tiles end before it.
    if reqs <= FEW_REQUESTS:  # unrolled, the sum needs no separate kernel
        req = functools.reduce(
            jnp.add, [(last_tiles[i] <= number).astype(jnp.int32) for i in range(reqs + 1)]
        )
    else:
        req = (last_tiles[None, :] <= number[:, None]).sum(axis=1, dtype=jnp.int32)
    is_valid = req <= reqs
    req = jnp.minimum(req, reqs)
    first_row = first_rows[req] + (number - first_tiles[req]) * tile
    lens, position_ends = ends - starts, keys * score.rows_per_token
    first_visible_key, _ = visible_key_range(score, position_ends - lens, position_ends - 1, keys)
    begin = jnp.maximum(starts[req] - first_row, 0)
    end = jnp.minimum(ends[req] - first_row, tile)
    position = (position_ends - lens - starts)[req] + first_row
    seq_len, kv_start = keys[req], kv_starts[req]
    first_key, end_key = visible_key_range(score, position + begin, position + end - 1, seq_len)
    _, kv_tiles = overlapping_kv_tiles(first_key, end_key, kv_start, sizes.tile_kv)
    columns = [req, first_row, begin, end, position, seq_len, first_visible_key[req], kv_start]
    return QueryTileTable(columns, is_valid, last_tiles[-1:], kv_tiles, first_tiles)


def _table(
    columns: list[Int32[Array, " rows"]],
    is_valid: Bool[Array, " rows"],
    durations: Int32[Array, " rows"] | None,
) -> tuple[Int32[Array, "rows columns"], Int32[Array, " rows"]]:
    """Return a table that is TABLE_WIDTH wide, and the row of each input row. Invalid rows are 0.

    Args:
        columns: Columns of the table.
        is_valid: Whether each row is valid.
        durations: Values by which the rows are sorted, the longest first and invalid rows last; None to keep
            the order.
    """
    zero = jnp.zeros_like(columns[0])
    table = jnp.stack([*columns, *[zero] * (TABLE_WIDTH - len(columns))], axis=1)
    table = jnp.where(is_valid[:, None], table, 0)
    if durations is None:
        return table, jnp.arange(len(table), dtype=jnp.int32)
    ranks = sort_ranks(jnp.where(is_valid, -durations, 1)[None])[0]
    if len(table) > MAX_RECOMPUTED_ROWS:
        ranks = jax.lax.optimization_barrier(ranks)
    return jnp.zeros_like(table).at[ranks].set(table), ranks


def key_range(score: Score, position: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the range [first_key, end_key) of keys that the query at a position attends to.

    Unlike Score.key_range, this allows the negative positions of a tile's rows before the first key.
    """
    first_key, end_key = score.key_range(position, seq_len)
    if score.chunk_size is not None:
        end_key = jnp.where(position < 0, first_key, end_key)
    return first_key, end_key


def visible_key_range(
    score: Score, first: jax.Array, last: jax.Array, seq_len: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the range [first_key, end_key) of keys that queries at positions `first` to `last` attend to."""
    first_key, _ = key_range(score, first, seq_len)
    _, end_key = key_range(score, last, seq_len)
    first_key = jnp.maximum(first_key, 0)
    return first_key, jnp.maximum(jnp.minimum(end_key, seq_len), first_key)


def overlapping_kv_tiles(
    first_key: jax.Array, end_key: jax.Array, kv_start: jax.Array, tile_kv: int
) -> tuple[jax.Array, jax.Array]:
    """Return the first KV tile that overlaps the keys [first_key, end_key), and the number of such tiles.

    Tiles start at aligned rows, so the first one may start up to 7 rows before the request's first key.
    """
    alignment_offset = jax.lax.rem(kv_start, jnp.int32(ALIGN))
    first = jax.lax.div(first_key + alignment_offset, jnp.int32(tile_kv))
    end = jax.lax.div(end_key + alignment_offset + (tile_kv - 1), jnp.int32(tile_kv))
    return first, jnp.where(end_key > first_key, end - first, 0)


# ------------------------------------------------------------------------------------- KV splits
# A query tile with many keys takes long, and if there are few such tiles most thread blocks are idle. So the
# KV tiles of each query tile are split into contiguous parts of about equal length, each of which writes an
# unnormalized result. The number of splits is the one with which the step ends earliest, which may be 1.
# (FlashAttention-3 chooses its num_splits on the host.)

# Columns of a split in the table, after the columns of its query tile:
SPLIT_COLUMNS = (
    "skipped",  # KV tiles of the query tile before this split
    "split_tiles",  # maximum number of KV tiles in this split
    "split_output",  # index of its result in the split outputs; -1 if the query tile is not split
    "num_splits",  # number of splits of the query tile, whose results are adjacent
)
NUM_SPLITS_CANDIDATES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # numbers of splits of the longest tile
# Cost of a work tile's start and end, and of the combine kernel, in keys.
TILE_OVERHEAD_KEYS = 128
COMBINE_OVERHEAD_KEYS = 512
SPLIT_OUTPUTS_PER_CTA = 6  # work tiles with split outputs per thread block: 100 MB for heads of 256


class KvSplits(NamedTuple):
    """The splits of a step, query tile after query tile; a query tile that is not split counts as one split.

    Attributes:
        tile: Query tile of each split.
        is_valid: Whether each row holds a split.
        num_tiles: Maximum number of KV tiles in each split.
        columns: Values of each split, one array per name in SPLIT_COLUMNS.
    """

    tile: Int32[Array, " rows"]
    is_valid: Bool[Array, " rows"]
    num_tiles: Int32[Array, " rows"]
    columns: tuple[Int32[Array, " rows"], ...]


def max_split_outputs(q_heads: int, sizes: PrefillSizes) -> int:
    """Return the maximum number of split outputs per head, or per group of packed heads."""
    return max(SPLIT_OUTPUTS_PER_CTA * sizes.ctas * sizes.pack_gqa // q_heads, 2)


def choose_num_splits(
    kv_tiles: Int32[Array, " tiles"], is_valid: Bool[Array, " tiles"], *, q_heads: int, sizes: PrefillSizes
) -> Int32[Array, " tiles"]:
    """Return the number of splits of each query tile: 1 if it is not split, 0 if it is invalid.

    The duration of the step is estimated for each candidate and thread block: work tiles are assigned back
    and forth, the longest first, as PrefillTileScheduler does.

    Args:
        kv_tiles: Number of KV tiles of each query tile.
        is_valid: Whether each query tile exists.
        q_heads: Number of query heads; each, or each group of packed heads, is a work tile.
        sizes: Tile sizes of the kernel.
    """
    kv_tiles, is_valid = kv_tiles[None], is_valid[None]  # the first axis is the candidates'
    candidates = jnp.asarray([n for n in NUM_SPLITS_CANDIDATES if n <= sizes.max_splits], jnp.int32)[:, None]
    length = _ceil_div(jnp.max(jnp.where(is_valid, kv_tiles, 0), initial=1), candidates)
    splits = jnp.where(is_valid, jnp.maximum(_ceil_div(kv_tiles, length), 1), 0)
    tiles_per_split = _ceil_div(kv_tiles, jnp.maximum(splits, 1))
    num_work_tiles = splits * (q_heads // sizes.pack_gqa)
    is_earlier = sorts_before(-tiles_per_split)
    begin = jnp.where(is_earlier, num_work_tiles[:, None, :], 0).sum(axis=2, dtype=jnp.int32)
    workers = sizes.workers
    worker = jnp.arange(workers, dtype=jnp.int32)[None, :, None]
    odd_rounds = _count_assigned(begin, num_work_tiles, 2 * workers - worker, workers)
    even_rounds = _count_assigned(begin, num_work_tiles, worker + 1, workers)
    keys_per_tile = (tiles_per_split * sizes.tile_kv + TILE_OVERHEAD_KEYS)[:, None, :]
    cta_work = ((odd_rounds + even_rounds) * keys_per_tile).sum(axis=2, dtype=jnp.int32)
    num_outputs = jnp.where(splits > 1, splits, 0).sum(axis=1, dtype=jnp.int32)
    duration = cta_work.max(axis=1) + jnp.where(num_outputs > 0, COMBINE_OVERHEAD_KEYS, 0)
    fits = num_outputs <= max_split_outputs(q_heads, sizes)
    return splits[jnp.argmin(jnp.where(fits, duration, jnp.iinfo(jnp.int32).max))]


def _count_assigned(begin: Array, num_work_tiles: Array, shift: Array, workers: int) -> Array:
    """Return how many of the positions [begin, begin + num_work_tiles) are `shift` before two full rounds."""
    first = begin[:, None, :] + shift
    return _ceil_div(first + num_work_tiles[:, None, :], 2 * workers) - _ceil_div(first, 2 * workers)


def split_kv_tiles(
    kv_tiles: Int32[Array, " tiles"], splits: Int32[Array, " tiles"], *, rows: int
) -> KvSplits:
    """Split the KV tiles of all query tiles.

    Args:
        kv_tiles: Number of KV tiles of each query tile.
        splits: Number of splits of each query tile.
        rows: Number of rows of the result. Static.
    """
    ends = jnp.cumsum(splits, dtype=jnp.int32)
    output_ends = jnp.cumsum(jnp.where(splits > 1, splits, 0), dtype=jnp.int32)
    row = jnp.arange(rows, dtype=jnp.int32)
    tile = jnp.minimum((ends[None, :] <= row[:, None]).sum(axis=1, dtype=jnp.int32), len(splits) - 1)
    count = splits[tile]
    index = row - (ends[tile] - count)
    num_tiles = _ceil_div(kv_tiles[tile], jnp.maximum(count, 1))
    split_output = jnp.where(count > 1, output_ends[tile] - count + index, -1)
    return KvSplits(tile, row < ends[-1], num_tiles, (index * num_tiles, num_tiles, split_output, count))


def find_split_tiles(kv_splits: KvSplits, table_rows: Int32[Array, " rows"], *, max_tiles: int) -> SplitTiles:
    """Return the query tiles that are split.

    Args:
        kv_splits: The splits of the step.
        table_rows: Row in the schedule's table of each split.
        max_tiles: Maximum number of split query tiles. Static.
    """
    skipped, _, split_output, _ = kv_splits.columns
    is_first = kv_splits.is_valid & (split_output >= 0) & (skipped == 0)
    index = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    is_match = is_first[None, :] & (index[None, :] == jnp.arange(max_tiles, dtype=jnp.int32)[:, None])
    rows = jnp.where(is_match, table_rows[None, :], 0).sum(axis=1, dtype=jnp.int32)
    return SplitTiles(is_first.sum(dtype=jnp.int32)[None], rows)


def _ceil_div(x: Array, n: Array | int) -> Array:
    return (x + (n - 1)) // n
