"""The table of items in the order in which thread blocks take them: a counting sort, each item its row.

A thread block sorts one set of heads: lengths are small integers, so each warp counts how often its items
have each of them, and sums over warps and lengths say where a warp's items of a length go. XLA compared all
pairs, 7 us for 8 sets of 1,028 items and 186 us for 8,196, and put rows in their places by two more kernels.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.launch import THREADS, WARPS, block_barrier, block_exclusive_sum, launch_ptx
from pallas_kernels.shared.arithmetic import sort_ranks

MAX_TILES_PER_SET = 2**16 - 1  # of a set: counts have 16 bits
MAX_LEN = 2800  # of a list: the counts of all lengths fit shared memory
CTAS = 128  # all sort, each writes some of the rows
COUNTS = 2 * WARPS  # bytes of a length's counts: 16 bits for each warp
WORDS = tuple(f"w{n}" for n in range(COUNTS // 4))  # registers with them
APART = COUNTS + 16  # lengths are so far apart that neighbours' lie in different banks


def has_kernel(*, num_tiles: int, max_len: int) -> bool:
    """Whether a set of items whose lists have up to so many tiles can be sorted."""
    return num_tiles <= MAX_TILES_PER_SET and max_len <= MAX_LEN


def _by_comparing(
    table: jax.Array,
    num_live: jax.Array,
    entries: jax.Array,
    num_partial: jax.Array,
    num_full: jax.Array,
    *,
    columns: int,
    sets: int,
) -> tuple[jax.Array, jax.Array]:
    tiles, heads = table.shape[0], entries.shape[0] // table.shape[0]
    by_set = lambda x: jnp.swapaxes(x.reshape(tiles, sets, -1), 0, 1).reshape(sets, -1)
    nums = num_partial + num_full
    lens = by_set(nums)
    is_live = jnp.arange(tiles, dtype=jnp.int32)[:, None] < num_live[0]
    is_live = by_set(jnp.broadcast_to(is_live, (tiles, heads)))
    # The longest first, in every other set last, so that lengths change little from one item to the next.
    number = jnp.arange(sets, dtype=jnp.int32)[:, None]
    keys = jnp.where((sets - 1 - number) % 2 == 0, -lens, lens)
    per_set = num_live[0] * (heads // sets)
    rows = sort_ranks(jnp.where(is_live, keys, entries.shape[1] + 1)) + number * per_set
    rows = jnp.where(is_live, rows, tiles * heads)
    rows = jnp.swapaxes(rows.reshape(sets, tiles, -1), 0, 1).reshape(tiles * heads)
    lists = jnp.arange(tiles * heads, dtype=jnp.int32)
    of_tile = jnp.repeat(table[:, :columns], heads, axis=0)
    of_item = jnp.stack([lists % heads, lists, entries[:, 0], nums, num_partial], axis=-1)
    items = jnp.concatenate([of_tile, of_item], axis=-1)
    items = jnp.pad(items, ((0, 0), (0, table.shape[1] - items.shape[-1])))
    return jnp.zeros_like(items).at[rows].set(items, mode="drop"), num_live * heads


@with_fallback(_by_comparing)
def sort_work_tiles(
    table: jax.Array,
    num_live: jax.Array,
    entries: jax.Array,
    num_partial: jax.Array,
    num_full: jax.Array,
    *,
    columns: int,
    sets: int,
) -> tuple[jax.Array, jax.Array]:
    """TileLists.table and its num_live.

    Args:
        table: [tiles, width] int32: the tiles of queries.
        num_live: [1]: how many of them there are.
        entries: [tiles * heads, max_list] int32: the lists.
        num_partial: [tiles * heads]
        num_full: [tiles * heads]
        columns: Static: how many of the table's columns mean something.
        sets: Static: the heads are worked through in so many sets.
    """
    tiles, width = table.shape
    lists, max_len = entries.shape
    heads = lists // tiles
    shape = Shape(
        tiles=tiles,
        width=width,
        columns=columns,
        max_len=max_len,
        heads=heads,
        per_set=heads // sets,
        sets=sets,
        writers=max(CTAS // sets, 1),
    )

    items, num_items = launch_ptx(
        program(shape),
        (table, num_live, entries, num_partial, num_full),
        name="sort_work_tiles",
        out_type=(jax.ShapeDtypeStruct((lists, width), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)),
        words=shape.totals // 4 + WARPS,
        grid=(sets, shape.writers),
    )
    return items, num_items


class Shape(NamedTuple):
    """What is static about a call.

    Attributes:
        tiles: Tiles of queries.
        width: Columns of a row.
        columns: So many of them mean something.
        max_len: Tiles of a list, at most.
        heads: Items of a tile of queries.
        per_set: Those of a set.
        sets: Sets of heads.
        writers: Thread blocks of a set; all sort, each writes some of the rows.
    """

    tiles: int
    width: int
    columns: int
    max_len: int
    heads: int
    per_set: int
    sets: int
    writers: int

    @property
    def rounds(self) -> int:
        """Of a warp, whose items are neighbours; each lane has one a round."""
        return -(-self.tiles * self.per_set // THREADS)

    @property
    def totals(self) -> int:
        """Bytes of the counts of all lengths; behind them the warps' totals."""
        return (self.max_len + 1) * APART


def program(shape: Shape) -> str:
    """PTX of a thread.

    Operands: $0 to $6 the addresses of the table, the number of live tiles, the entries, the two counts, the
    sorted table and its length, $7 that of shared memory; the numbers of the set, the writer and the thread.
    """
    lines = [
        f".reg .b32 {', '.join([*WORDS, *(f'c{n}' for n in range(shape.columns))])};",
        ".reg .b32 lane, warp, x, y, sum, top, own, before, live, first, round, item, tile, head, list;",
        ".reg .b32 entry, len, partial, bin, mask, rank, count, base, zero;",
        ".reg .b64 at; .reg .b16 half; .reg .pred p, q, is_first, is_live;",
        "mov.b32 zero, 0; and.b32 lane, $10, 31; shr.u32 warp, $10, 5; setp.eq.u32 is_first, lane, 0;",
        "ld.global.b32 live, [$1]; mad.lo.u32 y, $10, 16, $7;",
        *_cleared(shape.totals),
        f"mul.lo.u32 first, warp, {shape.rounds * 32}; add.u32 first, first, lane;",
        *block_barrier(),
        "mov.b32 round, 0;",
        "COUNT:",
        *_bin(shape),
        "@p ld.shared.u16 half, [y]; @p cvt.u32.u16 x, half; @p add.u32 x, x, count;",
        "@p cvt.u16.u32 half, x; @p st.shared.u16 [y], half; bar.warp.sync -1;",
        f"add.u32 round, round, 1; setp.lt.u32 p, round, {shape.rounds}; @p bra COUNT;",
        *block_barrier(),
        *_counts_before(shape.max_len, shape.totals),
        *block_barrier(),
        f"mul.lo.u32 base, live, {shape.per_set}; mul.lo.u32 base, base, $8; mov.b32 round, 0;",
        "PLACE:",
        *_bin(shape),
        "@is_live ld.shared.u16 half, [y]; @is_live cvt.u32.u16 x, half; add.u32 rank, rank, x;",
        "bar.warp.sync -1;",
        "@p add.u32 x, x, count; @p cvt.u16.u32 half, x; @p st.shared.u16 [y], half; bar.warp.sync -1;",
        *_written(shape),
        f"bar.warp.sync -1; add.u32 round, round, 1; setp.lt.u32 p, round, {shape.rounds}; @p bra PLACE;",
        "or.b32 x, $8, $9; or.b32 x, x, $10; setp.ne.u32 p, x, 0; @p bra DONE;",
        f"mul.lo.u32 x, live, {shape.heads}; st.global.b32 [$6], x;",
        "DONE:",
    ]
    return "{ " + "\n".join(lines) + " }"


def _vector(names: Sequence[str]) -> str:
    """Registers that are loaded or stored at once."""
    return "{" + ", ".join(names) + "}"


def _cleared(totals: int) -> Iterator[str]:
    """No length has been counted."""
    for at in range(0, totals, 16 * THREADS):
        yield (
            f"setp.lt.u32 p, $10, {(totals - at) // 16}; "
            f"@p st.shared.v4.b32 [y + {at}], {_vector(['zero'] * 4)};"
        )


def _counts_before(max_len: int, totals: int) -> Iterator[str]:
    """Each warp's count of a length becomes how many items come before those: a thread has some lengths."""
    each = -(-(max_len + 1) // THREADS)
    mine = f"mul.lo.u32 bin, $10, {each}; mad.lo.u32 y, bin, {APART}, $7;"
    yield f"{mine} mov.b32 own, 0;"
    for nth in range(each):
        # A word has two warps' counts; neither half of the sum overflows.
        yield from (_past_end(nth, max_len, "SUMMED"), *_counts(nth, "ld"))
        yield f"add.u32 sum, {WORDS[0]}, {WORDS[1]};"
        yield from (f"add.u32 sum, sum, {word};" for word in WORDS[2:])
        yield "and.b32 x, sum, 0xffff; shr.u32 sum, sum, 16; add.u32 own, own, x;"
        yield from ("add.u32 own, own, sum;", f"SUMMED{nth}:")
    yield from (*block_exclusive_sum("$7", totals), mine)
    for nth in range(each):
        yield from (_past_end(nth, max_len, "WRITTEN"), *_counts(nth, "ld"))
        for word in WORDS:
            yield (
                f"and.b32 x, {word}, 0xffff; shr.u32 top, {word}, 16; mov.b32 {word}, before; "
                f"add.u32 before, before, x; shl.b32 x, before, 16; or.b32 {word}, {word}, x; "
                "add.u32 before, before, top;"
            )
        yield from (*_counts(nth, "st"), f"WRITTEN{nth}:")


def _past_end(nth: int, max_len: int, label: str) -> str:
    """Skips a thread's nth length where there is none."""
    if nth > max_len:
        return f"bra {label}{nth};"
    return f"setp.gt.u32 p, bin, {max_len - nth}; @p bra {label}{nth};"


def _counts(nth: int, how: str) -> Iterator[str]:
    """Loads (ld) or stores (st) the warps' counts of a thread's nth length."""
    for n in range(0, len(WORDS), 4):
        memory, registers = f"[y + {nth * APART + 4 * n}]", _vector(WORDS[n : n + 4])
        first, second = (registers, memory) if how == "ld" else (memory, registers)
        yield f"{how}.shared.v4.b32 {first}, {second};"


def _written(shape: Shape) -> Iterator[str]:
    """A round's item to its row. A warp's items of a round are one writer's."""
    item = [f"c{n}" for n in range(shape.columns)] + ["head", "list", "entry", "len", "partial"]
    item += ["zero"] * (-len(item) % 4)
    yield f"mad.lo.u32 x, warp, {shape.rounds}, round; rem.u32 x, x, {shape.writers}; setp.ne.u32 p, x, $9;"
    yield "not.pred q, is_live; or.pred p, p, q; @p bra PASSED;"
    yield f"mad.wide.u32 at, tile, {shape.width * 4}, $0;"
    for n in range(0, shape.columns - 3, 4):
        yield f"ld.global.v4.b32 {_vector(item[n : n + 4])}, [at + {4 * n}];"
    for n in range(shape.columns // 4 * 4, shape.columns):
        yield f"ld.global.b32 c{n}, [at + {4 * n}];"
    yield f"mad.wide.u32 at, list, {shape.max_len * 4}, $2; ld.global.b32 entry, [at];"
    yield f"add.u32 rank, rank, base; mad.wide.u32 at, rank, {shape.width * 4}, $5;"
    for n in range(0, len(item), 4):
        yield f"st.global.v4.b32 [at + {4 * n}], {_vector(item[n : n + 4])};"
    yield "PASSED:"


def _bin(shape: Shape) -> list[str]:
    """A round's item of this lane: where its length is counted, y; its rank among the warp's of this length.

    The predicate p is set in the first lane of each length, which has their number in count.
    """
    heads, per_set, sets, max_len = shape.heads, shape.per_set, shape.sets, shape.max_len
    return [
        "shl.b32 x, round, 5; add.u32 item, first, x;",
        f"div.u32 tile, item, {per_set}; rem.u32 head, item, {per_set};",
        f"mad.lo.u32 head, $8, {per_set}, head;",
        f"mad.lo.u32 list, tile, {heads}, head; setp.lt.u32 is_live, tile, live;",
        "mad.wide.u32 at, list, 4, $3; @is_live ld.global.b32 partial, [at];",
        "mad.wide.u32 at, list, 4, $4; @is_live ld.global.b32 len, [at]; @is_live add.u32 len, len, partial;",
        # The longest first, in every other set last, so that lengths change little from one item to the next.
        f"sub.u32 x, {sets - 1}, $8; and.b32 x, x, 1; setp.eq.u32 q, x, 0;",
        f"sub.u32 x, {max_len}, len; selp.b32 bin, x, len, q; selp.b32 bin, bin, -1, is_live;",
        "match.any.sync.b32 mask, bin, -1; popc.b32 count, mask;",
        "mov.b32 x, 1; shl.b32 x, x, lane; sub.u32 x, x, 1; and.b32 x, mask, x; popc.b32 rank, x;",
        f"mad.lo.u32 y, bin, {APART}, $7; mad.lo.u32 y, warp, 2, y;",
        "setp.eq.and.u32 p, rank, 0, is_live;",
    ]
