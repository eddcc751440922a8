"""Tile lists: the KV tiles, or the blocks of keys, that each query tile and head attends to.

Without lists, a work tile (a query tile of one head, or of a few packed heads) loops over all KV tiles from
its first visible key to its last one. With lists, it loops over the KV tiles of its list: first the partial
tiles, which need the mask, then the full tiles. Packed heads share a list. The entries of a list may be
blocks smaller than a tile: then a tile holds any listed blocks, one after the other, and the first tile those
that are left over.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt

from pallas_kernels.list_tiles import MAX_QUERY_BLOCKS, ListedTiles, list_tiles
from pallas_kernels.ptx import tile_order
from pallas_kernels.varlen_prefill.schedule import COLUMNS, PrefillSchedule, PrefillScheduleKey
from pallas_kernels.varlen_prefill.spec import PrefillScheduleRefs

LIST_BLOCK_SIZES = (16, 32, 64)  # keys per list entry if several entries fill a tile


def num_query_blocks(tile_tokens: int, block_q: int) -> int:
    """Return the maximum number of query blocks that a query tile overlaps."""
    return (tile_tokens + block_q - 2) // block_q + 1


class PrefillTileLists(NamedTuple):
    """Work tiles of a step in processing order, with their lists of KV tiles.

    Attributes:
        table: One row per work tile: COLUMNS of its query tile, then LIST_COLUMNS, or PACKED_LIST_COLUMNS if
            several entries fill a tile. Rows from `num_valid` on are undefined.
        num_valid: Number of work tiles.
        entries: One list per row: partial tiles in descending order, then full tiles. The low bits of an
            entry are the index of the KV tile, or block. Bit QUERY_BLOCK_SHIFT + n says whether the n-th
            query block of the query tile attends to it.
        built_for: Static arguments that the schedule of these lists was built for, list_block_size and
            block_q.
    """

    table: Int32[Array, "work_tiles columns"]
    num_valid: Int32[Array, " 1"]
    entries: Int32[Array, "lists max_list"]
    built_for: PrefillScheduleKey


def schedule_refs(schedule: PrefillSchedule, lists: PrefillTileLists | None) -> PrefillScheduleRefs:
    """Return the arrays of work tiles that the kernel reads: those of the lists, or else of the schedule."""
    if lists is None:
        return PrefillScheduleRefs(schedule.table, schedule.num_valid, None)
    return PrefillScheduleRefs(lists.table, lists.num_valid, lists.entries)


def make_tile_lists(
    schedule: PrefillSchedule,
    codes: UInt[Array, "tiles heads kv_tiles"],
    *,
    sets: int = 1,
    list_block_size: int | None = None,
    block_q: int | None = None,
) -> PrefillTileLists:
    """Build the tile lists for the query tiles of a schedule.

    The entries take 4 bytes per code: 4 * n**2 * q_heads / (tile_q * list_block_size) bytes for a request of
    n tokens. With 64k tokens, 32 heads and tiles of 128 rows that is 256 MiB for blocks of 16 keys.

    Args:
        schedule: Schedule of the query tiles.
        codes: Coverage of each KV tile by each query tile and head, or group of packed heads, see
            `encode_tiles`. Codes are empty for invalid query tiles and for KV tiles outside of the request,
            and not full for tiles that contain rows outside of the request.
        sets: Number of sets of heads that are processed one after the other. Static.
        list_block_size: Number of keys per code if `codes` describe blocks of which several fill a tile of
            the schedule's sizes; None if they describe tiles. Static.
        block_q: Number of queries, in rows, per query block if `codes` say which query blocks of a tile
            attend to a KV tile; None if they do not. Static.

    Raises:
        ValueError: If a tile has more query blocks than codes have bits for.
    """
    tile_tokens = schedule.built_for.sizes.tile_tokens
    query_blocks = 1 if block_q is None else num_query_blocks(tile_tokens, block_q)
    if query_blocks > MAX_QUERY_BLOCKS:
        raise ValueError(
            f"block_q={block_q} splits a query tile of {tile_tokens} tokens into {query_blocks} blocks, but "
            f"at most {MAX_QUERY_BLOCKS} are supported. Use larger blocks."
        )
    built_for = dataclasses.replace(schedule.built_for, list_block_size=list_block_size, block_q=block_q)
    blocks_per_tile = 1 if list_block_size is None else built_for.sizes.tile_kv // list_block_size
    # Add empty tiles, so that the entries of a tile exist in a list of any length.
    num_added = max(blocks_per_tile - codes.shape[2], 0)
    if num_added:
        codes = jnp.pad(codes, ((0, 0), (0, 0), (0, num_added)))
    tiles, heads, kv_tiles = codes.shape
    listed = list_tiles(codes.reshape(tiles * heads, kv_tiles))
    first_columns, *counts = listed
    if blocks_per_tile > 1:
        num_missing, *counts = _pack_blocks(listed, blocks_per_tile)
        first_columns, kv_tiles = num_missing[:, None], -(-kv_tiles // blocks_per_tile)
    sort: Callable[..., Any] = tile_order.sort_work_tiles.by_platform
    if not tile_order.has_kernel(num_tiles=tiles * heads // sets, max_len=kv_tiles):
        sort = tile_order.sort_work_tiles.fallback
    table, num_valid = sort(
        schedule.table, schedule.num_valid, first_columns, *counts,
        columns=len(COLUMNS), sets=sets, max_len=kv_tiles,
    )  # fmt: skip
    return PrefillTileLists(table, num_valid, listed.entries, built_for)


def _pack_blocks(listed: ListedTiles, blocks_per_tile: int) -> tuple[Array, Array, Array]:
    """Return how many blocks the first tile of each list lacks, and the numbers of partial and full tiles.

    The first tile is always masked, so that missing blocks there cost least. It holds the request's last
    block if that is listed.
    """
    num_blocks = listed.num_partial + listed.num_full
    num_missing = -num_blocks & (blocks_per_tile - 1)
    num_tiles, num_partial = (
        lax.div(num + num_missing + (blocks_per_tile - 1), jnp.full_like(num, blocks_per_tile))
        for num in (num_blocks, listed.num_partial)
    )
    return num_missing, num_partial, num_tiles - num_partial
