"""Kernel of top_k_blocks: one thread block per list, whose threads keep the scores in registers.

Scores become integers of the same order. A radix select finds the smallest selected score: integers between
the smallest and the largest candidate are counted into 2,048 equal bins, and the bin that contains the last
selected one becomes the range of the next round. After at most three rounds a bin is a single number, or all
of it is selected. Then each thread knows which of its blocks are selected, and writes them after those of
earlier threads.

    a thread of 1,024                                     all threads
    ---------------------------------------------------   ----------------------------------------
    load its scores <------------------ global memory
    convert to integers of the same order, in registers
    smallest and largest <------------------------------>  shared memory: the first range
    up to three rounds:
      count its scores in the range --------------------->  shared memory: 2,048 bins
      sum over the bins above its two <------------------>  shuffles, a total per warp
      bin that has the last selected score -------------->  the next range
    select its blocks that reach the smallest score
    sum over the threads before it <-------------------->  shuffles, a total per warp
    store its blocks -----------------> global memory

    register  contents
    --------  ------------------------------------------------------------------
    k<n>      ordered integer of the thread's n-th score
    first     index of the thread's first block
    num       number of blocks of the request; later relative to `first`
    recent    index of the first of the last blocks, which are always selected
    live      number of the thread's candidates: its blocks before `recent`
    want      number of candidates to select that are still to be found
    lo, hi    smallest and largest integer of the range
    range     hi - lo
    shift     base-2 logarithm of the number of integers per bin
    bin       index of a bin; later its offset from `lo`
    low_bin, high_bin  counts of the thread's two bins
    above     number of candidates in the bins above the bin that was found
    count     number of candidates in that bin; later the number of selected blocks
    least     ordered integer of the smallest selected score
    chosen    bit n: whether the thread's n-th block is selected
    f         a score as f32
    y         shared-memory address of the thread's bins
    at, out   address of an array element, and of the next id to store

The registers lane, warp, x, sum, top, own, before, p and is_first are those of `launch`; q is temporary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.launch import THREADS, WARPS, block_barrier, block_exclusive_sum, launch_ptx
from pallas_kernels.ptx.list_tiles import build_lists_by_sorting
from pallas_kernels.shared.tile_codes import encode_tiles

MAX_LEN = 16 * THREADS  # scores of a list, which stay in registers
LOG_BINS = 11  # two bins per thread
BINS = 1 << LOG_BINS
VECTOR = 4  # scores per vector load
# Word offsets in shared memory: bins, totals of the warps, smallest and largest scores of the warps, and the
# result of a round.
TOTALS, LOWS, HIGHS, FOUND = BINS, BINS + WARPS, BINS + 2 * WARPS, BINS + 3 * WARPS
WORDS = FOUND + 4
# A score's integer has the float's bits, all inverted if it is negative, else only the sign inverted.
LOWEST, INFINITY = 0x007FFFFF, 0xFF800000  # the integers of -inf and inf


def _top_k_blocks(
    scores: Array, seq_lens: Array, *, block_size: int, num_selected: int, num_recent: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    max_blocks = scores.shape[2]
    num_blocks = (seq_lens + (block_size - 1)) // block_size
    block = jnp.arange(max_blocks, dtype=jnp.int32)[None, None, :]
    end = num_blocks[:, None, None]
    is_recent, is_valid = block >= end - num_recent, block < end
    scores = jnp.where(is_valid, jnp.where(is_recent, jnp.inf, scores), -jnp.inf)
    min_score = jnp.sort(scores, axis=-1)[..., max_blocks - num_selected]
    selected = (scores >= min_score[..., None]) & is_valid
    listed = build_lists_by_sorting(encode_tiles(selected, selected).reshape(-1, max_blocks))
    return min_score, listed.entries.reshape(scores.shape), listed.num_full.reshape(min_score.shape)


@with_fallback(_top_k_blocks)
def top_k_blocks(
    scores: Float32[Array, "reqs kv_heads max_blocks"],
    seq_lens: Int32[Array, " reqs"],
    *,
    block_size: int,
    num_selected: int,
    num_recent: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the smallest selected score, the ids and the number of the selected blocks of each KV head.

    Args:
        scores: Score of each block, f32.
        seq_lens: Number of tokens of each request.
        block_size: Static: number of tokens per block.
        num_selected: Static: number of blocks to select.
        num_recent: Static: number of a request's last blocks that are always selected.
    """
    reqs, heads, max_blocks = scores.shape
    scores = jnp.pad(scores, ((0, 0), (0, 0), (0, -max_blocks % VECTOR)))
    padded_len = scores.shape[2]
    dims = TopKDims(
        heads=heads,
        stride=padded_len,
        max_blocks=max_blocks,
        scores_per_thread=-(-padded_len // (THREADS * VECTOR)) * VECTOR,
        block_size=block_size,
        num_selected=num_selected,
        num_recent=num_recent,
    )

    min_scores, ids, counts = launch_ptx(
        program(dims),
        (scores, seq_lens),
        name="top_k_blocks",
        out_type=(
            jax.ShapeDtypeStruct((reqs, heads), jnp.float32),
            jax.ShapeDtypeStruct((reqs, heads, max_blocks), jnp.int32),
            jax.ShapeDtypeStruct((reqs, heads), jnp.int32),
        ),
        words=WORDS,
        grid=(reqs * heads,),
    )
    return min_scores, ids, counts


class TopKDims(NamedTuple):
    """Static sizes of a selection.

    Attributes:
        heads: Number of lists of a request.
        stride: Number of scores of a list, padding included.
        max_blocks: Maximum number of blocks of a list.
        scores_per_thread: Number of scores of a thread.
        block_size: Tokens per block.
        num_selected: Number of blocks to select.
        num_recent: Number of these that are always the request's last blocks.
    """

    heads: int
    stride: int
    max_blocks: int
    scores_per_thread: int
    block_size: int
    num_selected: int
    num_recent: int


def program(dims: TopKDims) -> str:
    """Return the PTX code that each thread executes.

    Operands: $0 to $4 are the addresses of the scores, the requests' lengths, the smallest selected scores,
    the ids and the counts. $5 is the address of shared memory. $6 and $7 are the indices of the list and the
    thread.
    """
    scores_per_thread = dims.scores_per_thread
    lines = [
        f".reg .b32 k<{scores_per_thread}>, lane, warp, num, recent, live, want, lo, hi, range, shift, x, y, "
        "bin, sum;",
        ".reg .b32 own, before, low_bin, high_bin, found, above, count, chosen, first, least, top;",
        ".reg .b64 at, out; .reg .f32 f; .reg .pred p, q, is_first;",
        *_load_scores(dims),
        *_to_ordered_integers(scores_per_thread),
        *_num_to_select(dims),
        *_score_range(scores_per_thread),
        "ROUND:",
        *_count_bins(scores_per_thread),
        *_next_range(),
        "CHOSEN:",
        *_store_blocks(dims),
        f"setp.ne.u32 p, $7, {THREADS - 1}; @p bra DONE;",
        "mad.wide.u32 at, $6, 4, $4; st.global.b32 [at], count;",
        "shr.s32 x, least, 31; not.b32 x, x; or.b32 x, x, 0x80000000; xor.b32 least, least, x;",
        "mad.wide.u32 at, $6, 4, $2; st.global.b32 [at], least;",
        "DONE:",
    ]
    return "{ " + "\n".join(lines) + " }"


def _load_scores(dims: TopKDims) -> Iterator[str]:
    """Yield code that loads the request's length into num and the thread's scores, and clears its bins."""
    yield "and.b32 lane, $7, 31; shr.u32 warp, $7, 5; setp.eq.u32 is_first, lane, 0;"
    yield f"mul.lo.u32 first, $7, {dims.scores_per_thread};"
    yield f"div.u32 x, $6, {dims.heads}; mad.wide.u32 at, x, 4, $1; ld.global.b32 num, [at];"
    yield f"mad.wide.u32 at, $6, {dims.stride * 4}, $0; mad.wide.u32 at, first, 4, at;"
    yield from (f"mov.b32 k{n}, 0;" for n in range(dims.scores_per_thread))
    for n in range(0, dims.scores_per_thread, VECTOR):
        vector = ", ".join(f"k{n + i}" for i in range(VECTOR))
        yield (
            f"add.u32 x, first, {n}; setp.lt.u32 p, x, {dims.stride}; "
            f"@p ld.global.v4.b32 {{{vector}}}, [at + {4 * n}];"
        )
    yield "mad.lo.u32 y, $7, 8, $5; st.shared.v2.b32 [y], {0, 0};"


def _to_ordered_integers(scores_per_thread: int) -> Iterator[str]:
    """Yield code that converts scores to integers of the same order; -0 and 0 become the same integer."""
    for n in range(scores_per_thread):
        yield (
            f"mov.b32 f, k{n}; add.f32 f, f, 0f00000000; mov.b32 k{n}, f; "
            f"shr.s32 x, k{n}, 31; or.b32 x, x, 0x80000000; xor.b32 k{n}, k{n}, x;"
        )


def _num_to_select(dims: TopKDims) -> Iterator[str]:
    """Yield code that sets want to the number of candidates to select.

    Candidates are the blocks before block `recent`. If all or none of them are selected, the smallest
    selected score is known, and the code skips the rounds.
    """
    yield f"add.s32 num, num, {dims.block_size - 1}; div.s32 num, num, {dims.block_size};"
    yield f"min.s32 num, num, {dims.max_blocks}; max.s32 num, num, 0;"
    yield f"sub.s32 recent, num, {dims.num_recent}; max.s32 recent, recent, 0;"
    yield "sub.s32 live, recent, first;"
    yield f"sub.s32 want, num, recent; sub.s32 want, {dims.num_selected}, want;"
    yield f"mov.b32 least, {INFINITY:#x}; setp.le.s32 p, want, 0; @p bra CHOSEN;"
    yield f"mov.b32 least, {LOWEST:#x}; setp.le.s32 p, recent, want; @p bra CHOSEN;"


def _score_range(scores_per_thread: int) -> Iterator[str]:
    """Yield code that sets lo and hi to the smallest and the largest integer of all candidates."""
    yield "mov.b32 lo, -1; mov.b32 hi, 0;"
    for n in range(scores_per_thread):
        yield f"setp.gt.s32 p, live, {n}; @p min.u32 lo, lo, k{n}; @p max.u32 hi, hi, k{n};"
    yield "redux.sync.min.u32 lo, lo, -1; redux.sync.max.u32 hi, hi, -1; mad.lo.u32 x, warp, 4, $5;"
    yield f"@is_first st.shared.b32 [x + {LOWS * 4}], lo; @is_first st.shared.b32 [x + {HIGHS * 4}], hi;"
    yield from block_barrier()
    yield "mad.lo.u32 x, lane, 4, $5;"
    yield f"ld.shared.b32 lo, [x + {LOWS * 4}]; ld.shared.b32 hi, [x + {HIGHS * 4}];"
    yield "redux.sync.min.u32 lo, lo, -1; redux.sync.max.u32 hi, hi, -1;"


def _count_bins(scores_per_thread: int) -> Iterator[str]:
    """Yield code that counts the candidates from lo to hi in bins of 1 << shift integers."""
    yield f"sub.u32 range, hi, lo; clz.b32 shift, range; sub.s32 shift, {32 - LOG_BINS}, shift;"
    yield "max.s32 shift, shift, 0;"
    yield from block_barrier()
    for n in range(scores_per_thread):
        yield (
            f"sub.u32 x, k{n}, lo; setp.le.u32 p, x, range; setp.gt.and.s32 p, live, {n}, p; "
            "shr.u32 x, x, shift; mad.lo.u32 x, x, 4, $5; @p red.shared.add.u32 [x], 1;"
        )
    yield from block_barrier()


def _next_range() -> Iterator[str]:
    """Yield code that makes the bin of the last selected candidate the new range.

    The rounds end if all candidates in that bin are selected, or if the bin is a single integer. Thread t has
    the bins 2 t and 2 t + 1, counted from the largest bin down.
    """
    yield f"mov.b32 x, {BINS - 2}; sub.u32 bin, x, $7; sub.u32 bin, bin, $7; mad.lo.u32 y, bin, 4, $5;"
    yield "ld.shared.v2.b32 {low_bin, high_bin}, [y]; add.u32 own, low_bin, high_bin;"
    yield from block_exclusive_sum("$5", TOTALS * 4)
    # All threads have read their bins at the barrier inside the sum; clear them for the next round.
    yield "st.shared.v2.b32 [y], {0, 0};"
    yield "add.u32 x, before, own; setp.lt.u32 p, before, want; setp.ge.and.u32 p, x, want, p;"
    yield "@!p bra AWAIT;"
    yield "add.u32 x, before, high_bin; setp.ge.u32 q, x, want;"
    yield "@q add.u32 bin, bin, 1; selp.b32 count, high_bin, low_bin, q; selp.b32 above, before, x, q;"
    yield f"st.shared.v2.b32 [$5 + {FOUND * 4}], {{bin, above}}; st.shared.b32 [$5 + {FOUND * 4 + 8}], count;"
    yield "AWAIT:"
    yield from block_barrier()
    yield f"ld.shared.v2.b32 {{bin, above}}, [$5 + {FOUND * 4}]; ld.shared.b32 count, [$5 + {FOUND * 4 + 8}];"
    yield "sub.u32 want, want, above; shl.b32 bin, bin, shift; add.u32 lo, lo, bin;"
    yield "mov.b32 x, 1; shl.b32 x, x, shift; sub.u32 x, x, 1; add.u32 hi, lo, x;"
    yield "mov.b32 least, lo; setp.eq.u32 p, count, want; setp.eq.or.u32 p, shift, 0, p; @!p bra ROUND;"


def _store_blocks(dims: TopKDims) -> Iterator[str]:
    """Yield code that stores the ids of the thread's selected blocks after those of earlier threads."""
    yield "mov.b32 chosen, 0; sub.s32 num, num, first;"
    for n in range(dims.scores_per_thread):
        yield (
            f"setp.ge.u32 p, k{n}, least; setp.le.or.s32 p, live, {n}, p; setp.gt.and.s32 p, num, {n}, p; "
            f"@p or.b32 chosen, chosen, {1 << n};"
        )
    yield "popc.b32 own, chosen;"
    yield from block_exclusive_sum("$5", TOTALS * 4)
    yield "add.u32 count, before, own;"
    yield f"mad.wide.u32 out, $6, {dims.max_blocks * 4}, $3; mad.wide.u32 out, before, 4, out;"
    for n in range(dims.scores_per_thread):
        yield (
            f"and.b32 x, chosen, {1 << n}; setp.ne.u32 p, x, 0; add.u32 x, first, {n}; "
            "@p st.global.b32 [out], x; @p add.u64 out, out, 4;"
        )
