"""Kernel of list_tiles: one warp or four per list; each lane counts its codes, then writes its tiles.

XLA needs five kernels and a cumulative sum: 20 us in a decode step, 2.4 ms in a prompt of 128k tokens.

    a lane of a list's warp                               the other lanes
    ---------------------------------------------------   ----------------------------------------
    load its words of codes <--------- global memory
    count its partial and full tiles
    sum over the lanes before it <--------------------->  shuffles, no memory
    four warps: sum over the warps before it <--------->  shared memory, one barrier (bar.sync 1)
    lane 0: store the list's counts -> global memory
    for each word that is not 0:
      store its tiles ---------------> global memory, partial tiles from the back, full tiles after them

    register  contents
    --------  ------------------------------------------------------------------
    c<n>      word n of the lane's codes
    t<n>      counts of warp n of the list
    number    index of the list
    nth       index of the lane among the lanes of the list
    sum       counts of the lane: visible tiles (low half), full tiles (high half)
    before    counts of all earlier lanes
    all       counts of the whole list; later its number of partial tiles
    partial   position of the lane's next partial tile
    full      position of the lane's next full tile
    entry     entry of the tile that is stored
    at, out   addresses of the lane's codes, and of the list's entries
    to        address of the element that is stored
    is_seen   predicate: whether the tile is visible
    is_whole  predicate: whether the tile is full
    x, p      temporary values
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt

from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.launch import launch_ptx
from pallas_kernels.shared.tile_codes import (
    FULL_BIT,
    QUERY_BLOCK_BIT,
    QUERY_BLOCK_SHIFT,
    VISIBLE_BIT,
    ListedTiles,
)

LANES, WARPS = 32, 4  # lanes of a warp; warps of a thread block
WORD_BYTES = 4
MANY_LISTS = 2048  # from here on one warp per list keeps the GPU busy; fewer lists get four warps each


def build_lists_by_sorting(codes: UInt[Array, "lists tiles"]) -> ListedTiles:
    """Return the lists of visible tiles, built by a sort; entries after a list's end are zero.

    Args:
        codes: Code of each tile, from `encode_tiles`.
    """
    tiles = codes.shape[1]
    code, number = codes.astype(jnp.int32), jnp.arange(tiles, dtype=jnp.int32)[None, :]
    is_visible, is_full = (code >> VISIBLE_BIT) & 1 != 0, (code >> FULL_BIT) & 1 != 0
    # Partial tiles come first, the last one first; then full tiles; then tiles that are not visible.
    sort_key = jnp.where(is_visible, jnp.where(is_full, number, -1 - number), tiles)
    entries = jnp.where(is_visible, number + (code >> QUERY_BLOCK_BIT << QUERY_BLOCK_SHIFT), 0)
    _, entries = jax.lax.sort((sort_key, entries), num_keys=1)
    num_partial, num_full = (
        tiles.sum(axis=1, dtype=jnp.int32) for tiles in (is_visible & ~is_full, is_visible & is_full)
    )
    return ListedTiles(entries, num_partial, num_full)


@with_fallback(build_lists_by_sorting)
def list_tiles(codes: UInt[Array, "lists tiles"]) -> ListedTiles:
    """Return the lists of visible tiles; entries after a list's end are undefined.

    Args:
        codes: Code of each tile, from `encode_tiles`.
    """
    lists, tiles = codes.shape
    warps = 1 if lists >= MANY_LISTS else WARPS
    codes_per_word = WORD_BYTES // codes.dtype.itemsize
    words = -(-tiles // (LANES * warps * codes_per_word))  # words of a lane
    codes = jnp.pad(codes, ((0, 0), (0, LANES * warps * words * codes_per_word - tiles)))
    counts = jax.ShapeDtypeStruct((lists,), jnp.int32)
    code = program(lists=lists, tiles=tiles, words=words, codes_per_word=codes_per_word, warps=warps)

    listed = launch_ptx(
        code,
        (codes,),
        name="list_tiles",
        out_type=(jax.ShapeDtypeStruct((lists, tiles), jnp.int32), counts, counts),
        words=WARPS,
        grid=(-(-lists * warps // WARPS),),
        warpgroups=1,
    )
    return ListedTiles(*listed)


def program(*, lists: int, tiles: int, words: int, codes_per_word: int, warps: int) -> str:
    """Return the PTX code that each lane executes.

    Operands: $0 to $3 are the addresses of the codes, the entries and the two counts. $4 is the address of
    shared memory, one word per warp. $5 and $6 are the indices of the thread block and the thread.
    """
    lanes = LANES * warps
    lines = [
        f".reg .b32 c<{words}>, t<{WARPS}>, sum, all, x, before, partial, full, entry, number, nth;",
        ".reg .b64 at, out, to; .reg .pred p, is_whole, is_seen;",
        f"shr.u32 x, $6, 5; mad.lo.u32 number, $5, {WARPS}, x; and.b32 nth, $6, {LANES - 1};"
        if warps == 1
        else "mov.b32 number, $5; mov.b32 nth, $6;",
        f"setp.ge.u32 p, number, {lists}; @p bra DONE;",
        f"mad.wide.u32 at, number, {lanes * words * WORD_BYTES}, $0;",
        f"mad.wide.u32 at, nth, {words * WORD_BYTES}, at;",
        f"mad.wide.u32 out, number, {tiles * 4}, $1;",
        *_load_codes(words),
        *_count(words, codes_per_word),
        *(_sum_over_warps() if warps > 1 else ()),
        # The counts are packed as full << 16 | visible; partial = visible - full. Lane 0 stores the counts.
        "shr.u32 full, all, 16; and.b32 all, all, 0xffff; sub.u32 all, all, full;",
        "mad.wide.u32 to, number, 4, $2; setp.eq.u32 p, nth, 0; @p st.global.b32 [to], all;",
        "mad.wide.u32 to, number, 4, $3; @p st.global.b32 [to], full;",
        "shr.u32 full, before, 16; and.b32 partial, before, 0xffff; sub.u32 partial, partial, full;",
        "add.u32 full, full, all; sub.u32 partial, all, partial; sub.u32 partial, partial, 1;",
    ]
    # Store the tiles; the first partial tile of a lane comes after those of all later lanes.
    for word in range(words):
        lines.append(f"setp.eq.u32 p, c{word}, 0; @p bra AFTER{word};")
        for index in range(codes_per_word):
            lines += _store_tile(word, index, words, codes_per_word)
        lines.append(f"AFTER{word}:")
    return "{ " + "\n".join([*lines, "DONE:"]) + " }"


def _load_codes(words: int) -> Iterator[str]:
    """Yield code that loads the lane's codes, with the widest vector loads that divide the words."""
    at_once = next(n for n in (4, 2, 1) if words % n == 0)
    for first in range(0, words, at_once):
        names = ", ".join(f"c{first + n}" for n in range(at_once))
        operand = f"v{at_once}.b32 {{{names}}}" if at_once > 1 else f"b32 {names}"
        yield f"ld.global.{operand}, [at + {first * WORD_BYTES}];"


def _count(words: int, codes_per_word: int) -> Iterator[str]:
    """Yield code that counts the tiles of the lane, of the lanes before it in the warp, and of the warp.

    The counts are in sum, before and all: visible tiles in the low half, full tiles in the high half.
    """
    bits = 8 * WORD_BYTES // codes_per_word  # bits of a code

    def mask(bit: int) -> str:
        return f"{sum(1 << (n * bits + bit) for n in range(codes_per_word)):#x}"

    yield "mov.b32 sum, 0;"
    for n in range(words):
        yield (
            f"and.b32 x, c{n}, {mask(VISIBLE_BIT)}; popc.b32 x, x; add.u32 sum, sum, x; "
            f"and.b32 x, c{n}, {mask(FULL_BIT)}; popc.b32 x, x; mad.lo.u32 sum, x, 65536, sum;"
        )
    yield "mov.b32 before, sum;"
    for n in range(LANES.bit_length() - 1):
        yield f"shfl.sync.up.b32 x|p, before, {1 << n}, 0, -1; @p add.u32 before, before, x;"
    yield f"shfl.sync.idx.b32 all, before, {LANES - 1}, 31, -1;"
    yield "sub.u32 before, before, sum;"


def _store_tile(word: int, index: int, words: int, codes_per_word: int) -> Iterator[str]:
    """Yield code that stores the tile of the `index`-th code of a word of the lane, if it is visible."""
    bits = 8 * WORD_BYTES // codes_per_word
    bit = index * bits
    yield f"and.b32 x, c{word}, {1 << (bit + VISIBLE_BIT):#x}; setp.ne.u32 is_seen, x, 0;"
    yield f"and.b32 x, c{word}, {1 << (bit + FULL_BIT):#x}; setp.ne.and.u32 is_whole, x, 0, is_seen;"
    yield (
        f"bfe.u32 x, c{word}, {bit + QUERY_BLOCK_BIT}, {bits - QUERY_BLOCK_BIT}; "
        f"shl.b32 x, x, {QUERY_BLOCK_SHIFT};"
    )
    number = word * codes_per_word + index
    yield f"mad.lo.u32 entry, nth, {words * codes_per_word}, {number}; or.b32 entry, entry, x;"
    yield "selp.b32 x, full, partial, is_whole;"
    yield "mad.wide.u32 to, x, 4, out; @is_seen st.global.b32 [to], entry;"
    yield "@is_whole add.u32 full, full, 1; @is_whole add.u32 partial, partial, 1;"
    yield "@is_seen sub.u32 partial, partial, 1;"


def _sum_over_warps() -> Iterator[str]:
    """Yield code that adds the counts of earlier warps to before, and sets all to the sum of all warps."""
    totals = [f"t{n}" for n in range(WARPS)]
    yield "shr.u32 x, nth, 5; mad.lo.u32 x, x, 4, $4; st.shared.b32 [x], all; bar.sync 1, 128;"
    yield f"ld.shared.v4.b32 {{{', '.join(totals)}}}, [$4]; mov.b32 all, 0;"
    for n, total in enumerate(totals):
        yield f"setp.gt.u32 p, nth, {LANES * (n + 1) - 1}; @p add.u32 before, before, {total};"
        yield f"add.u32 all, all, {total};"
