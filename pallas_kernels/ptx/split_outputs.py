"""Loads and stores of the merging kernel, whose threads have a query each, and neighbours along a head.

Arrays are [THREADS], one element a thread: thread i has query i mod tile_q.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import BY_THREAD, SCALAR, THREADS
from pallas_kernels.ptx.mma import pack_16bit
from pallas_kernels.shared.head_dims import HeadChunks
from pallas_kernels.shared.types import Ref, Scalar

f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineTile:
    """What one thread block merges: `columns` of a head for each of `tile_q` queries; static.

    Attributes:
        tile_q: Query rows of the partial results.
        rows: Live ones.
        cut: The cut of head_dim.
        columns: A power of 2 that divides the head; where the head is cut with padding, a chunk.
        head_tiles: Of the partial results.
        at_once: Partial results loaded together.
    """

    tile_q: int
    rows: int
    cut: HeadChunks
    columns: int
    head_tiles: int
    at_once: int

    @property
    def groups(self) -> int:
        """Threads of a query."""
        return num_thread_groups(self.tile_q)

    @property
    def each(self) -> int:
        """Neighbours that a thread has."""
        return self.columns // self.groups

    def places(self) -> tuple[jax.Array, jax.Array]:
        """Each thread's query and group, for fallbacks."""
        thread = jnp.arange(THREADS, dtype=jnp.int32)
        return thread % self.tile_q, jnp.minimum(thread // self.tile_q, self.groups - 1)


def num_thread_groups(tile_q: int) -> int:
    """A power of 2, so that shares divide a head; a few threads are idle where it is no divisor."""
    return 1 << ((THREADS // tile_q).bit_length() - 1)


type PerThread = jax.Array
"""[THREADS], an element of each thread."""

ONE = plgpu.ShapeDtypeStruct((THREADS,), f32, BY_THREAD)


# ------------------------------------------------------------------------------------- loads
def _of_queries(ref: Ref, *, tile: CombineTile) -> PerThread:
    return ref[...][tile.places()[0]]


@with_fallback(_of_queries)
def load_per_query(ref: Ref, *, tile: CombineTile) -> PerThread:
    """Each thread's query's element of a vector [tile_q] in global memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=ONE)
    def load(_ctx: mgpu.LaunchContext, ref: ir.Value) -> mgpu.FragmentedArray:
        return fragments.by_thread(lanes.loaded(ref, _query_and_group(tile)[0], of=lanes.f32()))

    return load(ref)


type Partials = tuple[list[PerThread], list[PerThread], list[list[PerThread]]]


def _partials(
    refs: tuple[Ref, Ref, Ref],
    first: Scalar | int,
    left: Scalar | int,
    head_tile: Scalar | int,
    strip: Scalar | int,
    *,
    tile: CombineTile,
) -> Partials:
    query, group = tile.places()
    column = strip * tile.columns + group * tile.each
    found: list[PerThread] = []
    for j in range(tile.at_once):
        o, top, total = (ref[first + jnp.minimum(j, left - 1), head_tile] for ref in refs)
        outs = [o[column + e, query] for e in range(tile.each)]
        found += [jnp.where(j < left, x, y) for x, y in ((top[query], -jnp.inf), (total[query], 0.0))]
        found += [jnp.where(j < left, x, 0.0) for x in outs]
    return _by_kind(found, tile)


@with_fallback(_partials)
def load_split_outputs(
    refs: tuple[Ref, Ref, Ref],
    first: Scalar | int,
    left: Scalar | int,
    head_tile: Scalar | int,
    strip: Scalar | int,
    *,
    tile: CombineTile,
) -> Partials:
    """Largest scores, sums and accumulators of the next `at_once` partial results; past `left`, nothing.

    Args:
        refs: O [splits, head_tiles, padded_dim, tile_q]; row maxima, row sums [splits, head_tiles, tile_q].
        first: The next.
        left: How many there are.
        head_tile: Which tile of query rows.
        strip: Which columns of the head.
        tile: Static sizes.
    """
    types = *[plgpu.RefType()] * 3, SCALAR, SCALAR
    run = plgpu.inline_mgpu(arg_types=types, return_type=(ONE,) * (tile.at_once * (tile.each + 2)))
    load = functools.partial(_load_partials, tile=tile)
    return _by_kind(list(run(load)(*(ref.at[first, head_tile] for ref in refs), left, strip)), tile)


def _by_kind(found: list[PerThread], tile: CombineTile) -> Partials:
    """From a largest score, a sum and accumulators of each partial result."""
    size = tile.each + 2
    results = [found[i : i + size] for i in range(0, len(found), size)]
    return [r[0] for r in results], [r[1] for r in results], [r[2:] for r in results]


def _load_partials(
    _ctx: mgpu.LaunchContext,
    o_ref: ir.Value,
    top_ref: ir.Value,
    total_ref: ir.Value,
    left: mgpu.FragmentedArray,
    strip: mgpu.FragmentedArray,
    *,
    tile: CombineTile,
) -> tuple[mgpu.FragmentedArray, ...]:
    query, group = _query_and_group(tile)
    group = arith.minsi(group, lanes.const(tile.groups - 1))
    n, num_left = tile.tile_q, fragments.scalar(left)
    column = lanes.add(lanes.times(fragments.scalar(strip), tile.columns), lanes.times(group, tile.each))
    at = lanes.element(o_ref, lanes.add(lanes.times(column, n), query), 4)
    of_query = [
        (lanes.element(top_ref, query, 4), "0fFF800000"),
        (lanes.element(total_ref, query, 4), "0f00000000"),
    ]

    def read(address: ir.Value, offset: int, nth: int, otherwise: str) -> mgpu.FragmentedArray:
        code = (
            f"{{ .reg .pred live; setp.gt.s32 live, $2, {nth}; mov.f32 $0, {otherwise}; "
            f"@live ld.global.f32 $0, [$1 + {offset}]; }}"
        )
        return fragments.by_thread(lanes.ptx(code, address, num_left, of=lanes.f32(), touches_memory=True))

    found = []
    for j in range(tile.at_once):
        of_partial = 4 * j * tile.head_tiles * n
        found += [read(address, of_partial, j, otherwise) for address, otherwise in of_query]
        start = of_partial * tile.cut.padded_dim
        found += [read(at, start + 4 * e * n, j, "0f00000000") for e in range(tile.each)]
    return tuple(found)


# ------------------------------------------------------------------------------------- stores
def _store_combined(
    out_ref: Ref,
    lse_ref: Ref,
    accs: list[PerThread],
    lse: PerThread,
    strip: Scalar | int,
    *,
    tile: CombineTile,
) -> None:
    n, cut = tile.tile_q, tile.cut
    block = jnp.stack(accs)[:, : tile.groups * n].reshape(tile.each, tile.groups, n)
    block = block.T.reshape(n, tile.columns)[: tile.rows].astype(out_ref.dtype)
    if cut.is_padded:
        out_ref[:, strip] = block[:, : cut.chunk_dim]
    else:
        out_ref[:, pl.ds(strip * tile.columns, tile.columns)] = block

    @pl.when(strip == 0)
    def _() -> None:
        lse_ref[...] = lse[:n]


@with_fallback(_store_combined)
def store_combined(
    out_ref: Ref,
    lse_ref: Ref,
    accs: list[PerThread],
    lse: PerThread,
    strip: Scalar | int,
    *,
    tile: CombineTile,
) -> None:
    """Output and LSE of a request.

    Args:
        out_ref: [rows, head_dim], or [rows, chunks, chunk] where the head is padded.
        lse_ref: [tile_q] f32.
        accs: The thread's neighbours, normalized.
        lse: Of the thread's query.
        strip: Which columns of the head.
        tile: Static sizes.
    """
    ref = plgpu.RefType()
    types = ref, ref, [BY_THREAD] * tile.each, BY_THREAD, SCALAR
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(functools.partial(_store_by_thread, tile=tile, dtype=out_ref.dtype))(
        out_ref, lse_ref, accs, lse, strip
    )


def _store_by_thread(
    _ctx: mgpu.LaunchContext,
    out_ref: ir.Value,
    lse_ref: ir.Value,
    accs: list[mgpu.FragmentedArray],
    lse: mgpu.FragmentedArray,
    strip: mgpu.FragmentedArray,
    *,
    tile: CombineTile,
    dtype: np.dtype,
) -> tuple[()]:
    query, group = _query_and_group(tile)
    nth, cut = fragments.scalar(strip), tile.cut
    inside = lanes.times(group, tile.each)
    column = lanes.add(lanes.times(nth, cut.chunk_dim if cut.is_padded else tile.columns), inside)
    at = lanes.element(out_ref, lanes.add(lanes.times(query, cut.num_chunks * cut.chunk_dim), column), 2)
    is_live = arith.andi(lanes.is_below(query, tile.rows), lanes.is_below(group, tile.groups))
    for e in range(0, tile.each, 2):
        is_column = lanes.is_below(lanes.add(inside, e), cut.chunk_dim) if cut.is_padded else is_live
        pair = pack_16bit(fragments.of_thread(accs[e]), fragments.of_thread(accs[e + 1]), dtype)
        lanes.run(f"st.global.b32 [$0 + {2 * e}], $1;", at, pair, predicate=arith.andi(is_live, is_column))
    is_first = lanes.is_below(lanes.add(group, nth), 1)
    at = lanes.element(lse_ref, query, 4)
    lanes.run("st.global.f32 [$0], $1;", at, fragments.of_thread(lse), predicate=is_first)
    return ()


def _query_and_group(tile: CombineTile) -> tuple[ir.Value, ir.Value]:
    """Of this thread."""
    thread = arith.andi(mgpu.thread_idx(), lanes.const(THREADS - 1))
    n = lanes.const(tile.tile_q)
    return arith.remui(thread, n), arith.divui(thread, n)
