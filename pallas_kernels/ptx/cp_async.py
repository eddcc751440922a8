"""Copies from global to shared memory by cp.async, which every GPU since Ampere has; for GPUs without TMA.

Each lane copies units of 16 bytes and waits for its own copies, in the order in which groups were committed.
The copies write the swizzled tiles of `swizzled_smem` as TMA would, so that the same code reads them.
`cp_async_paged` has the copies from a paged cache.
"""

import functools
import math

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import SCALAR, require_tiles
from pallas_kernels.shared.memory import HeadChunks, swizzle_bytes, swizzle_transforms
from pallas_kernels.shared.types import Ref, Scalar

WARPS, LANES = 4, 32
UNIT = 16  # bytes of a copy


# ------------------------------------------------------------------------------------- swizzled tiles
def byte_strides(ref: ir.Value) -> list[int]:
    """Return the strides of a reference's axes in bytes."""
    ref_type = ir.MemRefType(ref.type)
    strides, _ = ref_type.get_strides_and_offset()
    return [stride * mgpu.bytewidth(ref_type.element_type) for stride in strides]


class SwizzledRows:
    """Tiles [chunks, rows, width] in swizzled shared memory, which lanes fill in units of 16 bytes.

    Attributes:
        rows_at_once: Number of rows that a warp fills at once: a row of a swizzle atom per 4 or 8 lanes.
    """

    def __init__(self, ref: ir.Value, num_rows: int, head: HeadChunks, *, swizzle: int | None = None):
        ref_type = ir.MemRefType(ref.type)
        self.itemsize, self.head = mgpu.bytewidth(ref_type.element_type), head
        self.row_bytes, self.num_rows = head.width * self.itemsize, num_rows
        self.swizzle = swizzle or swizzle_bytes(self.itemsize, head.width)
        require_tiles(ref_type, rows=num_rows, row_bytes=self.row_bytes, swizzle=self.swizzle)
        self.units = self.swizzle // UNIT
        self.rows_at_once = LANES // self.units
        self.first = lanes.address(ref)

    def unit_and_row(self, thread: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the unit of a swizzle atom's row that a thread copies, and the thread's row."""
        shift = self.units.bit_length() - 1
        return arith.andi(thread, lanes.const(self.units - 1)), arith.shrui(thread, lanes.const(shift))

    def copy_row(
        self,
        row: ir.Value,
        unit: ir.Value,
        source: ir.Value,
        size: ir.Value | None = None,
        *,
        start: int = 0,
    ) -> None:
        """Start to copy one unit of each swizzle atom of a row, with zeros where TMA would pad a chunk.

        Args:
            row: Row of the tile.
            unit: Index of the unit in each atom's row.
            source: Address of the row's first element.
            size: Number of bytes to copy of each unit: 16, or 0 to fill it with zeros; None = 16.
            start: Number that is added to `row`, whose multiples of 8 need no register.
        """
        row = lanes.add(row, start % 8) if start % 8 else row
        # The swizzle XORs the 16-byte unit with the row (128 bytes) or with half of it (64 bytes).
        row_in_atom = arith.andi(row, lanes.const(7))
        phase = row_in_atom if self.swizzle == 128 else arith.shrui(row_in_atom, lanes.const(1))
        columns = self.row_bytes // self.swizzle
        at = lanes.add(
            self.first,
            lanes.times(arith.shrui(row, lanes.const(3)), columns * 8 * self.swizzle),
            lanes.times(row_in_atom, self.swizzle),
            lanes.times(arith.xori(unit, phase), UNIT),
        )
        code = "{ .reg .b64 x; cvt.u64.u32 x, $2; add.s64 $0, $1, x; }"
        source = lanes.ptx(code, source, lanes.times(unit, UNIT), result_type=lanes.i64())
        chunk_bytes = self.head.chunk_dim * self.itemsize
        for chunk in range(self.head.num_chunks):
            for column in range(columns):
                tile_index = start // 8 * columns + column
                target = chunk * self.num_rows * self.row_bytes + tile_index * 8 * self.swizzle
                place = f"[$0 + {target}], [$1 + {chunk * chunk_bytes + column * self.swizzle}], {UNIT}"
                num_units = chunk_bytes // UNIT - column * self.units
                num_bytes = size
                if num_units < self.units:
                    full = lanes.const(UNIT) if size is None else size
                    num_bytes = arith.select(lanes.is_below(unit, num_units), full, lanes.const(0))
                if num_bytes is None:
                    lanes.run(f"cp.async.cg.shared.global {place};", at, source)
                else:
                    lanes.run(f"cp.async.cg.shared.global {place}, $2;", at, source, num_bytes)


# ------------------------------------------------------------------------------------- tokens
def _copy_token_rows(
    tile_s: Ref,
    array_g: Ref,
    first_token: Scalar,
    first_head: Scalar,
    *,
    head: HeadChunks,
    rows_per_head: int,
    num_warps: int,
) -> None:
    tokens = jnp.clip(jnp.arange(rows_per_head, dtype=jnp.int32) + first_token, 0, array_g.shape[0] - 1)
    for i in range(tile_s.shape[1] // rows_per_head):
        for chunk in range(head.num_chunks):
            array = array_g[:, first_head + i, chunk] if head.is_padded else array_g[:, first_head + i]
            padding = ((0, 0), (0, head.width - head.chunk_dim))
            tile_s[chunk, pl.ds(i * rows_per_head, rows_per_head)] = jnp.pad(array[tokens], padding)


@with_fallback(_copy_token_rows)
def copy_token_rows(
    tile_s: Ref,
    array_g: Ref,
    first_token: Scalar,
    first_head: Scalar,
    *,
    head: HeadChunks,
    rows_per_head: int,
    num_warps: int,
) -> None:
    """Start to copy consecutive tokens of one or more heads; each of several warps copies its own rows.

    Args:
        tile_s: Tile in SMEM, [chunks, rows, width] in 16 bits: the tokens of a head, then of the next head.
        array_g: Array [tokens, heads, head_dim] or [tokens, heads, chunks, chunk_dim].
        first_token: Token of each head's first row. The nearest token replaces tokens outside of the array.
        first_head: Head of the first rows.
        head: Static: division of a head into chunks.
        rows_per_head: Static: number of rows of a head, a power of two of at least 8.
        num_warps: Static: number of warps that copy.
    """
    types = plgpu.RefType(swizzle_transforms(2)), plgpu.RefType(), SCALAR, SCALAR
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    body = functools.partial(
        _copy_token_rows_by_lanes,
        num_rows=tile_s.shape[1],
        head=head,
        rows_per_head=rows_per_head,
        num_warps=num_warps,
    )
    run(body)(tile_s, array_g, first_token, first_head)


def _copy_token_rows_by_lanes(
    _ctx: mgpu.LaunchContext,
    tile_s: ir.Value,
    array_g: ir.Value,
    first_token: mgpu.FragmentedArray,
    first_head: mgpu.FragmentedArray,
    *,
    num_rows: int,
    head: HeadChunks,
    rows_per_head: int,
    num_warps: int,
) -> tuple[()]:
    (num_tokens, *_), (stride, head_stride, *_) = ir.MemRefType(array_g.type).shape, byte_strides(array_g)
    start_token, start_head = fragments.scalar(first_token), fragments.scalar(first_head)
    tile = SwizzledRows(tile_s, num_rows, head)
    lane, warp = lanes.lane_and_warp(num_warps=num_warps)
    unit, lane_row = tile.unit_and_row(lane)
    warp_rows, shift = num_rows // num_warps, rows_per_head.bit_length() - 1
    first_row = lanes.add(lanes.times(warp, warp_rows), lane_row)
    for start in range(0, warp_rows, tile.rows_at_once):
        if rows_per_head == num_rows:
            token, head_index = lanes.add(start_token, first_row, start), start_head
        else:
            row = lanes.add(first_row, start)
            token = lanes.add(start_token, arith.andi(row, lanes.const(rows_per_head - 1)))
            head_index = lanes.add(start_head, arith.shrui(row, lanes.const(shift)))
        token = arith.minsi(arith.maxsi(token, lanes.const(0)), lanes.const(num_tokens - 1))
        source = lanes.advance(lanes.pointer(array_g), token, stride, lanes.times(head_index, head_stride))
        tile.copy_row(first_row, unit, source, start=start)
    return ()


# ------------------------------------------------------------------------------------- rows
def _copy_queries(q_s: Ref, query_g: Ref, *, head: HeadChunks) -> None:
    rows, (_, tile_q, _) = query_g.shape[0], q_s.shape
    padding = ((0, tile_q - rows), (0, head.width - head.chunk_dim))
    for chunk in range(head.num_chunks):
        q_s[chunk] = jnp.pad(query_g[:, chunk] if head.is_padded else query_g[...], padding)


@with_fallback(_copy_queries)
def copy_queries(q_s: Ref, query_g: Ref, *, head: HeadChunks) -> None:
    """Start to copy a tile of query rows, after all warps have reached this call; rows past the last are 0.

    Args:
        q_s: Queries in SMEM, [chunks, tile_q, width].
        query_g: Queries in global memory, [rows, head_dim] or [rows, chunks, chunk_dim].
        head: Static: division of a head into chunks.
    """
    types = plgpu.RefType(swizzle_transforms(2)), plgpu.RefType()
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(functools.partial(_copy_rows_by_lanes, num_rows=q_s.shape[1], head=head))(q_s, query_g)


def _copy_rows_by_lanes(
    _ctx: mgpu.LaunchContext,
    tile_s: ir.Value,
    rows_g: ir.Value,
    *,
    num_rows: int,
    head: HeadChunks,
    has_barrier: bool = True,
) -> tuple[()]:
    (num_valid, *_), (stride, *_) = ir.MemRefType(rows_g.type).shape, byte_strides(rows_g)
    tile = SwizzledRows(tile_s, num_rows, head, swizzle=128)
    lane, warp = lanes.lane_and_warp()
    unit, row_in_warp = tile.unit_and_row(lane)
    # Warps past the last row copy it again, and write the same bytes.
    if has_barrier:
        mgpu.warpgroup_barrier()  # no warp reads the shared memory any more
    for start in range(0, num_rows, WARPS * tile.rows_at_once):
        row = lanes.add(lanes.times(warp, tile.rows_at_once), row_in_warp, start)
        row = arith.minsi(row, lanes.const(num_rows - 1))
        size = None
        if num_valid < num_rows:
            size = arith.select(lanes.is_below(row, num_valid), lanes.const(UNIT), lanes.const(0))
        source = lanes.advance(
            lanes.pointer(rows_g), arith.minsi(row, lanes.const(num_valid - 1)), stride, lanes.const(0)
        )
        tile.copy_row(row, unit, source, size)
    return ()


def _copy_rows(tile_s: Ref, rows_g: Ref) -> None:
    tile_s[...] = rows_g[...]


@with_fallback(_copy_rows)
def copy_rows(tile_s: Ref, rows_g: Ref) -> None:
    """Start to copy rows to a tile that no warp reads any more; the warps share the rows.

    Args:
        tile_s: Tile in SMEM, [rows, width] in 16 bits; width is a multiple of 64.
        rows_g: Rows in global memory, [rows, width], each contiguous.
    """
    rows, width = tile_s.shape
    head = HeadChunks(1, width, width, width, is_padded=False)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzle_transforms(2)), plgpu.RefType()), return_type=())
    run(functools.partial(_copy_rows_by_lanes, num_rows=rows, head=head, has_barrier=False))(tile_s, rows_g)


# ------------------------------------------------------------------------------------- numbers
def _copy_numbers(to_s: Ref, from_g: Ref, index: Scalar, first: Scalar, *, num_warps: int) -> None:
    rows = [slice(None)] * (len(from_g.shape) - 2)
    to_s[...] = from_g[(index, *rows, pl.ds(first, to_s.shape[-1]))]


@with_fallback(_copy_numbers)
def copy_numbers(to_s: Ref, from_g: Ref, index: Scalar, first: Scalar, *, num_warps: int) -> None:
    """Start to copy 32-bit numbers, `from_g[index, ..., first : first + width]`; one warp copies them.

    Args:
        to_s: Numbers in SMEM, [width] or [rows, width]; width is a power of two of at least 4.
        from_g: Array [n, columns] or [n, rows, columns] in global memory; columns is a multiple of 4.
        index: Index in the first axis.
        first: First column, a multiple of 4.
        num_warps: Static: number of warps that call this.
    """
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR), return_type=())
    body = functools.partial(_copy_numbers_by_lanes, shape=to_s.shape, num_warps=num_warps)
    run(body)(to_s, from_g, index, first)


def _copy_numbers_by_lanes(
    _ctx: mgpu.LaunchContext,
    to_s: ir.Value,
    from_g: ir.Value,
    index: mgpu.FragmentedArray,
    first: mgpu.FragmentedArray,
    *,
    shape: tuple[int, ...],
    num_warps: int,
) -> tuple[()]:
    strides = byte_strides(from_g)
    lane, warp = lanes.lane_and_warp(num_warps=num_warps)
    units_per_row = shape[-1] * 4 // UNIT
    num_units = math.prod(shape) * 4 // UNIT
    start = lanes.times(fragments.scalar(first), 4)
    for first_unit in range(0, num_units, LANES):
        unit = lanes.add(lane, first_unit)
        column = lanes.times(arith.andi(unit, lanes.const(units_per_row - 1)), UNIT)
        offset = lanes.add(start, column)
        if len(shape) > 1:
            row = arith.shrui(unit, lanes.const(units_per_row.bit_length() - 1))
            offset = lanes.add(offset, lanes.times(row, strides[1]))
        source = lanes.advance(lanes.pointer(from_g), fragments.scalar(index), strides[0], offset)
        target = lanes.add(lanes.address(to_s), lanes.times(unit, UNIT))
        is_copied = arith.andi(lanes.is_below(warp, 1), lanes.is_below(unit, num_units))
        lanes.run("cp.async.cg.shared.global [$0], [$1], 16;", target, source, predicate=is_copied)
    return ()


# ------------------------------------------------------------------------------------- groups and barriers
def _nothing(**_: int) -> None:
    """Do nothing: in interpret mode copies are complete at once."""


@with_fallback(_nothing)
def commit_copies() -> None:
    """Make all copies since the last call a group, which may be empty."""
    _run_ptx("cp.async.commit_group;")


@with_fallback(_nothing)
def wait_for_warp(*, num_pending: int) -> None:
    """Wait until at most the last `num_pending` groups of each lane of the warp are incomplete."""
    _run_ptx(f"cp.async.wait_group {num_pending}; bar.warp.sync -1;")


@with_fallback(_nothing)
def wait_for_warpgroup(*, num_pending: int) -> None:
    """Wait until at most the last `num_pending` groups of each thread are incomplete."""
    _run_ptx(f"cp.async.wait_group {num_pending};", barrier_warpgroups=1)


@with_fallback(_nothing)
def wait_for_team(*, num_pending: int, num_warpgroups: int) -> None:
    """Wait until all warpgroups have arrived and at most `num_pending` groups of each thread are incomplete.

    In interpret mode the caller must wait for the other warpgroups.
    """
    _run_ptx(f"cp.async.wait_group {num_pending};", barrier_warpgroups=num_warpgroups)


@with_fallback(lambda *, num_warps: jnp.int32(0))
def warp_index(*, num_warps: int) -> Scalar:
    """Return the warp's index among `num_warps` warps, a scalar that differs between warps; else 0."""

    @plgpu.inline_mgpu(arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def index(_ctx: mgpu.LaunchContext) -> mgpu.FragmentedArray:
        return fragments.as_scalar(lanes.lane_and_warp(num_warps=num_warps)[1])

    return index()


@with_fallback(_nothing)
def release_to_warp() -> None:
    """Wait until all lanes of the warp have read shared memory, so that copies may overwrite it."""
    _run_ptx("bar.warp.sync -1;")


TEAM_BARRIER = 15  # JAX uses the barriers 0 to the number of warpgroups


def _run_ptx(code: str, *, barrier_warpgroups: int = 0) -> None:
    """Emit PTX, and then a barrier of this number of warpgroups: all of the thread block, or 1."""

    @plgpu.inline_mgpu(arg_types=(), return_type=())
    def run(_ctx: mgpu.LaunchContext) -> tuple[()]:
        lanes.run(code, convergent=True)
        if barrier_warpgroups == 1:
            mgpu.warpgroup_barrier()
        elif barrier_warpgroups:
            num_threads = barrier_warpgroups * WARPS * LANES
            lanes.run(f"bar.sync {TEAM_BARRIER}, {num_threads};", convergent=True)
        return ()

    run()
