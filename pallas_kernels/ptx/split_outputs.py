"""Loads and stores of decode's combine kernel. Each thread has one query and adjacent columns of a head.

Arrays are [THREADS], one element per thread: thread i has query i mod tile_q.
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
    """Part of the outputs that one thread block combines: `columns` columns of a head, for `tile_q` queries.

    Attributes:
        tile_q: Number of query rows of the split outputs.
        rows: Number of valid query rows.
        head_chunks: Division of head_dim into chunks.
        columns: Number of columns, a power of 2 that divides head_dim. If the head is padded, the columns of
            a chunk.
        head_tiles: Number of tiles of query rows of the split outputs.
        splits_per_load: Number of splits that are loaded together.
    """

    tile_q: int
    rows: int
    head_chunks: HeadChunks
    columns: int
    head_tiles: int
    splits_per_load: int

    @property
    def groups(self) -> int:
        """Number of threads per query."""
        return num_thread_groups(self.tile_q)

    @property
    def columns_per_thread(self) -> int:
        """Number of adjacent columns of a thread."""
        return self.columns // self.groups

    def query_and_group(self) -> tuple[jax.Array, jax.Array]:
        """Return the query and the group of each thread; fallbacks use it."""
        thread = jnp.arange(THREADS, dtype=jnp.int32)
        return thread % self.tile_q, jnp.minimum(thread // self.tile_q, self.groups - 1)


def num_thread_groups(tile_q: int) -> int:
    """Return the number of threads per query, a power of 2; the remaining threads are idle."""
    return 1 << ((THREADS // tile_q).bit_length() - 1)


type PerThread = jax.Array
"""[THREADS], one element per thread."""

PER_THREAD = plgpu.ShapeDtypeStruct((THREADS,), f32, BY_THREAD)


# ------------------------------------------------------------------------------------- loads
def _load_per_query(ref: Ref, *, tile: CombineTile) -> PerThread:
    return ref[...][tile.query_and_group()[0]]


@with_fallback(_load_per_query)
def load_per_query(ref: Ref, *, tile: CombineTile) -> PerThread:
    """Load the element of each thread's query from a vector [tile_q] in global memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=PER_THREAD)
    def load(_ctx: mgpu.LaunchContext, ref: ir.Value) -> mgpu.FragmentedArray:
        query, _ = _query_and_group(tile)
        return fragments.array_by_thread(lanes.load(ref, query, result_type=lanes.f32()))

    return load(ref)


type SplitOutputs = tuple[list[PerThread], list[PerThread], list[list[PerThread]]]
"""Row maxima, row sums and accumulators, one entry per split."""


def _load_split_outputs(
    refs: tuple[Ref, Ref, Ref],
    first: Scalar | int,
    num_remaining: Scalar | int,
    head_tile: Scalar | int,
    strip: Scalar | int,
    *,
    tile: CombineTile,
) -> SplitOutputs:
    query, group = tile.query_and_group()
    column = strip * tile.columns + group * tile.columns_per_thread
    values: list[PerThread] = []
    for j in range(tile.splits_per_load):
        o, row_max, row_sum = (ref[first + jnp.minimum(j, num_remaining - 1), head_tile] for ref in refs)
        outs = [o[column + e, query] for e in range(tile.columns_per_thread)]
        is_split = j < num_remaining
        values += [jnp.where(is_split, row_max[query], -jnp.inf), jnp.where(is_split, row_sum[query], 0.0)]
        values += [jnp.where(is_split, x, 0.0) for x in outs]
    return _group_by_split(values, tile)


@with_fallback(_load_split_outputs)
def load_split_outputs(
    refs: tuple[Ref, Ref, Ref],
    first: Scalar | int,
    num_remaining: Scalar | int,
    head_tile: Scalar | int,
    strip: Scalar | int,
    *,
    tile: CombineTile,
) -> SplitOutputs:
    """Load the outputs of the next `splits_per_load` splits; splits after the last one are empty.

    Args:
        refs: Outputs [splits, head_tiles, padded_dim, tile_q], row maxima [splits, head_tiles, tile_q] and
            row sums like these.
        first: Index of the first split to load.
        num_remaining: Number of splits from `first` on.
        head_tile: Index of the tile of query rows.
        strip: Index of the strip of `columns` columns of the head.
        tile: Static sizes.
    """
    types = *[plgpu.RefType()] * 3, SCALAR, SCALAR
    num_values = tile.splits_per_load * (tile.columns_per_thread + 2)
    run = plgpu.inline_mgpu(arg_types=types, return_type=(PER_THREAD,) * num_values)
    load = functools.partial(_load_by_threads, tile=tile)
    values = run(load)(*(ref.at[first, head_tile] for ref in refs), num_remaining, strip)
    return _group_by_split(list(values), tile)


def _group_by_split(values: list[PerThread], tile: CombineTile) -> SplitOutputs:
    """Group a flat list by kind. It has a row maximum, a row sum and the accumulators of each split."""
    size = tile.columns_per_thread + 2
    splits = [values[i : i + size] for i in range(0, len(values), size)]
    return [x[0] for x in splits], [x[1] for x in splits], [x[2:] for x in splits]


def _load_by_threads(
    _ctx: mgpu.LaunchContext,
    o_ref: ir.Value,
    row_max_ref: ir.Value,
    row_sum_ref: ir.Value,
    num_remaining: mgpu.FragmentedArray,
    strip: mgpu.FragmentedArray,
    *,
    tile: CombineTile,
) -> tuple[mgpu.FragmentedArray, ...]:
    query, group = _query_and_group(tile)
    # Idle threads load what the last group loads.
    group = arith.minsi(group, lanes.const(tile.groups - 1))
    n, remaining = tile.tile_q, fragments.scalar(num_remaining)
    column = lanes.add(
        lanes.times(fragments.scalar(strip), tile.columns), lanes.times(group, tile.columns_per_thread)
    )
    o_pointer = lanes.element_pointer(o_ref, lanes.add(lanes.times(column, n), query), 4)
    # Splits that do not exist have a row maximum of -inf and a row sum of 0.
    row_stats = [
        (lanes.element_pointer(row_max_ref, query, 4), "0fFF800000"),
        (lanes.element_pointer(row_sum_ref, query, 4), "0f00000000"),
    ]

    def read(pointer: ir.Value, offset: int, split: int, otherwise: str) -> mgpu.FragmentedArray:
        code = (
            f"{{ .reg .pred live; setp.gt.s32 live, $2, {split}; mov.f32 $0, {otherwise}; "
            f"@live ld.global.f32 $0, [$1 + {offset}]; }}"
        )
        x = lanes.ptx(code, pointer, remaining, result_type=lanes.f32(), touches_memory=True)
        return fragments.array_by_thread(x)

    values = []
    for j in range(tile.splits_per_load):
        split_offset = 4 * j * tile.head_tiles * n
        values += [read(pointer, split_offset, j, otherwise) for pointer, otherwise in row_stats]
        o_offset = split_offset * tile.head_chunks.padded_dim
        columns = range(tile.columns_per_thread)
        values += [read(o_pointer, o_offset + 4 * e * n, j, "0f00000000") for e in columns]
    return tuple(values)


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
    n, head_chunks = tile.tile_q, tile.head_chunks
    block = jnp.stack(accs)[:, : tile.groups * n].reshape(tile.columns_per_thread, tile.groups, n)
    block = block.T.reshape(n, tile.columns)[: tile.rows].astype(out_ref.dtype)
    if head_chunks.is_padded:
        out_ref[:, strip] = block[:, : head_chunks.chunk_dim]
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
    """Store a strip of a request's output and, with the first strip, its log-sum-exp.

    Args:
        out_ref: Output of the request [rows, head_dim], or [rows, chunks, chunk_dim] if the head is padded.
        lse_ref: Log-sum-exp of each query, f32 [tile_q].
        accs: Normalized output in the thread's adjacent columns.
        lse: Log-sum-exp of the thread's query.
        strip: Index of the strip of `columns` columns of the head.
        tile: Static sizes.
    """
    ref = plgpu.RefType()
    types = ref, ref, [BY_THREAD] * tile.columns_per_thread, BY_THREAD, SCALAR
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(functools.partial(_store_by_threads, tile=tile, dtype=out_ref.dtype))(
        out_ref, lse_ref, accs, lse, strip
    )


def _store_by_threads(
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
    strip_index, head_chunks = fragments.scalar(strip), tile.head_chunks
    strip_column = lanes.times(group, tile.columns_per_thread)
    strip_width = head_chunks.chunk_dim if head_chunks.is_padded else tile.columns
    column = lanes.add(lanes.times(strip_index, strip_width), strip_column)
    row_size = head_chunks.num_chunks * head_chunks.chunk_dim
    pointer = lanes.element_pointer(out_ref, lanes.add(lanes.times(query, row_size), column), 2)
    # Padding rows, idle threads and padding columns store nothing.
    is_valid = arith.andi(lanes.is_below(query, tile.rows), lanes.is_below(group, tile.groups))
    for e in range(0, tile.columns_per_thread, 2):
        is_column = is_valid
        if head_chunks.is_padded:
            is_column = lanes.is_below(lanes.add(strip_column, e), head_chunks.chunk_dim)
        pair = pack_16bit(fragments.thread_value(accs[e]), fragments.thread_value(accs[e + 1]), dtype)
        predicate = arith.andi(is_valid, is_column)
        lanes.run(f"st.global.b32 [$0 + {2 * e}], $1;", pointer, pair, predicate=predicate)
    # The first group of the first strip stores the log-sum-exps.
    is_first = lanes.is_below(lanes.add(group, strip_index), 1)
    lse_pointer = lanes.element_pointer(lse_ref, query, 4)
    lanes.run("st.global.f32 [$0], $1;", lse_pointer, fragments.thread_value(lse), predicate=is_first)
    return ()


def _query_and_group(tile: CombineTile) -> tuple[ir.Value, ir.Value]:
    """Return the query of this thread, and its group among the threads of the query."""
    thread = arith.andi(mgpu.thread_idx(), lanes.const(THREADS - 1))
    n = lanes.const(tile.tile_q)
    return arith.remui(thread, n), arith.divui(thread, n)
