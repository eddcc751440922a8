"""Sorts work tiles into processing order, longest processing time first, by a counting sort.

The heads are divided into sets, and each thread block sorts one set. Each warp counts how many of its work
tiles have each list length. Sums of the counts over warps and lengths give the positions of its work tiles.
In XLA, a comparison of all pairs took 7 us for 8 sets of 1,028 tiles and 186 us for 8,196, and two more
kernels moved the rows.

    register  contents
    --------  ------------------------------------------------------------------
    w<n>      counts of a length by warps 2n (low half) and 2n + 1 (high half)
    c<n>      column n of the query tile's row of the table
    live      number of valid query tiles
    first     index of the lane's first work tile in the set
    round     number of the round; a lane has one work tile per round
    item      index of the lane's work tile in the set
    tile      query tile of the work tile
    head      query head of the work tile
    list      row of the work tile's list in `entries`
    entry     first entry of the list
    len       number of tiles in the list
    partial   number of partial tiles in the list
    bin       index of the length's counts, in sorting order; -1 for invalid work tiles
    mask      lanes of the warp whose work tile is in the same bin
    count     number of these lanes
    rank      number of these lanes before this one; later the row of the work tile
    base      first row of the set in the sorted table
    y         shared-memory address of the warp's count of the bin
    half      a count of 16 bits
    is_live   predicate: whether the work tile is valid
    at        address of an array element

The registers lane, warp, x, sum, top, own, before, p and is_first are those of `launch`; q is temporary.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.launch import THREADS, WARPS, block_barrier, block_exclusive_sum, launch_ptx
from pallas_kernels.shared.arithmetic import sort_ranks

MAX_TILES_PER_SET = 2**16 - 1  # counts have 16 bits
MAX_LEN = 2800  # longest list for which the counts of all lengths fit into shared memory
CTAS = 128  # each thread block sorts its whole set, and writes some of the rows
COUNT_BYTES = 2 * WARPS  # bytes of a length's counts: 16 bits per warp
WORDS = tuple(f"w{n}" for n in range(COUNT_BYTES // 4))  # registers for the counts of a length
STRIDE = COUNT_BYTES + 16  # bytes between lengths: adjacent ones lie in different banks


def has_kernel(*, num_tiles: int, max_len: int) -> bool:
    """Return whether the kernel can sort sets of `num_tiles` work tiles with lists of `max_len` tiles."""
    return num_tiles <= MAX_TILES_PER_SET and max_len <= MAX_LEN


def _sort_work_tiles(
    table: jax.Array,
    num_live: jax.Array,
    entries: jax.Array,
    num_partial: jax.Array,
    num_full: jax.Array,
    *,
    columns: int,
    sets: int,
    max_len: int,
) -> tuple[jax.Array, jax.Array]:
    tiles, heads = table.shape[0], entries.shape[0] // table.shape[0]

    def by_set(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(tiles, sets, -1), 0, 1).reshape(sets, -1)

    nums = num_partial + num_full
    lens = by_set(nums)
    is_valid = jnp.arange(tiles, dtype=jnp.int32)[:, None] < num_live[0]
    is_valid = by_set(jnp.broadcast_to(is_valid, (tiles, heads)))
    # Longest first, in every other set last, so that lengths change little from one tile to the next.
    set_index = jnp.arange(sets, dtype=jnp.int32)[:, None]
    keys = jnp.where((sets - 1 - set_index) % 2 == 0, -lens, lens)
    per_set = num_live[0] * (heads // sets)
    rows = sort_ranks(jnp.where(is_valid, keys, max_len + 1)) + set_index * per_set
    rows = jnp.where(is_valid, rows, tiles * heads)
    rows = jnp.swapaxes(rows.reshape(sets, tiles, -1), 0, 1).reshape(tiles * heads)
    lists = jnp.arange(tiles * heads, dtype=jnp.int32)
    query_tile = jnp.repeat(table[:, :columns], heads, axis=0)
    list_info = jnp.stack([lists % heads, lists, entries[:, 0], nums, num_partial], axis=-1)
    work_tiles = jnp.concatenate([query_tile, list_info], axis=-1)
    work_tiles = jnp.pad(work_tiles, ((0, 0), (0, table.shape[1] - work_tiles.shape[-1])))
    return jnp.zeros_like(work_tiles).at[rows].set(work_tiles, mode="drop"), num_live * heads


@with_fallback(_sort_work_tiles)
def sort_work_tiles(
    table: jax.Array,
    num_live: jax.Array,
    entries: jax.Array,
    num_partial: jax.Array,
    num_full: jax.Array,
    *,
    columns: int,
    sets: int,
    max_len: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the sorted table of work tiles and the number of its valid rows; see PrefillTileLists.

    Args:
        table: Query tiles, int32 [tiles, width].
        num_live: Number of valid query tiles, [1].
        entries: Lists of KV tiles, int32 [tiles * heads, max_list]; only their first elements are read.
        num_partial: Number of partial tiles of each list, [tiles * heads].
        num_full: Number of full tiles of each list, [tiles * heads].
        columns: Static: number of used columns of the table.
        sets: Static: number of sets into which the heads are divided.
        max_len: Static: maximum number of tiles of a list.
    """
    tiles, width = table.shape
    lists, stride = entries.shape
    heads = lists // tiles
    dims = TileOrderDims(
        tiles=tiles,
        width=width,
        columns=columns,
        max_len=max_len,
        stride=stride,
        heads=heads,
        per_set=heads // sets,
        sets=sets,
        writers=max(CTAS // sets, 1),
    )

    items, num_items = launch_ptx(
        program(dims),
        (table, num_live, entries, num_partial, num_full),
        name="sort_work_tiles",
        out_type=(jax.ShapeDtypeStruct((lists, width), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)),
        words=dims.totals_offset // 4 + WARPS,
        grid=(sets, dims.writers),
    )
    return items, num_items


class TileOrderDims(NamedTuple):
    """Static sizes of a sort.

    Attributes:
        tiles: Number of query tiles.
        width: Number of columns of a row.
        columns: Number of used columns of a row.
        max_len: Maximum number of tiles of a list.
        stride: Number of elements of a row of the entries.
        heads: Number of work tiles of a query tile.
        per_set: Number of work tiles of a query tile in one set.
        sets: Number of sets of heads.
        writers: Number of thread blocks per set. Each of them sorts the set and writes some of the rows.
    """

    tiles: int
    width: int
    columns: int
    max_len: int
    stride: int
    heads: int
    per_set: int
    sets: int
    writers: int

    @property
    def rounds(self) -> int:
        """Number of rounds. In each round, a warp processes 32 consecutive work tiles, one per lane."""
        return -(-self.tiles * self.per_set // THREADS)

    @property
    def totals_offset(self) -> int:
        """Byte offset of the warps' totals in shared memory; the counts of all lengths lie before it."""
        return (self.max_len + 1) * STRIDE


def program(dims: TileOrderDims) -> str:
    """Return the PTX code that each thread executes.

    Operands: $0 to $6 are the addresses of the table, the number of valid tiles, the entries, the two counts,
    the sorted table and its length. $7 is the address of shared memory. $8 to $10 are the indices of the set,
    the writer and the thread.
    """
    lines = [
        f".reg .b32 {', '.join([*WORDS, *(f'c{n}' for n in range(dims.columns))])};",
        ".reg .b32 lane, warp, x, y, sum, top, own, before, live, first, round, item, tile, head, list;",
        ".reg .b32 entry, len, partial, bin, mask, rank, count, base, zero;",
        ".reg .b64 at; .reg .b16 half; .reg .pred p, q, is_first, is_live;",
        "mov.b32 zero, 0; and.b32 lane, $10, 31; shr.u32 warp, $10, 5; setp.eq.u32 is_first, lane, 0;",
        "ld.global.b32 live, [$1]; mad.lo.u32 y, $10, 16, $7;",
        *_clear_counts(dims.totals_offset),
        f"mul.lo.u32 first, warp, {dims.rounds * 32}; add.u32 first, first, lane;",
        *block_barrier(),
        # Count the warp's work tiles of each length: the first lane of those with equal lengths adds their
        # number.
        "mov.b32 round, 0;",
        "COUNT:",
        *_find_length_bin(dims),
        "@p ld.shared.u16 half, [y]; @p cvt.u32.u16 x, half; @p add.u32 x, x, count;",
        "@p cvt.u16.u32 half, x; @p st.shared.u16 [y], half; bar.warp.sync -1;",
        f"add.u32 round, round, 1; setp.lt.u32 p, round, {dims.rounds}; @p bra COUNT;",
        # All counts are complete; replace them by the positions of the first tile of each length.
        *block_barrier(),
        *_counts_before(dims.max_len, dims.totals_offset),
        # All positions are complete; give each tile the next position of its length and write its row.
        *block_barrier(),
        f"mul.lo.u32 base, live, {dims.per_set}; mul.lo.u32 base, base, $8; mov.b32 round, 0;",
        "PLACE:",
        *_find_length_bin(dims),
        "@is_live ld.shared.u16 half, [y]; @is_live cvt.u32.u16 x, half; add.u32 rank, rank, x;",
        "bar.warp.sync -1;",
        "@p add.u32 x, x, count; @p cvt.u16.u32 half, x; @p st.shared.u16 [y], half; bar.warp.sync -1;",
        *_write_rows(dims),
        f"bar.warp.sync -1; add.u32 round, round, 1; setp.lt.u32 p, round, {dims.rounds}; @p bra PLACE;",
        # The first thread of all stores the number of valid rows.
        "or.b32 x, $8, $9; or.b32 x, x, $10; setp.ne.u32 p, x, 0; @p bra DONE;",
        f"mul.lo.u32 x, live, {dims.heads}; st.global.b32 [$6], x;",
        "DONE:",
    ]
    return "{ " + "\n".join(lines) + " }"


def _vector(names: Sequence[str]) -> str:
    """Return the operand of a vector load or store of the registers with the given names."""
    return "{" + ", ".join(names) + "}"


def _clear_counts(totals_offset: int) -> Iterator[str]:
    """Yield code that sets all counts to 0."""
    for at in range(0, totals_offset, 16 * THREADS):
        yield (
            f"setp.lt.u32 p, $10, {(totals_offset - at) // 16}; "
            f"@p st.shared.v4.b32 [y + {at}], {_vector(['zero'] * 4)};"
        )


def _counts_before(max_len: int, totals_offset: int) -> Iterator[str]:
    """Yield code that turns the counts per (length, warp) into exclusive prefix sums.

    A sum is the position of the warp's first work tile of that length.

    Each thread processes a few consecutive lengths.
    """
    lens_per_thread = -(-(max_len + 1) // THREADS)
    first_len = f"mul.lo.u32 bin, $10, {lens_per_thread}; mad.lo.u32 y, bin, {STRIDE}, $7;"
    yield f"{first_len} mov.b32 own, 0;"
    for i in range(lens_per_thread):
        # A word has two warps' counts; neither half of the sum overflows.
        yield from (_skip_past_end(i, max_len, "SUMMED"), *_access_counts(i, "ld"))
        yield f"add.u32 sum, {WORDS[0]}, {WORDS[1]};"
        yield from (f"add.u32 sum, sum, {word};" for word in WORDS[2:])
        yield "and.b32 x, sum, 0xffff; shr.u32 sum, sum, 16; add.u32 own, own, x;"
        yield from ("add.u32 own, own, sum;", f"SUMMED{i}:")
    yield from (*block_exclusive_sum("$7", totals_offset), first_len)
    for i in range(lens_per_thread):
        yield from (_skip_past_end(i, max_len, "WRITTEN"), *_access_counts(i, "ld"))
        for word in WORDS:
            yield (
                f"and.b32 x, {word}, 0xffff; shr.u32 top, {word}, 16; mov.b32 {word}, before; "
                f"add.u32 before, before, x; shl.b32 x, before, 16; or.b32 {word}, {word}, x; "
                "add.u32 before, before, top;"
            )
        yield from (*_access_counts(i, "st"), f"WRITTEN{i}:")


def _skip_past_end(i: int, max_len: int, label: str) -> str:
    """Return code that skips the thread's i-th length if it exceeds max_len."""
    if i > max_len:
        return f"bra {label}{i};"
    return f"setp.gt.u32 p, bin, {max_len - i}; @p bra {label}{i};"


def _access_counts(i: int, instruction: str) -> Iterator[str]:
    """Yield code that loads (ld) or stores (st) all warps' counts of the thread's i-th length."""
    for n in range(0, len(WORDS), 4):
        memory, registers = f"[y + {i * STRIDE + 4 * n}]", _vector(WORDS[n : n + 4])
        first, second = (registers, memory) if instruction == "ld" else (memory, registers)
        yield f"{instruction}.shared.v4.b32 {first}, {second};"


def _write_rows(dims: TileOrderDims) -> Iterator[str]:
    """Yield code that writes the work tiles of a warp's round to their rows; one thread block does so."""
    row = [f"c{n}" for n in range(dims.columns)] + ["head", "list", "entry", "len", "partial"]
    row += ["zero"] * (-len(row) % 4)
    yield f"mad.lo.u32 x, warp, {dims.rounds}, round; rem.u32 x, x, {dims.writers}; setp.ne.u32 p, x, $9;"
    yield "not.pred q, is_live; or.pred p, p, q; @p bra PASSED;"
    yield f"mad.wide.u32 at, tile, {dims.width * 4}, $0;"
    for n in range(0, dims.columns - 3, 4):
        yield f"ld.global.v4.b32 {_vector(row[n : n + 4])}, [at + {4 * n}];"
    for n in range(dims.columns // 4 * 4, dims.columns):
        yield f"ld.global.b32 c{n}, [at + {4 * n}];"
    yield f"mad.wide.u32 at, list, {dims.stride * 4}, $2; ld.global.b32 entry, [at];"
    yield f"add.u32 rank, rank, base; mad.wide.u32 at, rank, {dims.width * 4}, $5;"
    for n in range(0, len(row), 4):
        yield f"st.global.v4.b32 [at + {4 * n}], {_vector(row[n : n + 4])};"
    yield "PASSED:"


def _find_length_bin(dims: TileOrderDims) -> list[str]:
    """Return code that finds the bin of the lane's work tile: one bin per list length.

    It sets y to the address of the warp's count of the bin, count to the number of lanes with the same bin,
    rank to the number of such lanes before this one, and p in the first of these lanes.
    """
    heads, per_set, sets, max_len = dims.heads, dims.per_set, dims.sets, dims.max_len
    return [
        "shl.b32 x, round, 5; add.u32 item, first, x;",
        f"div.u32 tile, item, {per_set}; rem.u32 head, item, {per_set};",
        f"mad.lo.u32 head, $8, {per_set}, head;",
        f"mad.lo.u32 list, tile, {heads}, head; setp.lt.u32 is_live, tile, live;",
        "mad.wide.u32 at, list, 4, $3; @is_live ld.global.b32 partial, [at];",
        "mad.wide.u32 at, list, 4, $4; @is_live ld.global.b32 len, [at]; @is_live add.u32 len, len, partial;",
        # Longest first, in every other set last, so that lengths change little from one tile to the next.
        f"sub.u32 x, {sets - 1}, $8; and.b32 x, x, 1; setp.eq.u32 q, x, 0;",
        f"sub.u32 x, {max_len}, len; selp.b32 bin, x, len, q; selp.b32 bin, bin, -1, is_live;",
        "match.any.sync.b32 mask, bin, -1; popc.b32 count, mask;",
        "mov.b32 x, 1; shl.b32 x, x, lane; sub.u32 x, x, 1; and.b32 x, mask, x; popc.b32 rank, x;",
        f"mad.lo.u32 y, bin, {STRIDE}, $7; mad.lo.u32 y, warp, 2, y;",
        "setp.eq.and.u32 p, rank, 0, is_live;",
    ]
