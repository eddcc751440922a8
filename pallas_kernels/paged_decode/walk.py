"""A thread block's way over its span of the work: the requests in it, and what of each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.list_tiles import PART_SHIFT
from pallas_kernels.paged_decode.span_start import span_start
from pallas_kernels.paged_decode.tiles import Tiles
from pallas_kernels.shared.head_dims import HeadCut
from pallas_kernels.shared.score import Score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static about a call besides the tiles.

    Attributes:
        kv_heads: Key/value heads.
        row_tiles: Tiles that one kv head's query rows are cut into.
        rows: Live query rows of a tile: decode token major, then query head; the last tile may hold fewer.
        group: Query heads of a kv head.
        query_len: Queries of a request.
        block_size: Tokens of a cache block.
        is_hnd: Blocks are [kv_heads, block_size, head_dim].
        cut: The cut of head_dim.
        tile_q: `rows` rounded up for the tensor core.
        listed: Keys of a sparse block, where each request and kv head has its own list of them; None = every
            key is visited. With lists, "a request" of the schedule, the queries and the results is a kv head
            of a request, so that lists of any lengths keep all thread blocks busy.
        lists_tell_heads: Each entry of a list says which query heads of the group see the block.
    """

    kv_heads: int
    row_tiles: int
    rows: int
    group: int
    query_len: int
    block_size: int
    is_hnd: bool
    cut: HeadCut
    tile_q: int
    listed: int | None
    lists_tell_heads: bool = False

    @property
    def head_tiles(self) -> int:
        """Tiles of query rows of a request of the schedule."""
        return self.row_tiles if self.listed else self.kv_heads * self.row_tiles

    def piece(self, tile_kv: int) -> int:
        """Keys of a tile that are neighbours in the request."""
        return min(self.listed or tile_kv, tile_kv)

    def request_of(self, row: Any, head_tile: Any) -> tuple[Any, Any]:
        """The request, and the tile of query rows in it, of a row of the schedule."""
        if not self.listed:
            return row, head_tile
        request = lax.div(row, jnp.int32(self.kv_heads))
        return request, (row - request * self.kv_heads) * self.row_tiles + head_tile


@dataclasses.dataclass(frozen=True)
class Segment:
    """The part of one span that lies in one request; traced scalars."""

    row: Any  # of the schedule, the queries and the results
    request: Any  # of the block table
    heads: Any  # tile of query rows in the request
    kv_head: Any
    seq_len: Any
    low: Any  # first key that some query sees
    high: Any  # one past the last
    first_tile: Any
    num_tiles: Any
    partial: Any  # where a partial result goes
    num_units: Any  # 0: nothing of the request is in this span
    is_whole: Any  # nothing of it is in another span
    num_listed: Any  # sparse blocks of its list, or None


@dataclasses.dataclass(frozen=True)
class Place:
    """Which keys a tile holds: `piece` neighbours from each of `firsts`, which ascend.

    `heads` has a bit for each query head of the group that sees the piece; empty where all do.
    """

    firsts: tuple[Any, ...]
    heads: tuple[Any, ...]
    piece: int

    def keys(self, rows: Any) -> Any:
        """The key of each row of the tile."""
        return rows + self._of_rows(rows, [first - i * self.piece for i, first in enumerate(self.firsts)])

    def heads_of(self, rows: Any) -> Any:
        """The bits of the piece that each row of the tile is in."""
        return self._of_rows(rows, self.heads)

    def _of_rows(self, rows: Any, of_pieces: Sequence[Any]) -> Any:
        value = of_pieces[0]
        for i, of_piece in enumerate(of_pieces[1:], 1):
            value = jnp.where(rows >= i * self.piece, of_piece, value)
        return value

    def reaches_out(self, low: Any, high: Any) -> Any:
        """Whether a key is not in [low, high)."""
        return (self.firsts[0] < low) | (self.firsts[-1] + self.piece > high)


NOWHERE = 1 << 30  # a key past every request's end


def entries_of(segment: Segment, tile_index: Any, ids_g: Any, tile_kv: int, shape: Shape) -> tuple[Any, ...]:
    """What a segment's list says of a tile's keys, as it stands there; without lists the tile's first key.

    A list is in global memory: who asks a tile or more before place_of needs the answer does not wait for it.

    Args:
        segment: The segment.
        tile_index: Counts its tiles; may be past the last.
        ids_g: [reqs * kv_heads, max_listed]: sparse blocks, or None.
        tile_kv: Keys of a tile.
        shape: The call's static sizes.
    """
    if shape.listed is None:
        return ((segment.first_tile + tile_index) * tile_kv,)
    last = jnp.maximum(segment.num_listed - 1, 0)
    numbers, _ = _listed_at(segment, tile_index, tile_kv, shape)
    return tuple(ids_g[segment.row, jnp.minimum(number, last)] for number in numbers)


def place_of(
    segment: Segment, tile_index: Any, entries: tuple[Any, ...], tile_kv: int, shape: Shape
) -> Place:
    """The keys of a tile of a segment; for `entries` see entries_of."""
    piece = shape.piece(tile_kv)
    if shape.listed is None:
        return Place(entries, (), piece)
    numbers, inside = _listed_at(segment, tile_index, tile_kv, shape)
    firsts, heads = [], []
    for number, entry in zip(numbers, entries, strict=True):
        if shape.lists_tell_heads:
            heads.append(lax.shift_right_logical(entry, jnp.int32(PART_SHIFT)))
            entry = entry & ((1 << PART_SHIFT) - 1)
        firsts.append(jnp.where(number < segment.num_listed, entry * shape.listed + inside, NOWHERE))
    return Place(tuple(firsts), tuple(heads), piece)


def _listed_at(segment: Segment, tile_index: Any, tile_kv: int, shape: Shape) -> tuple[list[Any], Any]:
    """Where in the list the sparse blocks of a tile stand, and where in each of them the tile begins."""
    assert shape.listed is not None
    nth, piece = segment.first_tile + tile_index, shape.piece(tile_kv)
    tiles_per_block, blocks_per_tile = max(shape.listed // tile_kv, 1), tile_kv // piece
    block = lax.div(nth, jnp.int32(tiles_per_block))
    inside = lax.rem(nth, jnp.int32(tiles_per_block)) * piece
    return [block * blocks_per_tile + i for i in range(blocks_per_tile)], inside


def walk(
    refs: Any,
    tiles: Tiles,
    shape: Shape,
    score: Score,
    slot: Any,
    head_tile: Any,
    visit: Callable,
    *,
    slots: int,
    is_interpreted: bool,
) -> Any:
    """Calls `state = visit(segment, state)` for each request of a span; `state` starts as two zeros."""
    len_g, ends_g, counts_g = refs
    reqs = ends_g.shape[0]
    by_row = len_g if counts_g is None else counts_g
    begin = span_start(ends_g, by_row, slot, slots=slots, is_interpreted=is_interpreted)
    stop = jnp.minimum(begin.unit + begin.span, begin.total)
    tiles_per_unit = tiles.unit // tiles.tile_kv
    zero = slot * 0

    def read(row: Any) -> tuple[Any, ...]:
        """Where a request ends, its keys and the length of its list."""
        counts = () if counts_g is None else (counts_g[row],)
        return ends_g[row], len_g[shape.request_of(row, head_tile)[0]], *counts

    def visit_row(_: Any, carry: Any) -> Any:
        unit, row, start, (end, seq_len, *counts), state = carry
        following_row = jnp.minimum(row + 1, reqs - 1)
        following = read(following_row)  # a request ahead: its latency passes during the visit
        request, heads = shape.request_of(row, head_tile)
        low, high = score.row_range(seq_len, shape.query_len)
        left = jnp.maximum(jnp.minimum(end, stop) - unit, 0)
        units = left if tiles.split_kv is None else jnp.minimum(left, 1)
        num_listed = counts[0] if counts else None
        low_tile = zero if shape.listed else lax.div(low, jnp.int32(tiles.tile_kv))
        end_key = high if num_listed is None else num_listed * shape.listed
        high_tile = lax.div(end_key + (tiles.tile_kv - 1), jnp.int32(tiles.tile_kv))
        first_unit = lax.div(low_tile, jnp.int32(tiles_per_unit)) + (unit - start)
        first = jnp.maximum(first_unit * tiles_per_unit, low_tile)
        last = jnp.minimum((first_unit + units) * tiles_per_unit, high_tile)
        partial = row + slot if tiles.split_kv is None else unit
        num_tiles = jnp.where(high > low, last - first, 0)
        is_whole = units == end - start
        segment = Segment(
            row=row,
            request=request,
            heads=heads,
            kv_head=lax.div(heads, jnp.int32(shape.row_tiles)),
            seq_len=seq_len,
            low=low,
            high=high,
            first_tile=first,
            num_tiles=num_tiles,
            partial=partial,
            num_units=units,
            is_whole=is_whole,
            num_listed=num_listed,
        )
        state = visit(segment, state)
        unit = unit + units
        goes_on = (unit >= end) & (following_row > row)
        pick = lambda new, old: jnp.where(goes_on, new, old)
        ahead = tuple(pick(*both) for both in zip(following, (end, seq_len, *counts), strict=True))
        return unit, pick(following_row, row), pick(end, start), ahead, state

    first_row = jnp.minimum(begin.row, reqs - 1)
    visits = jnp.minimum(begin.next_row, reqs - 1) - first_row + 1  # a count known ahead: warps have no while
    if tiles.split_kv is not None:
        visits = visits + jnp.maximum(stop - begin.unit, 0)
    first: tuple[Any, ...] = begin.end, begin.value
    if counts_g is not None:
        first = begin.end, len_g[shape.request_of(first_row, head_tile)[0]], begin.value
    carry = begin.unit, first_row, begin.start, first, (zero, zero)
    return lax.fori_loop(0, visits, visit_row, carry)[-1]
