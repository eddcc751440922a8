"""Which tiles of queries there are, the longest first: computed on the device, once a step."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.checks import require
from pallas_kernels.shared.arithmetic import sort_ranks
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill.sizes import PrefillSizes
from pallas_kernels.varlen_prefill.splits import (
    SplitTiles,
    choose_num_splits,
    find_split_tiles,
    max_split_outputs,
    split_kv_tiles,
)

ALIGN = 8  # TMA fills shared memory in units of 8 rows, so tiles start at rows that 8 divides


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PrefillScheduleKey:
    """The static part of what a schedule is made for; it serves no other call.

    Attributes:
        num_tokens: Tokens, padding included.
        mask: Score.mask.
        sizes: The kernel's.
        q_heads: Query heads where keys may be cut, else None: it serves any.
        has_lists: Whether the call is one with lists.
        is_packed: Whether keys are packed, and not in a paged cache.
    """

    num_tokens: int
    mask: tuple[bool, tuple[int | None, int | None], int | None]
    sizes: PrefillSizes
    q_heads: int | None
    has_lists: bool
    is_packed: bool


class PrefillSchedule(NamedTuple):
    """The tiles of a step, shared by the layers of one mask.

    Attributes:
        table: One row a tile: COLUMNS; or, where keys may be cut, one a split, with splits.SPLIT_COLUMNS
            behind. The longest first, or in the order of the tokens where lists are to be made, which say how
            long it takes. Rows from `num_valid` on are 0.
        num_valid: How many of them there are.
        first_tiles: Number (in the order of the tokens) of each request's first tile; the padding behind the
            last request counts as one more request.
        split_tiles: The tiles whose keys are cut; None where none can be.
        built_for: Static.
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
    """What the schedule of a call has to be made for."""
    of_splits = q_heads if sizes.max_splits > 1 else None
    return PrefillScheduleKey(num_tokens, score.mask, sizes, of_splits, has_lists, is_packed)


# What a kernel reads of a tile:
COLUMNS = (
    "req",
    "first_row",
    "begin",  # first live row, counted from first_row
    "end",  # one past the last live row, counted likewise
    "position",  # of first_row in the request
    "seq_len",
    "seen",  # first key that some query of the request sees
    "kv_start",  # row of the request's first key where keys are packed
)
TABLE_WIDTH = 32  # 128 bytes: what TMA wants a row to be aligned to


FEW_REQUESTS = 8
# XLA compares anew for each column that it puts in place: of 258 rows that takes 8 us, alone 1.
MAX_RECOMPUTED_ROWS = 160
L2_BYTES = 36 * 10**6  # of keys and values that stay in the 50 MB of an H100 or H200 beside all else


def heads_per_l2_group(q_heads: int, kv_heads: int, *, kv_bytes: int, rows: int, sizes: PrefillSizes) -> int:
    """Query heads to read side by side: of as many kv heads as fit L2, if these keep all thread blocks busy.

    Args:
        q_heads: Query heads.
        kv_heads: Kv heads; halved until they fit.
        kv_bytes: Bytes of a kv head's keys and values, of all requests together.
        rows: Rows of the schedule, at most.
        sizes: The kernel's sizes.
    """
    at_once = kv_heads
    is_too_much = lambda: at_once * kv_bytes > L2_BYTES
    items = rows * (q_heads // kv_heads) // sizes.pack_gqa  # of a kv head
    is_enough = lambda: items * (at_once // 2) >= 4 * sizes.ctas
    while at_once % 2 == 0 and is_too_much() and is_enough():
        at_once //= 2
    return at_once * (q_heads // kv_heads)


def max_tiles(num_tokens: int, reqs: int, tile_tokens: int) -> int:
    """A bound on the number of tiles that `reqs` requests with `num_tokens` tokens together are cut into."""
    return (num_tokens + (ALIGN - 1) * (reqs + 1)) // tile_tokens + reqs + 1


def max_table_rows(num_tokens: int, reqs: int, *, q_heads: int, sizes: PrefillSizes) -> int:
    """Rows of a schedule's table: tiles, and splits besides where keys may be cut."""
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
    """Cuts each request's tokens into tiles, and the padding behind the last into tiles without keys.

    Warpgroups that a request's rows do not fill stand at the beginning of its first tile, which with a causal
    mask is the shortest.

    Args:
        query_start_loc: First token of each request and one past the last; starts with 0.
        seq_lens: Keys of each request.
        kv_start_loc: First key of each request where keys are packed; None where they are paged.
        num_tokens: Static: tokens, padding included.
        score: Static: tells how long a tile takes.
        sizes: Static.
        q_heads: Static: query heads; needed where sizes.max_splits is not 1.
        has_lists: Static: lists are to be made for the tiles, which then begin where the request does, as the
            blocks of masks do.

    Raises:
        ValueError: q_heads is needed, or keys are to be cut, or heads to share tiles, under lists.
    """
    may_cut = sizes.max_splits > 1
    require(not (may_cut and has_lists), "max_splits", "be 1 with lists", sizes.max_splits)
    is_alone = sizes.pack_gqa == 1 or not has_lists
    require(is_alone, "pack_gqa", "be 1 with lists", sizes.pack_gqa)
    require(not (may_cut and q_heads is None), "q_heads", "be given where keys may be cut", q_heads)
    lens = query_start_loc, seq_lens, kv_start_loc
    tiles = _tiles_of(*lens, num_tokens=num_tokens, score=score, sizes=sizes, has_lists=has_lists)
    built_for = schedule_key(
        num_tokens, score, sizes, q_heads, has_lists=has_lists, is_packed=kv_start_loc is not None
    )
    if q_heads is not None and may_cut:
        splits = choose_num_splits(tiles.kv_tiles, tiles.is_live, q_heads=q_heads, sizes=sizes)
        rows = max_table_rows(num_tokens, seq_lens.shape[0], q_heads=q_heads, sizes=sizes)
        cut = split_kv_tiles(tiles.kv_tiles, splits, rows=rows)
        table = _table([*[column[cut.tile] for column in tiles.columns], *cut.columns], cut.is_live)
        table, places = _longest_first(table, jnp.where(cut.is_live, -cut.num_tiles, 1))
        split_tiles = find_split_tiles(cut, places, most=max_split_outputs(q_heads, sizes) // 2)
        return PrefillSchedule(
            table, splits.sum(dtype=jnp.int32)[None], tiles.first_tiles, split_tiles, built_for
        )
    table = _table(tiles.columns, tiles.is_live)
    if not has_lists:
        table, _ = _longest_first(table, jnp.where(tiles.is_live, -tiles.kv_tiles, 1))
    return PrefillSchedule(table, tiles.num_valid, tiles.first_tiles, None, built_for)


class Tiles(NamedTuple):
    """The tiles of queries of a step, in the order of the tokens.

    Attributes:
        columns: COLUMNS.
        is_live: Whether there is such a tile.
        num_valid: How many there are.
        kv_tiles: Tiles of keys that each sees.
        first_tiles: See Schedule.
    """

    columns: list[Int32[Array, " tiles"]]
    is_live: Bool[Array, " tiles"]
    num_valid: Int32[Array, " 1"]
    kv_tiles: Int32[Array, " tiles"]
    first_tiles: Int32[Array, " bounds"]


def _tiles_of(
    query_start_loc: Int[Array, " bounds"],
    seq_lens: Int[Array, " reqs"],
    kv_start_loc: Int[Array, " reqs"] | None,
    *,
    num_tokens: int,
    score: Score,
    sizes: PrefillSizes,
    has_lists: bool,
) -> Tiles:
    """See make_schedule."""
    reqs, tile = seq_lens.shape[0], sizes.tile_tokens
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
        each = sizes.warpgroup_tokens
        first_rows = aligned - (counts * tile - (ends - aligned)) // each * each
    number = jnp.arange(max_tiles(num_tokens, reqs, tile), dtype=jnp.int32)
    req = _requests_of(number, last_tiles)
    is_live = req <= reqs
    req = jnp.minimum(req, reqs)
    first_row = first_rows[req] + (number - first_tiles[req]) * tile
    lens = ends - starts
    seen, _ = visible_key_range(score, keys - lens, keys - 1, keys)
    begin = jnp.maximum(starts[req] - first_row, 0)
    end = jnp.minimum(ends[req] - first_row, tile)
    position = (keys - lens - starts)[req] + first_row
    seq_len, kv_start = keys[req], kv_starts[req]
    low, high = visible_key_range(score, position + begin, position + end - 1, seq_len)
    _, kv_tiles = kv_tile_range(low, high, kv_start, sizes.tile_kv)
    columns = [req, first_row, begin, end, position, seq_len, seen[req], kv_start]
    return Tiles(columns, is_live, last_tiles[-1:], kv_tiles, first_tiles)


def _table(columns: list[Int32[Array, " rows"]], is_live: Array) -> Int32[Array, "rows columns"]:
    """Columns side by side, as wide as TMA wants them; rows that are not live are 0."""
    zero = jnp.zeros_like(columns[0])
    table = jnp.stack([*columns, *[zero] * (TABLE_WIDTH - len(columns))], axis=1)
    return jnp.where(is_live[:, None], table, 0)


def _requests_of(
    number: Int32[Array, " tiles"], last_tiles: Int32[Array, " bounds"]
) -> Int32[Array, " tiles"]:
    """Which request each tile is of: as many end before it."""
    if len(last_tiles) <= FEW_REQUESTS + 1:  # written out, the sum needs no kernel of its own
        return functools.reduce(
            jnp.add, [(last_tiles[i] <= number).astype(jnp.int32) for i in range(len(last_tiles))]
        )
    return (last_tiles[None, :] <= number[:, None]).sum(axis=1, dtype=jnp.int32)


def _longest_first(
    table: Int32[Array, "tiles columns"], keys: Int32[Array, " tiles"]
) -> tuple[Int32[Array, "tiles columns"], Int32[Array, " tiles"]]:
    """The rows in the order of their keys, and each one's place."""
    places = sort_ranks(keys[None])[0]
    if len(table) > MAX_RECOMPUTED_ROWS:
        places = jax.lax.optimization_barrier(places)
    return jnp.zeros_like(table).at[places].set(table), places


def key_range(score: Score, position: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Score.key_range, for positions however far before the first key."""
    low, high = score.key_range(position, seq_len)
    if score.chunk_size is not None:
        high = jnp.where(position < 0, low, high)
    return low, high


def visible_key_range(
    score: Score, first: jax.Array, last: jax.Array, seq_len: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First key that some query from position `first` to `last` sees, and one past the last key."""
    low, _ = key_range(score, first, seq_len)
    _, high = key_range(score, last, seq_len)
    low = jnp.maximum(low, 0)
    return low, jnp.maximum(jnp.minimum(high, seq_len), low)


def kv_tile_range(
    low: jax.Array, high: jax.Array, kv_start: jax.Array, tile_kv: int
) -> tuple[jax.Array, jax.Array]:
    """First tile of keys that holds some of [low, high), and how many do; 8 divides a tile's first row."""
    skew = jax.lax.rem(kv_start, jnp.int32(ALIGN))
    first = jax.lax.div(low + skew, jnp.int32(tile_kv))
    end = jax.lax.div(high + skew + (tile_kv - 1), jnp.int32(tile_kv))
    return first, jnp.where(high > low, end - first, 0)
