"""Schedule of the dk/dv kernel: key tiles and the query tiles that attend to them, computed on the device."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.shared.arithmetic import floor_div, sort_ranks, sorts_before
from pallas_kernels.shared.memory import ALIGN
from pallas_kernels.shared.score import Score, ScoreMask
from pallas_kernels.varlen_backward.sizes import BackwardSizes
from pallas_kernels.varlen_prefill import PrefillSchedule
from pallas_kernels.varlen_prefill import make_schedule as make_prefill_schedule
from pallas_kernels.varlen_prefill.schedule import TABLE_WIDTH

# Columns of a key tile in the table. Query tile i of a request starts at row `first_query_row + i * tile_q`.
# Of the query tiles that attend to a key tile, those at both ends may be partial.
COLUMNS = (
    "req",
    "kv_tile",  # index of the tile in its request
    "first_key_row",
    "begin",  # first valid row of the tile, relative to first_key_row
    "end",  # one past the last valid row, relative to first_key_row
    "store_begin",  # first row that the tile writes
    "store_end",  # one past the last row that it writes
    "key_position",  # position of first_key_row in its request
    "first_query_row",
    "query_position",  # position of first_query_row in its request
    "first_position",  # position of the request's first query
    "end_position",  # one past the position of the request's last query
    "first_query_tile",  # first query tile that attends to a key
    "num_partial_first",  # number of partial query tiles at the start
    "num_partial_last",  # number of partial query tiles at the end
    "num_query_tiles",
    "zero",  # always 0; see DkDvMainloop.compute_step
)
QUERY_BYTES = 2 + 2 + 4  # per element of a query: the query, dO and dq
MAX_LENGTH, MAX_SETS = 2**17 - 1, 2**13  # largest values that the sort keys can hold
TAIL_FRACTION = 1 / 8


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BackwardScheduleKey:
    """Static arguments that a schedule was built for. Calls that use the schedule must have the same ones.

    Attributes:
        kv_tokens: Number of rows of the keys, including padding.
        kv_heads: Number of KV heads.
        mask: Causality, window, chunk size and rows per token, see Score.mask.
        sizes: Tile sizes of the kernel.
        num_tokens: Number of rows of the queries, including padding, if there is a dq kernel; else None.
        list_block_size: Number of queries per list entry if several fill a tile; None otherwise.
    """

    kv_tokens: int
    kv_heads: int
    mask: ScoreMask
    sizes: BackwardSizes
    num_tokens: int | None
    list_block_size: int | None = None


class BackwardSchedule(NamedTuple):
    """Key tiles of a call. Layers with the same mask can share them.

    Attributes:
        table: One row per key tile, in token order; COLUMNS are its columns. Rows from `num_valid` on are 0.
        num_valid: Number of key tiles.
        l2_sets: L2 set of each work tile (a key tile and a KV head). Work tiles of a set read the same or
            adjacent queries, which fit in L2 together.
        order: Work tiles in processing order without lists, each as `tile * kv_heads + kv_head`.
        dq_schedule: Schedule of the dq kernel, or None.
        built_for: Static arguments that the schedule was built for.
    """

    table: Int32[Array, "tiles columns"]
    num_valid: Int32[Array, " 1"]
    l2_sets: Int32[Array, " work_tiles"]
    order: Int32[Array, " work_tiles"]
    dq_schedule: PrefillSchedule | None
    built_for: BackwardScheduleKey


def schedule_key(
    kv_tokens: int, kv_heads: int, score: Score, sizes: BackwardSizes, num_tokens: int | None
) -> BackwardScheduleKey:
    """Return the static arguments that the schedule of a call must have been built for."""
    return BackwardScheduleKey(kv_tokens, kv_heads, score.mask, sizes, num_tokens if sizes.dq_sizes else None)


def max_tiles(kv_tokens: int, reqs: int, tile_kv: int) -> int:
    """Return an upper bound on the key tiles of `reqs` requests with `kv_tokens` keys in total."""
    return (kv_tokens + (ALIGN - 1) * reqs) // tile_kv + reqs


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
    has_lists: bool = False,
) -> BackwardSchedule:
    """Build the schedule of a call. The last tiles of a request include the padding before the next request.

    Args:
        query_start_loc: First token of each request and one past the last; starts with 0.
        seq_lens: Number of keys of each request.
        kv_start_loc: First key of each request; starts with 0 and ascends.
        kv_tokens: Number of rows of the keys, including padding. Static.
        kv_heads: Number of KV heads. Static.
        head_dim: Width of a head. Static.
        score: Mask of the layer, which determines the queries that attend to a key. Static.
        sizes: Tile sizes of the kernel. Static.
        num_tokens: Number of rows of the queries, including padding; required with a dq kernel. Static.
        has_lists: Whether lists will be built for the schedule, see varlen_prefill.make_schedule. Static.

    Raises:
        ValueError: If `sizes` has a dq kernel and num_tokens is None.
    """
    reqs, tile_kv = seq_lens.shape[0], sizes.tile_kv
    starts, keys = query_start_loc.astype(jnp.int32), seq_lens.astype(jnp.int32)
    kv_starts = kv_start_loc.astype(jnp.int32)
    # The tiles of a request cover the rows from its first key, rounded down, to the next request's.
    store_ends = jnp.concatenate([kv_starts[1:], jnp.full((1,), kv_tokens, jnp.int32)])
    first_rows = kv_starts // ALIGN * ALIGN
    num_tiles = jnp.where(store_ends > kv_starts, (store_ends - first_rows + tile_kv - 1) // tile_kv, 0)
    end_tiles = jnp.cumsum(num_tiles, dtype=jnp.int32)
    tile = jnp.arange(max_tiles(kv_tokens, reqs, tile_kv), dtype=jnp.int32)
    req = (end_tiles[None, :] <= tile[:, None]).sum(axis=1, dtype=jnp.int32)
    is_valid = req < reqs
    req = jnp.minimum(req, reqs - 1)
    kv_tile = tile - (end_tiles - num_tiles)[req]
    first_key_row = first_rows[req] + kv_tile * tile_kv

    def in_tile(row: Int[Array, " reqs"]) -> Int[Array, " tiles"]:
        return jnp.clip(row[req] - first_key_row, 0, tile_kv)

    begin, end = in_tile(kv_starts), in_tile(jnp.minimum(kv_starts + keys, store_ends))
    key_position = first_key_row - kv_starts[req]
    # A request's query tiles start at its first query, rounded down.
    end_position = keys * score.rows_per_token
    first_position = end_position - (starts[1:] - starts[:-1])
    alignment_offset = starts[:-1] % ALIGN
    query_position = first_position - alignment_offset
    query_tiles = visible_query_tiles(
        score, key_position + begin, key_position + end - 1, begin >= end, (end - begin) < tile_kv,
        bounds=(first_position[req], end_position[req]), origin=query_position[req], tile_q=sizes.tile_q,
    )  # fmt: skip
    columns = [
        req, kv_tile, first_key_row, begin, end, in_tile(kv_starts), in_tile(store_ends), key_position,
        (starts[:-1] - alignment_offset)[req], query_position[req], first_position[req], end_position[req],
        *query_tiles,
    ]  # fmt: skip
    table = jnp.stack([*columns, *[jnp.zeros_like(req)] * (TABLE_WIDTH - len(columns))], axis=1)
    table = jnp.where(is_valid[:, None], table, 0)
    l2_sets = _l2_sets(table, kv_heads, head_dim, sizes)
    lengths = jnp.repeat(table[:, COLUMNS.index("num_query_tiles")], kv_heads)
    order = order_work_tiles(lengths, l2_sets, end_tiles[-1:] * kv_heads)
    lens = query_start_loc, seq_lens, kv_start_loc
    dq_schedule = _dq_schedule(lens, score, sizes, num_tokens, has_lists=has_lists)
    built_for = schedule_key(kv_tokens, kv_heads, score, sizes, num_tokens)
    return BackwardSchedule(table, end_tiles[-1:], l2_sets, order, dq_schedule, built_for)


def _dq_schedule(
    lens: tuple[jax.Array, jax.Array, jax.Array],
    score: Score,
    sizes: BackwardSizes,
    num_tokens: int | None,
    *,
    has_lists: bool,
) -> PrefillSchedule | None:
    """Return the schedule of the dq kernel, or None."""
    if sizes.dq_sizes is None:
        return None
    if num_tokens is None:
        raise ValueError(
            "sizes.dq_sizes is set, so num_tokens is required. Pass the number of query rows as num_tokens."
        )
    return make_prefill_schedule(
        *lens, num_tokens=num_tokens, score=score, sizes=sizes.dq_sizes, has_lists=has_lists
    )


def _l2_sets(
    table: Int32[Array, "tiles columns"], kv_heads: int, head_dim: int, sizes: BackwardSizes
) -> Int32[Array, " work_tiles"]:
    """Return the L2 set of each work tile: requests and KV heads in order, `sizes.l2_bytes` per set."""
    if sizes.l2_bytes == 0:
        return jnp.zeros(len(table) * kv_heads, jnp.int32)

    def column(name: str) -> Float[Array, " tiles"]:
        return table[:, COLUMNS.index(name)].astype(jnp.float32)

    num_queries = column("end_position") - column("first_position")
    heads = jnp.arange(kv_heads, dtype=jnp.float32)
    first = kv_heads * column("first_query_row")[:, None] + heads[None, :] * num_queries[:, None]
    return (first * (QUERY_BYTES * head_dim / sizes.l2_bytes)).astype(jnp.int32).reshape(-1)


def order_work_tiles(
    lengths: Int32[Array, " work_tiles"], l2_sets: Int32[Array, " work_tiles"], num_valid: Int32[Array, " 1"]
) -> Int32[Array, " work_tiles"]:
    """Return the work tiles in processing order: set by set, and within a set the longest first.

    The shortest work tiles of all sets, an eighth of the work, come last, for thread blocks that finish
    early. Of work tiles of equal length, those of the last sets do.

    Args:
        lengths: Number of steps of each work tile.
        l2_sets: L2 set of each work tile.
        num_valid: Number of valid work tiles; invalid ones come last.
    """
    work_tile = jnp.arange(len(lengths), dtype=jnp.int32)
    is_valid = work_tile < num_valid
    lengths = jnp.where(is_valid, jnp.minimum(lengths, MAX_LENGTH), 0)
    l2_sets = jnp.minimum(l2_sets, MAX_SETS - 1)
    work = lengths.astype(jnp.float32)
    from_end = lengths * MAX_SETS + (MAX_SETS - 1 - l2_sets)
    comes_later = sorts_before(from_end[None, ::-1])[0, ::-1, ::-1]  # of equal keys, the last one sorts first
    work_from_end = work + jnp.where(comes_later, work[None, :], 0.0).sum(axis=1)
    is_tail = work_from_end <= work.sum() * TAIL_FRACTION
    group = jnp.where(is_tail, MAX_SETS, l2_sets)
    sort_keys = jnp.where(is_valid, group, MAX_SETS + 1) * (MAX_LENGTH + 1) + (MAX_LENGTH - lengths)
    return jnp.zeros_like(work_tile).at[sort_ranks(sort_keys[None])[0]].set(work_tile)


def visible_query_range(
    score: Score, position: jax.Array, first_position: jax.Array, end_position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the range [first_query, end_query) of positions of queries, in rows, that attend to a key.

    It is the counterpart of Score.key_range; both ends ascend with the position.

    Args:
        score: Mask of the layer.
        position: Position of the key, or keys.
        first_position: Position of the request's first query.
        end_position: One past the position of the request's last query.
    """
    (left, right), rows = score.window, score.rows_per_token
    if score.causal:
        right = 0 if right is None else min(right, 0)
    if rows > 1:  # both are positions of the first row of a token
        first_position, end_position = (floor_div(x, rows) for x in (first_position, end_position))
    first_query, end_query = position * 0 + first_position, position * 0 + end_position
    if right is not None:
        first_query = jnp.maximum(first_query, position - right)
    if left is not None:
        end_query = jnp.minimum(end_query, position + (1 + left))
    if score.chunk_size is not None:
        chunk = jax.lax.div(jnp.maximum(position, 0), position * 0 + score.chunk_size) * score.chunk_size
        first_query = jnp.maximum(first_query, chunk)
        end_query = jnp.minimum(end_query, chunk + score.chunk_size)
    end_query = jnp.maximum(end_query, first_query)
    return (first_query, end_query) if rows == 1 else (first_query * rows, end_query * rows)


def visible_query_tiles(
    score: Score,
    first_key: jax.Array,
    last_key: jax.Array,
    is_empty: jax.Array,
    is_partial: jax.Array,
    *,
    bounds: tuple[jax.Array, jax.Array],
    origin: jax.Array,
    tile_q: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the query tiles that attend to the keys `first_key` to `last_key` of each key tile.

    Args:
        score: Mask of the layer.
        first_key: Position of each key tile's first valid key.
        last_key: Position of each key tile's last valid key.
        is_empty: Whether each key tile has no valid key.
        is_partial: Whether some rows of each key tile are invalid, in which case all its steps need a mask.
        bounds: Position of the request's first query, and one past its last.
        origin: Position at which the request's query tiles start.
        tile_q: Queries per query tile. Static.

    Returns:
        The columns first_query_tile, num_partial_first, num_partial_last and num_query_tiles of the table.
    """
    first_query, end_full_query = visible_query_range(score, first_key, *bounds)
    begin_full_query, end_query = visible_query_range(score, last_key, *bounds)
    first = jnp.maximum(first_query - origin, 0) // tile_q
    end = (end_query - origin + tile_q - 1) // tile_q
    num = jnp.where(is_empty | (end_query <= first_query), 0, end - first)
    first_full_tile = jnp.clip((begin_full_query - origin + tile_q - 1) // tile_q - first, 0, num)
    end_full_tile = jnp.clip((end_full_query - origin) // tile_q - first, first_full_tile, num)
    first_full_tile, end_full_tile = (
        jnp.where(is_partial, num, bound) for bound in (first_full_tile, end_full_tile)
    )
    return first, first_full_tile, num - end_full_tile, num
