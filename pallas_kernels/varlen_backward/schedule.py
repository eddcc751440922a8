"""Which tiles of keys there are, and which queries see them, the longest first: computed on the device."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from pallas_kernels.checks import require
from pallas_kernels.shared.arithmetic import sort_ranks
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_backward.sizes import TILE_KV, BackwardSizes
from pallas_kernels.varlen_prefill import PrefillSchedule
from pallas_kernels.varlen_prefill import make_schedule as prefill_schedule
from pallas_kernels.varlen_prefill.schedule import ALIGN, TABLE_WIDTH

# What a kernel reads of a tile of keys. Queries stand in tiles, too; tile i of a request's begins at row
# `first_query_row + i * tile_q`. Of the tiles that see a key, those at either end may not see all of them.
COLUMNS = (
    "req",
    "number",  # of the tile, of the request's
    "first_key_row",
    "begin",  # first live row of the tile, counted from first_key_row
    "end",  # one past the last live row, counted likewise
    "store_begin",  # the rows that are the tile's to write
    "store_end",
    "key_position",  # of first_key_row in the request
    "first_query_row",
    "query_position",  # of first_query_row in the request
    "first_position",  # of the request's first query
    "seq_len",
    "first_tile",  # of queries, of those that see a key
    "num_low",  # such tiles at the beginning, to be masked
    "num_high",  # and at the end
    "num",  # of all
    "zero",  # always 0: see products.Work
)
QUERY_BYTES = 2 + 2 + 4  # of an element of a query: itself, its output's gradient, its own
MAX_LENGTH, MAX_SETS = 2**17 - 1, 2**13  # that an order tells apart
TAIL_FRACTION = 1 / 8


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BackwardScheduleKey:
    """The static part of what a schedule is made for; it serves no other call.

    Attributes:
        kv_tokens: Rows of the keys, padding included.
        kv_heads: Kv heads.
        mask: Score.mask.
        sizes: The kernel's.
        num_tokens: Rows of the queries, padding included, where these have a kernel of their own; else None.
    """

    kv_tokens: int
    kv_heads: int
    mask: tuple[bool, tuple[int | None, int | None], int | None]
    sizes: BackwardSizes
    num_tokens: int | None


class BackwardSchedule(NamedTuple):
    """The tiles of keys of a step, shared by the layers of one mask.

    Attributes:
        table: One row a tile: COLUMNS, in the order of the keys. Rows from `num_valid` on are 0.
        num_valid: How many tiles there are.
        sets: Of each item, a tile of keys and a kv head: which items read the same queries, or neighbours of
            them, so that L2 holds what a set reads.
        order: The items in the order in which thread blocks take them, each as `tile * kv_heads + kv_head`.
        dq_schedule: The tiles of queries, of a kernel of their own; or None.
        built_for: Static.
    """

    table: Int32[Array, "tiles columns"]
    num_valid: Int32[Array, " 1"]
    sets: Int32[Array, " items"]
    order: Int32[Array, " items"]
    dq_schedule: PrefillSchedule | None
    built_for: BackwardScheduleKey


def schedule_key(
    kv_tokens: int, kv_heads: int, score: Score, sizes: BackwardSizes, num_tokens: int | None
) -> BackwardScheduleKey:
    """What the schedule of a call has to be made for."""
    return BackwardScheduleKey(kv_tokens, kv_heads, score.mask, sizes, num_tokens if sizes.dq_sizes else None)


def max_tiles(kv_tokens: int, reqs: int) -> int:
    """A bound on the number of tiles that `reqs` requests with `kv_tokens` keys together are cut into."""
    return (kv_tokens + (ALIGN - 1) * reqs) // TILE_KV + reqs


def make_schedule(
    query_start_loc: Int[Array, " bounds"],
    seq_lens: Int[Array, " reqs"],
    kv_start_loc: Int[Array, " reqs"],
    *,
    kv_tokens: int,
    kv_heads: int,
    head_dim: int,
    score: Score,
    sizes: BackwardSizes,
    num_tokens: int | None = None,
) -> BackwardSchedule:
    """Cuts each request's keys into tiles, with what follows them up to the next request's.

    Args:
        query_start_loc: First token of each request and one past the last; starts with 0.
        seq_lens: Keys of each request.
        kv_start_loc: First key of each request; starts with 0 and ascends.
        kv_tokens: Static: rows of the keys, padding included.
        kv_heads: Static.
        head_dim: Static: width of a head.
        score: Static: tells which queries see a key.
        sizes: Static.
        num_tokens: Static: rows of the queries, padding included. Where these have a kernel of their own.
    """
    reqs = seq_lens.shape[0]
    starts, keys = query_start_loc.astype(jnp.int32), seq_lens.astype(jnp.int32)
    kv_starts = kv_start_loc.astype(jnp.int32)
    store_ends = jnp.concatenate([kv_starts[1:], jnp.full((1,), kv_tokens, jnp.int32)])
    aligned = kv_starts // ALIGN * ALIGN
    counts = jnp.where(store_ends > kv_starts, (store_ends - aligned + TILE_KV - 1) // TILE_KV, 0)
    last_tiles = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(max_tiles(kv_tokens, reqs), dtype=jnp.int32)
    req = (last_tiles[None, :] <= number[:, None]).sum(axis=1, dtype=jnp.int32)
    is_live = req < reqs
    req = jnp.minimum(req, reqs - 1)
    nth = number - (last_tiles - counts)[req]
    first_key_row = aligned[req] + nth * TILE_KV
    in_tile = lambda row: jnp.clip(row[req] - first_key_row, 0, TILE_KV)
    begin, end = in_tile(kv_starts), in_tile(jnp.minimum(kv_starts + keys, store_ends))
    key_position = first_key_row - kv_starts[req]
    first_position = keys - (starts[1:] - starts[:-1])
    skew = starts[:-1] % ALIGN
    query_position = first_position - skew
    tiles = visible_query_tiles(
        score, key_position + begin, key_position + end - 1, begin >= end, (end - begin) < TILE_KV,
        bounds=(first_position[req], keys[req]), origin=query_position[req], tile_q=sizes.tile_q,
    )  # fmt: skip
    columns = [
        req, nth, first_key_row, begin, end, in_tile(kv_starts), in_tile(store_ends), key_position,
        (starts[:-1] - skew)[req], query_position[req], first_position[req], keys[req], *tiles,
    ]  # fmt: skip
    table = jnp.stack([*columns, *[jnp.zeros_like(req)] * (TABLE_WIDTH - len(columns))], axis=1)
    live = jnp.where(is_live[:, None], table, 0)
    sets = _sets(live, kv_heads, head_dim, sizes)
    order = order_work_tiles(
        jnp.repeat(live[:, COLUMNS.index("num")], kv_heads), sets, last_tiles[-1:] * kv_heads
    )
    queries = _schedule_of_queries((query_start_loc, seq_lens, kv_start_loc), score, sizes, num_tokens)
    built_for = schedule_key(kv_tokens, kv_heads, score, sizes, num_tokens)
    return BackwardSchedule(live, last_tiles[-1:], sets, order, queries, built_for)


def _schedule_of_queries(
    lens: tuple[jax.Array, jax.Array, jax.Array], score: Score, sizes: BackwardSizes, num_tokens: int | None
) -> PrefillSchedule | None:
    """BackwardSchedule.dq_schedule."""
    if sizes.dq_sizes is None:
        return None
    require(num_tokens is not None, "num_tokens", "be given with sizes.dq_sizes", num_tokens)
    return prefill_schedule(*lens, num_tokens=num_tokens or 0, score=score, sizes=sizes.dq_sizes)


def _sets(
    table: Int32[Array, "tiles columns"], kv_heads: int, head_dim: int, sizes: BackwardSizes
) -> Int32[Array, " items"]:
    """Schedule.sets: one request and kv head after the other, as many as read `sizes.l2_bytes` together."""
    if sizes.l2_bytes == 0:
        return jnp.zeros(len(table) * kv_heads, jnp.int32)
    column = lambda name: table[:, COLUMNS.index(name)].astype(jnp.float32)
    num_queries = column("seq_len") - column("first_position")
    heads = jnp.arange(kv_heads, dtype=jnp.float32)
    first = kv_heads * column("first_query_row")[:, None] + heads[None, :] * num_queries[:, None]
    return (first * (QUERY_BYTES * head_dim / sizes.l2_bytes)).astype(jnp.int32).reshape(-1)


def order_work_tiles(
    lengths: Int32[Array, " items"], sets: Int32[Array, " items"], num_valid: Int32[Array, " 1"]
) -> Int32[Array, " items"]:
    """Schedule.order: set by set, of each the longest first; but the shortest of all items last.

    Thread blocks that are done early take of those, an eighth of all the work.

    Args:
        lengths: Steps of each item.
        sets: Schedule.sets.
        num_valid: How many items there are; the others come behind.
    """
    number = jnp.arange(len(lengths), dtype=jnp.int32)
    is_live = number < num_valid
    lengths = jnp.where(is_live, jnp.minimum(lengths, MAX_LENGTH), 0)
    of_work = lengths.astype(jnp.float32)
    up_to_mine = jnp.where(lengths[None, :] <= lengths[:, None], of_work[None, :], 0.0).sum(axis=1)
    is_last = up_to_mine <= of_work.sum() * TAIL_FRACTION
    group = jnp.where(is_last, MAX_SETS, jnp.minimum(sets, MAX_SETS - 1))
    keys = jnp.where(is_live, group, MAX_SETS + 1) * (MAX_LENGTH + 1) + (MAX_LENGTH - lengths)
    return jnp.zeros_like(number).at[sort_ranks(keys[None])[0]].set(number)


def visible_query_range(
    score: Score, position: jax.Array, first_position: jax.Array, seq_len: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First query that sees the key at `position`, and one past the last.

    What Score.key_range is to queries; both ends ascend with the position.

    Args:
        score: The layer.
        position: Of the key, or keys.
        first_position: Of the request's first query.
        seq_len: One past its last query, and its last key.
    """
    left, right = score.window
    if score.causal:
        right = 0 if right is None else min(right, 0)
    low, high = position * 0 + first_position, position * 0 + seq_len
    if right is not None:
        low = jnp.maximum(low, position - right)
    if left is not None:
        high = jnp.minimum(high, position + (1 + left))
    if score.chunk_size is not None:
        chunk = jax.lax.div(jnp.maximum(position, 0), position * 0 + score.chunk_size) * score.chunk_size
        low, high = jnp.maximum(low, chunk), jnp.minimum(high, chunk + score.chunk_size)
    return low, jnp.maximum(high, low)


def visible_query_tiles(
    score: Score,
    first_key: jax.Array,
    last_key: jax.Array,
    is_dead: jax.Array,
    is_cut: jax.Array,
    *,
    bounds: tuple[jax.Array, jax.Array],
    origin: jax.Array,
    tile_q: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The last four of COLUMNS: tiles of queries that see some of the keys from `first_key` to `last_key`.

    Args:
        score: The layer.
        first_key: Position of each tile's first live key.
        last_key: Of its last.
        is_dead: Whether it has none.
        is_cut: Whether some of its rows are not live: then every step masks.
        bounds: Position of the request's first query, and one past its last.
        origin: Position at which its tiles of queries begin.
        tile_q: Static.
    """
    low, full_high = visible_query_range(score, first_key, *bounds)
    full_low, high = visible_query_range(score, last_key, *bounds)
    first = jnp.maximum(low - origin, 0) // tile_q
    end = (high - origin + tile_q - 1) // tile_q
    num = jnp.where(is_dead | (high <= low), 0, end - first)
    low_edge = jnp.clip((full_low - origin + tile_q - 1) // tile_q - first, 0, num)
    high_edge = jnp.clip((full_high - origin) // tile_q - first, low_edge, num)
    low_edge, high_edge = (jnp.where(is_cut, num, edge) for edge in (low_edge, high_edge))
    return first, low_edge, num - high_edge, num
