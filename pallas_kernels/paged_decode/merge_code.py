"""What each thread of the merging kernel does: one query, and neighbours along a head.

Interpreted, the same arrays are read and written as a whole.

Arrays are [THREADS], one element a thread: thread i has query i mod tile_q.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.shared import lanes
from pallas_kernels.shared.head_dims import HeadCut

THREADS = 128
BY_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
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
    cut: HeadCut
    columns: int
    head_tiles: int
    at_once: int

    @property
    def groups(self) -> int:
        """Threads of a query."""
        return groups_of(self.tile_q)

    @property
    def each(self) -> int:
        """Neighbours that a thread has."""
        return self.columns // self.groups

    def places(self) -> tuple[Any, Any]:
        """Interpreted: each thread's query and group."""
        thread = jnp.arange(THREADS, dtype=jnp.int32)
        return thread % self.tile_q, jnp.minimum(thread // self.tile_q, self.groups - 1)


def groups_of(tile_q: int) -> int:
    """A power of 2, so that shares divide a head; a few threads are idle where it is no divisor."""
    return 1 << ((THREADS // tile_q).bit_length() - 1)


def of_queries(ref: Any, share: Share, *, is_interpreted: bool) -> Any:
    """Each thread's query's element of a vector [tile_q] in global memory."""
    if is_interpreted:
        return ref[...][share.places()[0]]
    result = plgpu.ShapeDtypeStruct((THREADS,), f32, BY_THREAD)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    return run(
        lambda _, vector_g: by_thread(lanes.loaded(vector_g, query_and_group(share)[0], of=lanes.f32()))
    )(ref)


def partials(
    refs: tuple[Any, Any, Any],
    first: Any,
    left: Any,
    head_tile: Any,
    part: Any,
    share: Share,
    *,
    is_interpreted: bool,
) -> tuple[list[Any], list[Any], list[list[Any]]]:
    """Largest scores, sums and accumulators of the next `at_once` partial results; past `left`, nothing.

    Args:
        refs: o_g [partials, head_tiles, padded_dim, tile_q]; top_g, total_g [partials, head_tiles, tile_q].
        first: The next.
        left: How many there are.
        head_tile: Which tile of query rows.
        part: Which columns of the head.
        share: Static sizes.
        is_interpreted: Without lanes.
    """
    if is_interpreted:
        query, group = share.places()
        column = part * share.columns + group * share.each
        found: list[Any] = []
        for j in range(share.at_once):
            o, top, total = (ref[first + jnp.minimum(j, left - 1), head_tile] for ref in refs)
            outs = [o[column + e, query] for e in range(share.each)]
            found += [jnp.where(j < left, x, y) for x, y in ((top[query], -jnp.inf), (total[query], 0.0))]
            found += [jnp.where(j < left, x, 0.0) for x in outs]
    else:
        one = plgpu.ShapeDtypeStruct((THREADS,), f32, BY_THREAD)
        scalar, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()
        types = (ref, ref, ref, scalar, scalar)
        run = plgpu.inline_mgpu(arg_types=types, return_type=(one,) * (share.at_once * (share.each + 2)))
        load = functools.partial(partials_by_thread, share=share)
        found = list(run(load)(*(ref.at[first, head_tile] for ref in refs), left, part))
    size = share.each + 2
    results = [found[i : i + size] for i in range(0, len(found), size)]
    return [r[0] for r in results], [r[1] for r in results], [r[2:] for r in results]


def store(
    out_ref: Any, lse_ref: Any, accs: list[Any], lse: Any, part: Any, share: Share, *, is_interpreted: bool
) -> None:
    """Output and LSE of a request.

    Args:
        out_ref: [rows, head_dim], or [rows, chunks, chunk] where the head is padded.
        lse_ref: [tile_q] f32.
        accs: The thread's neighbours, normalized.
        lse: Of the thread's query.
        part: Which columns of the head.
        share: Static sizes.
        is_interpreted: Without lanes.
    """
    if is_interpreted:
        n, cut = share.tile_q, share.cut
        block = jnp.stack(accs)[:, : share.groups * n].reshape(share.each, share.groups, n)
        block = block.T.reshape(n, share.columns)[: share.rows].astype(out_ref.dtype)
        if cut.is_padded:
            out_ref[:, part] = block[:, : cut.chunk]
        else:
            out_ref[:, pl.ds(part * share.columns, share.columns)] = block

        @pl.when(part == 0)
        def _() -> None:
            lse_ref[...] = lse[:n]

        return
    ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT
    run = plgpu.inline_mgpu(arg_types=(ref, ref, [BY_THREAD] * share.each, BY_THREAD, scalar), return_type=())
    run(functools.partial(store_by_thread, share=share, dtype=out_ref.dtype))(
        out_ref, lse_ref, accs, lse, part
    )


def partials_by_thread(
    _: Any, o_ref: Any, top_ref: Any, total_ref: Any, left: Any, part: Any, *, share: Share
) -> Any:
    """See partials."""
    query, group = query_and_group(share)
    group = arith.minsi(group, lanes.const(share.groups - 1))
    n, left = share.tile_q, left.registers.item()
    column = lanes.add(lanes.times(part.registers.item(), share.columns), lanes.times(group, share.each))
    place = lambda ref, index: lanes.ptx(
        "mad.wide.u32 $0, $2, 4, $1;", utils.memref_ptr(ref), index, of=lanes.i64()
    )
    at = place(o_ref, lanes.add(lanes.times(column, n), query))
    of_query = [(place(top_ref, query), "0fFF800000"), (place(total_ref, query), "0f00000000")]

    def read(address: Any, offset: int, nth: int, otherwise: str) -> Any:
        code = (
            f"{{ .reg .pred live; setp.gt.s32 live, $2, {nth}; mov.f32 $0, {otherwise}; "
            f"@live ld.global.f32 $0, [$1 + {offset}]; }}"
        )
        return by_thread(lanes.ptx(code, address, left, of=lanes.f32(), touches_memory=True))

    found = []
    for j in range(share.at_once):
        of_partial = 4 * j * share.head_tiles * n
        found += [read(address, of_partial, j, otherwise) for address, otherwise in of_query]
        start = of_partial * share.cut.padded_dim
        found += [read(at, start + 4 * e * n, j, "0f00000000") for e in range(share.each)]
    return tuple(found)


def store_by_thread(
    _: Any, out_ref: Any, lse_ref: Any, accs: Any, lse: Any, part: Any, *, share: Share, dtype: Any
) -> Any:
    """See store."""
    query, group = query_and_group(share)
    part, cut = part.registers.item(), share.cut
    is_below = lambda x, limit: arith.cmpi(arith.CmpIPredicate.slt, x, lanes.const(limit))
    inside = lanes.times(group, share.each)
    column = lanes.add(lanes.times(part, cut.chunk if cut.is_padded else share.columns), inside)
    offset = lanes.add(lanes.times(query, cut.chunks * cut.chunk), column)
    at = lanes.ptx("mad.wide.u32 $0, $2, 2, $1;", utils.memref_ptr(out_ref), offset, of=lanes.i64())
    is_live = arith.andi(is_below(query, share.rows), is_below(group, share.groups))
    for e in range(0, share.each, 2):
        is_column = is_below(lanes.add(inside, e), cut.chunk) if cut.is_padded else is_live
        pair = lanes.rounded(number(accs[e]), number(accs[e + 1]), dtype)
        code = f"st.global.b32 [$0 + {2 * e}], $1;"
        utils.inline_ptx(code, at, pair, predicate=arith.andi(is_live, is_column), has_side_effects=True)
    is_first = is_below(lanes.add(group, part), 1)
    at = lanes.ptx("mad.wide.u32 $0, $2, 4, $1;", utils.memref_ptr(lse_ref), query, of=lanes.i64())
    utils.inline_ptx("st.global.f32 [$0], $1;", at, number(lse), predicate=is_first, has_side_effects=True)
    return ()


def query_and_group(share: Share) -> tuple[Any, Any]:
    """Of this thread."""
    thread = arith.andi(utils.thread_idx(), lanes.const(THREADS - 1))
    n = lanes.const(share.tile_q)
    return arith.remui(thread, n), arith.divui(thread, n)


def by_thread(x: Any) -> Any:
    """A register as an array [THREADS]."""
    element = vector.from_elements(ir.VectorType.get((1,), lanes.f32()), [x])
    return lanes.shaped([element], BY_THREAD.to_mgpu(), (THREADS,))


def number(array: Any) -> Any:
    """The inverse of by_thread."""
    return vector.extract(array.registers.item(), dynamic_position=[], static_position=[0])
