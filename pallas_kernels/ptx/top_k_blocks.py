"""The kernel of top_k_blocks: a thread block a list, whose threads keep the scores in registers.

Scores become integers of the same order. Those between the smallest and the largest are counted into 2,048
equal bins; the bin that the last wanted one lies in becomes the range of the next round. After three rounds
at most a bin is one number, or all of it is wanted. Then each thread knows which of its blocks are chosen,
and writes them to where the counts of those before it say.

    a thread of 1,024                                     all of them
    ---------------------------------------------------   ----------------------------------------
    its scores <---------------------- global memory
    as integers of the same order, in registers
    smallest and largest <------------------------------>  shared memory: the first range
    up to three rounds:
      counts its scores in the range -------------------->  shared memory: 2,048 bins
      sums over the bins above its two <----------------->  shuffles, a total a warp
      whose bin has the last wanted one ----------------->  the next range
    which blocks of its own reach the least score
    sum over the threads before it <-------------------->  shuffles, a total a warp
    its blocks ----------------------> global memory
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

MAX_LEN = 16 * THREADS  # of a list: it stays in registers
LOG_BINS = 11  # two bins a thread
BINS = 1 << LOG_BINS
VECTOR = 4  # scores that are loaded at once
# Words of shared memory: bins, the warps' totals, their smallest and largest, what a round found.
TOTALS, LOWS, HIGHS, FOUND = BINS, BINS + WARPS, BINS + 2 * WARPS, BINS + 3 * WARPS
WORDS = FOUND + 4
# Integers of scores: a float's bits, all turned where it is negative, the sign alone where it is not.
LOWEST, INFINITY = 0x007FFFFF, 0xFF800000  # those of -inf and inf


def _by_sorting(
    scores: Array, seq_lens: Array, *, block_size: int, num_selected: int, num_recent: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    max_blocks = scores.shape[2]
    num_blocks = (seq_lens + (block_size - 1)) // block_size
    number = jnp.arange(max_blocks, dtype=jnp.int32)[None, None, :]
    end = num_blocks[:, None, None]
    is_recent, is_live = number >= end - num_recent, number < end
    scores = jnp.where(is_live, jnp.where(is_recent, jnp.inf, scores), -jnp.inf)
    least = jnp.sort(scores, axis=-1)[..., max_blocks - num_selected]
    chosen = (scores >= least[..., None]) & is_live
    listed = build_lists_by_sorting(encode_tiles(chosen, chosen).reshape(-1, max_blocks))
    return least, listed.entries.reshape(scores.shape), listed.num_full.reshape(least.shape)


@with_fallback(_by_sorting)
def top_k_blocks(
    scores: Float32[Array, "reqs kv_heads max_blocks"],
    seq_lens: Int32[Array, " reqs"],
    *,
    block_size: int,
    num_selected: int,
    num_recent: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """BestBlocks' least score, ids and counts; arguments as block_scores.best_blocks'."""
    reqs, heads, max_blocks = scores.shape
    scores = jnp.pad(scores, ((0, 0), (0, 0), (0, -max_blocks % VECTOR)))
    padded = scores.shape[2]
    shape = Shape(
        heads=heads,
        stride=padded,
        max_blocks=max_blocks,
        each=-(-padded // (THREADS * VECTOR)) * VECTOR,
        block_size=block_size,
        num_selected=num_selected,
        num_recent=num_recent,
    )

    least, ids, counts = launch_ptx(
        program(shape),
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
    return least, ids, counts


class Shape(NamedTuple):
    """What is static about a call.

    Attributes:
        heads: Lists of a request.
        stride: Scores of a list, padding included.
        max_blocks: Blocks of a list, at most.
        each: Scores of a thread.
        block_size: Tokens of a block.
        num_selected: Blocks that are wanted.
        num_recent: So many of them are the request's last.
    """

    heads: int
    stride: int
    max_blocks: int
    each: int
    block_size: int
    num_selected: int
    num_recent: int


def program(shape: Shape) -> str:
    """PTX of a thread.

    Operands: $0 to $4 the addresses of the scores, the requests' lengths, the least scores, the ids and the
    counts, $5 that of shared memory; the numbers of the list and the thread.
    """
    each = shape.each
    lines = [
        f".reg .b32 k<{each}>, lane, warp, num, recent, live, want, lo, hi, range, shift, x, y, bin, sum;",
        ".reg .b32 own, before, low_bin, high_bin, found, above, count, chosen, first, least, top;",
        ".reg .b64 at, out; .reg .f32 f; .reg .pred p, q, is_first;",
        *_loaded(shape),
        *_as_integers(each),
        *_wanted(shape),
        *_ends(each),
        "ROUND:",
        *_counted(each),
        *_next_range(),
        "CHOSEN:",
        *_listed(shape),
        f"setp.ne.u32 p, $7, {THREADS - 1}; @p bra DONE;",
        "mad.wide.u32 at, $6, 4, $4; st.global.b32 [at], count;",
        "shr.s32 x, least, 31; not.b32 x, x; or.b32 x, x, 0x80000000; xor.b32 least, least, x;",
        "mad.wide.u32 at, $6, 4, $2; st.global.b32 [at], least;",
        "DONE:",
    ]
    return "{ " + "\n".join(lines) + " }"


def _loaded(shape: Shape) -> Iterator[str]:
    """The request's length, num; a thread's scores, k, from block first on. Its two bins are empty."""
    yield "and.b32 lane, $7, 31; shr.u32 warp, $7, 5; setp.eq.u32 is_first, lane, 0;"
    yield f"mul.lo.u32 first, $7, {shape.each};"
    yield f"div.u32 x, $6, {shape.heads}; mad.wide.u32 at, x, 4, $1; ld.global.b32 num, [at];"
    yield f"mad.wide.u32 at, $6, {shape.stride * 4}, $0; mad.wide.u32 at, first, 4, at;"
    yield from (f"mov.b32 k{n}, 0;" for n in range(shape.each))
    for n in range(0, shape.each, VECTOR):
        vector = ", ".join(f"k{n + i}" for i in range(VECTOR))
        yield (
            f"add.u32 x, first, {n}; setp.lt.u32 p, x, {shape.stride}; "
            f"@p ld.global.v4.b32 {{{vector}}}, [at + {4 * n}];"
        )
    yield "mad.lo.u32 y, $7, 8, $5; st.shared.v2.b32 [y], {0, 0};"


def _as_integers(each: int) -> Iterator[str]:
    """Scores become integers of the same order; -0 becomes 0, so that these are equal where scores are."""
    for n in range(each):
        yield (
            f"mov.b32 f, k{n}; add.f32 f, f, 0f00000000; mov.b32 k{n}, f; "
            f"shr.s32 x, k{n}, 31; or.b32 x, x, 0x80000000; xor.b32 k{n}, k{n}, x;"
        )


def _wanted(shape: Shape) -> Iterator[str]:
    """How many to choose, want, of all blocks before recent, of which live are the thread's.

    Where all of these are wanted, or none, the least score is known.
    """
    yield f"add.s32 num, num, {shape.block_size - 1}; div.s32 num, num, {shape.block_size};"
    yield f"min.s32 num, num, {shape.max_blocks}; max.s32 num, num, 0;"
    yield f"sub.s32 recent, num, {shape.num_recent}; max.s32 recent, recent, 0;"
    yield "sub.s32 live, recent, first;"
    yield f"sub.s32 want, num, recent; sub.s32 want, {shape.num_selected}, want;"
    yield f"mov.b32 least, {INFINITY:#x}; setp.le.s32 p, want, 0; @p bra CHOSEN;"
    yield f"mov.b32 least, {LOWEST:#x}; setp.le.s32 p, recent, want; @p bra CHOSEN;"


def _ends(each: int) -> Iterator[str]:
    """Lo and hi of all candidates."""
    yield "mov.b32 lo, -1; mov.b32 hi, 0;"
    for n in range(each):
        yield f"setp.gt.s32 p, live, {n}; @p min.u32 lo, lo, k{n}; @p max.u32 hi, hi, k{n};"
    yield "redux.sync.min.u32 lo, lo, -1; redux.sync.max.u32 hi, hi, -1; mad.lo.u32 x, warp, 4, $5;"
    yield f"@is_first st.shared.b32 [x + {LOWS * 4}], lo; @is_first st.shared.b32 [x + {HIGHS * 4}], hi;"
    yield from block_barrier()
    yield "mad.lo.u32 x, lane, 4, $5;"
    yield f"ld.shared.b32 lo, [x + {LOWS * 4}]; ld.shared.b32 hi, [x + {HIGHS * 4}];"
    yield "redux.sync.min.u32 lo, lo, -1; redux.sync.max.u32 hi, hi, -1;"


def _counted(each: int) -> Iterator[str]:
    """All candidates from lo to hi, in bins of 1 << shift integers."""
    yield f"sub.u32 range, hi, lo; clz.b32 shift, range; sub.s32 shift, {32 - LOG_BINS}, shift;"
    yield "max.s32 shift, shift, 0;"
    yield from block_barrier()
    for n in range(each):
        yield (
            f"sub.u32 x, k{n}, lo; setp.le.u32 p, x, range; setp.gt.and.s32 p, live, {n}, p; "
            "shr.u32 x, x, shift; mad.lo.u32 x, x, 4, $5; @p red.shared.add.u32 [x], 1;"
        )
    yield from block_barrier()


def _next_range() -> Iterator[str]:
    """The bin that the last wanted one lies in becomes lo to hi; a round more, unless all of it is wanted.

    From the largest bin down: thread t has the bins 2 t and 2 t + 1 from the end.
    """
    yield f"mov.b32 x, {BINS - 2}; sub.u32 bin, x, $7; sub.u32 bin, bin, $7; mad.lo.u32 y, bin, 4, $5;"
    yield "ld.shared.v2.b32 {low_bin, high_bin}, [y]; add.u32 own, low_bin, high_bin;"
    yield from block_exclusive_sum("$5", TOTALS * 4)
    # Every bin has been read: the next round finds them empty.
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


def _listed(shape: Shape) -> Iterator[str]:
    """A thread's blocks that reach the least score, or are recent, behind those of the threads before it."""
    yield "mov.b32 chosen, 0; sub.s32 num, num, first;"
    for n in range(shape.each):
        yield (
            f"setp.ge.u32 p, k{n}, least; setp.le.or.s32 p, live, {n}, p; setp.gt.and.s32 p, num, {n}, p; "
            f"@p or.b32 chosen, chosen, {1 << n};"
        )
    yield "popc.b32 own, chosen;"
    yield from block_exclusive_sum("$5", TOTALS * 4)
    yield "add.u32 count, before, own;"
    yield f"mad.wide.u32 out, $6, {shape.max_blocks * 4}, $3; mad.wide.u32 out, before, 4, out;"
    for n in range(shape.each):
        yield (
            f"and.b32 x, chosen, {1 << n}; setp.ne.u32 p, x, 0; add.u32 x, first, {n}; "
            "@p st.global.b32 [out], x; @p add.u64 out, out, 4;"
        )
