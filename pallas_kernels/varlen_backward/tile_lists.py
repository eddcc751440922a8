"""Which tiles of queries each tile of keys is seen by: lists that the kernel walks through, a head at a time.

What varlen_prefill's lists are, transposed: those say of a tile of queries which tiles of keys it sees.
"""

import functools
import operator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt

from pallas_kernels.list_tiles import list_tiles
from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.tile_codes import FULL_BIT, VISIBLE_BIT, encode_tiles
from pallas_kernels.varlen_backward.schedule import (
    COLUMNS,
    BackwardSchedule,
    BackwardScheduleKey,
    order_work_tiles,
)
from pallas_kernels.varlen_backward.sizes import TILE_KV, BackwardSizes
from pallas_kernels.varlen_prefill import KernelMask, PrefillTileLists


class BackwardTileLists(NamedTuple):
    """The lists of a step's items, and the order in which thread blocks take these.

    Attributes:
        order: As Schedule.order.
        entries: Of each row of the schedule and each query head, tiles of the request's queries: those that
            need a mask, then the others. What follows is garbage. Where queries have a kernel, an entry says
            from bit QUERY_BLOCK_SHIFT on which warpgroup's keys, 64 each, are seen; the other lets it pass.
        num_partial: So many of each list need a mask.
        num_full: And so many do not.
        dq_lists: The tiles of keys that each tile of queries is to see, where queries have a kernel: lists
            for BackwardSchedule.dq_schedule.
        built_for: Static: what their schedule is made for.
    """

    order: Int32[Array, " items"]
    entries: Int32[Array, "lists max_list"]
    num_partial: Int32[Array, " lists"]
    num_full: Int32[Array, " lists"]
    dq_lists: PrefillTileLists | None
    built_for: BackwardScheduleKey


class BackwardMask(NamedTuple):
    """Which pairs see each other in tiles that are listed as seen in part.

    Attributes:
        dkdv_mask: As it is asked where a row is a key: of KeyRows.
        dq_mask: As varlen_prefill has it, where queries have a kernel.
    """

    dkdv_mask: KernelMask
    dq_mask: KernelMask | None = None


class QueryTiles(NamedTuple):
    """The tiles of queries that codes are of, in the order of the tokens: as of varlen_prefill's schedule.

    Attributes:
        first_tiles: Number of each request's first tile.
        begin: First live row of each tile.
        end: One past its last.
    """

    first_tiles: Int32[Array, " bounds"]
    begin: Int32[Array, " tiles"]
    end: Int32[Array, " tiles"]


def make_tile_lists(
    schedule: BackwardSchedule,
    query_tiles: QueryTiles,
    codes: UInt[Array, "query_tiles q_heads kv_tiles"],
    *,
    kv_heads: int,
    sizes: BackwardSizes,
) -> BackwardTileLists:
    """Lists for the tiles of keys of a schedule.

    Args:
        schedule: The tiles of keys.
        query_tiles: The tiles of queries: each request's begin where its first query stands, at the last row
            before it that 8 divides, `sizes.tile_q` apart.
        codes: `encode_tiles` of each tile of queries and each tile of its request's keys, which begin
            likewise, `keys_of_code(sizes)` apart: no tile is seen where a tile of queries is not live or a
            tile of keys lies outside the request.
        kv_heads: Static.
        sizes: Static.
    """
    of_keys = _transposed(schedule, query_tiles, codes, sizes)
    tiles, heads, max_list = of_keys.shape
    listed = list_tiles(of_keys.reshape(tiles * heads, max_list))
    lengths = (listed.num_partial + listed.num_full).reshape(tiles * kv_heads, -1).sum(axis=1)
    order = order_work_tiles(lengths.astype(jnp.int32), schedule.sets, schedule.num_valid * kv_heads)
    return BackwardTileLists(order, *listed, dq_lists=None, built_for=schedule.built_for)


def keys_per_code(sizes: BackwardSizes) -> int:
    """How many keys make_lists is told of at once: a warpgroup's where these need not wait for each other."""
    return TILE_KV if sizes.dq_sizes is None else UNIT


def _transposed(
    schedule: BackwardSchedule, query_tiles: QueryTiles, codes: Array, sizes: BackwardSizes
) -> UInt[Array, "key_tiles q_heads query_tiles"]:
    """Codes of each tile of keys and each tile of its request's queries."""
    num, num_keys = codes.shape[0], keys_per_code(sizes)
    column = lambda name: schedule.table[:, COLUMNS.index(name)]
    first, behind = (query_tiles.first_tiles[column("req") + more] for more in (0, 1))
    tile = first[:, None] + jnp.arange(num, dtype=jnp.int32)[None, :]
    is_mine = tile < behind[:, None]
    is_mine &= (jnp.arange(len(schedule.table)) < schedule.num_valid)[:, None]
    tile = jnp.minimum(tile, num - 1)
    is_full = ((query_tiles.end - query_tiles.begin) == sizes.tile_q)[tile]

    def of_part(begin: int) -> tuple[Array, Array]:
        """Whether some keys, and all, from row `begin` on are seen: [key_tiles, query_tiles, q_heads]."""
        number = (column("number") * TILE_KV + begin) // num_keys
        is_there = is_mine & (number < codes.shape[2])[:, None]
        is_whole = (column("begin") <= begin) & (column("end") >= begin + num_keys)
        found = codes[tile, :, jnp.minimum(number, codes.shape[2] - 1)[:, None]]
        has = lambda bit, where: (found & (1 << bit) != 0) & where[:, :, None]
        return has(VISIBLE_BIT, is_there), has(FULL_BIT, is_full & is_whole[:, None])

    some, every = zip(*map(of_part, range(0, TILE_KV, num_keys)), strict=True)
    whole = functools.reduce(operator.and_, (~a | b for a, b in zip(some, every, strict=True)))
    kept = encode_tiles(functools.reduce(operator.or_, some), whole, some if len(some) > 1 else ())
    return kept.transpose(0, 2, 1)
