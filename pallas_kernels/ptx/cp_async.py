"""Copies from global to shared memory by cp.async, which every GPU since Ampere has; for GPUs without TMA.

Each lane copies units of 16 bytes and waits for its own copies, in the order in which groups were committed.
The copies write the swizzled tiles of `swizzled_smem` as TMA would, so that the same code reads them. A warp
copies the 16 rows of a tile of 64 keys that it multiplies itself. So it waits for no other warp.
"""

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.ptx import fragments, lanes
from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.layouts import SCALAR, require_tiles
from pallas_kernels.shared.memory import HeadChunks, swizzle_bytes, swizzle_transforms
from pallas_kernels.shared.paged_kv import CacheTiling
from pallas_kernels.shared.types import Ref, Scalar

WARPS, WARP_ROWS, LANES = 4, 16, 32
UNIT = 16  # bytes of a copy


# ------------------------------------------------------------------------------------- keys and values
def _copy_tile(
    tile_s: Ref,
    cache_g: Ref,
    blocks: Sequence[Scalar],
    copies: Sequence[Scalar],
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
) -> None:
    head, num_rows = tiling.head, tiling.tokens_per_copy
    padding = ((0, 0), (0, head.width - head.chunk_dim))
    for i, block in enumerate(blocks):
        index = tiling.gmem_index(block, copies[i], kv_head)
        for chunk in range(head.num_chunks):
            rows = cache_g[(*index, chunk)] if head.is_padded else cache_g[index]
            tile_s[chunk, pl.ds(i * num_rows, num_rows)] = jnp.pad(rows, padding)


@with_fallback(_copy_tile)
def copy_tile(
    tile_s: Ref,
    cache_g: Ref,
    blocks: Sequence[Scalar],
    copies: Sequence[Scalar],
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
) -> None:
    """Start to copy a tile of 64 keys or values into shared memory; each warp copies its 16 rows.

    Args:
        tile_s: Tile in SMEM, [chunks, 64, width].
        cache_g: Cache as `CacheTiling.tile_cache` returns it.
        blocks: Block id of each `tiling.tokens_per_copy` tokens of the tile.
        copies: Index within the block of these tokens, in units of `tiling.tokens_per_copy`.
        kv_head: Index of the KV head.
        tiling: Static: division of blocks and heads.
    """
    itemsize, width = jnp.dtype(tile_s.dtype).itemsize, tiling.head.width
    types = (
        plgpu.RefType(swizzle_transforms(itemsize, width)),
        plgpu.RefType(),
        [SCALAR] * (2 * len(blocks) + 1),
    )
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(functools.partial(_copy_tile_by_lanes, tiling=tiling))(tile_s, cache_g, [kv_head, *blocks, *copies])


def _copy_tile_by_lanes(
    _ctx: mgpu.LaunchContext,
    tile_s: ir.Value,
    cache_g: ir.Value,
    scalars: Sequence[mgpu.FragmentedArray],
    *,
    tiling: CacheTiling,
) -> tuple[()]:
    kv_head, *registers = map(fragments.scalar, scalars)
    blocks, copies = registers[: len(registers) // 2], registers[len(registers) // 2 :]
    tile = _SwizzledRows(tile_s, WARPS * WARP_ROWS, tiling.head)
    lane, warp = lanes.lane_and_warp()
    unit, first_row = tile.unit_and_row(lane)
    tokens = tiling.tokens_per_copy
    for start in range(0, WARP_ROWS, tile.rows_at_once):
        row = lanes.add(first_row, start)
        # The block of tokens that holds this row of each warp, and the row's index in these tokens.
        indices = [(WARP_ROWS * w + start) // tokens for w in range(WARPS)]
        token = row
        if tokens < WARP_ROWS:
            token = lanes.add(first_row, start % tokens)
        elif tokens > WARP_ROWS:
            offset = arith.andi(lanes.times(warp, WARP_ROWS), lanes.const(tokens - 1))
            token = lanes.add(row, offset)
        block, copy = (_of_warp([values[i] for i in indices], warp) for values in (blocks, copies))
        source = cache_pointer(cache_g, block, copy, token, kv_head, tiling=tiling)
        tile.copy_row(lanes.add(lanes.times(warp, WARP_ROWS), row), unit, source)
    return ()


def _of_warp(values: Sequence[ir.Value], warp: ir.Value) -> ir.Value:
    """Return the element of `values` whose index is the warp's."""
    value = values[0]
    for index, other in enumerate(values[1:], 1):
        if other is not values[index - 1]:
            is_at_least = arith.cmpi(arith.CmpIPredicate.sge, warp, lanes.const(index))
            value = arith.select(is_at_least, other, value)
    return value


def cache_pointer(
    cache_g: ir.Value,
    block: ir.Value,
    copy: ir.Value,
    token: ir.Value,
    kv_head: ir.Value,
    *,
    tiling: CacheTiling,
) -> ir.Value:
    """Return the address of a token's first element in an array that `CacheTiling.tile_cache` returned."""
    strides = _byte_strides(cache_g)
    places = (kv_head, copy, token) if tiling.is_hnd else (copy, token, kv_head)
    offset = lanes.add(*(lanes.times(x, stride) for x, stride in zip(places, strides[1:4], strict=True)))
    return lanes.advance(lanes.pointer(cache_g), block, strides[0], offset)


def _byte_strides(ref: ir.Value) -> list[int]:
    ref_type = ir.MemRefType(ref.type)
    strides, _ = ref_type.get_strides_and_offset()
    return [stride * mgpu.bytewidth(ref_type.element_type) for stride in strides]


class _SwizzledRows:
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


# ------------------------------------------------------------------------------------- tiles of many warps
def _copy_block_rows(
    tile_s: Ref,
    cache_g: Ref,
    blocks: Sequence[Scalar],
    offset: Scalar,
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
    num_warps: int,
) -> None:
    copy = lax.div(offset, jnp.int32(tiling.tokens_per_copy))
    _copy_tile(tile_s, cache_g, blocks, [copy] * len(blocks), kv_head, tiling=tiling)


@with_fallback(_copy_block_rows)
def copy_block_rows(
    tile_s: Ref,
    cache_g: Ref,
    blocks: Sequence[Scalar],
    offset: Scalar,
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
    num_warps: int,
) -> None:
    """Start to copy a tile of keys or values into shared memory; each of several warps copies its own rows.

    Args:
        tile_s: Tile in SMEM, [chunks, tile_kv, width] in 16 bits.
        cache_g: Cache as `CacheTiling.tile_cache` returns it.
        blocks: Block id of each run of tokens among the warp's rows; these scalars differ between warps.
        offset: Index within its block of the first token of each run; this, too, differs between warps.
        kv_head: Index of the KV head.
        tiling: Static: division of blocks and heads.
        num_warps: Static: number of warps that copy; the fallback requires 1.
    """
    types = plgpu.RefType(swizzle_transforms(2)), plgpu.RefType(), [SCALAR] * (2 + len(blocks))
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    body = functools.partial(
        _copy_block_rows_by_lanes, num_rows=tile_s.shape[1], tiling=tiling, num_warps=num_warps
    )
    run(body)(tile_s, cache_g, [kv_head, offset, *blocks])


def _copy_block_rows_by_lanes(
    _ctx: mgpu.LaunchContext,
    tile_s: ir.Value,
    cache_g: ir.Value,
    scalars: Sequence[mgpu.FragmentedArray],
    *,
    num_rows: int,
    tiling: CacheTiling,
    num_warps: int,
) -> tuple[()]:
    kv_head, offset, *blocks = map(fragments.scalar, scalars)
    tile = _SwizzledRows(tile_s, num_rows, tiling.head)
    lane, warp = lanes.lane_and_warp(num_warps=num_warps)
    unit, lane_row = tile.unit_and_row(lane)
    warp_rows = num_rows // num_warps
    run_length, first_row = warp_rows // len(blocks), lanes.times(warp, warp_rows)
    for start in range(0, warp_rows, tile.rows_at_once):
        token, copy = lanes.add(offset, lane_row, start % run_length), lanes.const(0)
        source = cache_pointer(cache_g, blocks[start // run_length], copy, token, kv_head, tiling=tiling)
        tile.copy_row(lanes.add(first_row, lane_row), unit, source, start=start)
    return ()


def _copy_listed_keys(
    tile_s: Ref,
    cache_g: Ref,
    ids_g: Ref,
    table_g: Ref,
    first: Scalar,
    num_listed: Scalar,
    visible: tuple[Scalar, Scalar],
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
) -> None:
    head, (first_key, end_key) = tiling.head, visible
    index = jnp.minimum(jnp.arange(tile_s.shape[1], dtype=jnp.int32) + first, num_listed - 1)
    key = ids_g[...][index]
    is_visible = (key >= first_key) & (key < end_key)
    key = jnp.where(is_visible, key, end_key - 1)
    block, token = table_g[...][key // tiling.block_size], key % tiling.block_size
    cache = cache_g[...]
    rows = cache[block, kv_head, token, 0] if tiling.is_hnd else cache[block, token, 0, kv_head]
    rows = jnp.where(is_visible.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
    for chunk in range(head.num_chunks):
        row = rows[:, chunk] if head.is_padded else rows
        tile_s[chunk] = jnp.pad(row, ((0, 0), (0, head.width - head.chunk_dim)))


@with_fallback(_copy_listed_keys)
def copy_listed_keys(
    tile_s: Ref,
    cache_g: Ref,
    ids_g: Ref,
    table_g: Ref,
    first: Scalar,
    num_listed: Scalar,
    visible: tuple[Scalar, Scalar],
    kv_head: Scalar,
    *,
    tiling: CacheTiling,
) -> None:
    """Start to copy 64 listed keys or values into shared memory; each warp copies its 16 rows.

    Rows of listed keys that are not visible hold zeros. Rows past the list's end repeat the last listed key.

    Args:
        tile_s: Tile in SMEM, [chunks, 64, width].
        cache_g: Cache as `CacheTiling.tile_cache` returns it.
        ids_g: Positions of the listed keys in the request.
        table_g: Block id of each `tiling.block_size` keys of the request.
        first: Index in the list of the tile's first key.
        num_listed: Length of the list, at least 1.
        visible: Position of the first visible key, and one past that of the last.
        kv_head: Index of the KV head.
        tiling: Static: division of blocks, in copies of one token, and of heads.
    """
    assert tiling.tokens_per_copy == 1
    itemsize, width = jnp.dtype(tile_s.dtype).itemsize, tiling.head.width
    types = (
        plgpu.RefType(swizzle_transforms(itemsize, width)),
        *[plgpu.RefType()] * 3,
        [SCALAR] * 5,
    )
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    scalars = [first, num_listed, *visible, kv_head]
    run(functools.partial(_copy_listed_keys_by_lanes, tiling=tiling))(
        tile_s, cache_g, ids_g, table_g, scalars
    )


def _copy_listed_keys_by_lanes(
    _ctx: mgpu.LaunchContext,
    tile_s: ir.Value,
    cache_g: ir.Value,
    ids_g: ir.Value,
    table_g: ir.Value,
    scalars: Sequence[mgpu.FragmentedArray],
    *,
    tiling: CacheTiling,
) -> tuple[()]:
    first, num_listed, first_key, end_key, kv_head = map(fragments.scalar, scalars)
    tile = _SwizzledRows(tile_s, WARPS * WARP_ROWS, tiling.head)
    lane, warp = lanes.lane_and_warp()
    unit, lane_row = tile.unit_and_row(lane)
    last = arith.subi(num_listed, lanes.const(1))
    rows, keys, sources, sizes = [], [], [], []
    # Loads of the same kind follow each other, so that their latencies overlap.
    for start in range(0, WARP_ROWS, tile.rows_at_once):
        row = lanes.add(lanes.times(warp, WARP_ROWS), lane_row, start)
        rows.append(row)
        keys.append(lanes.load(ids_g, arith.minsi(lanes.add(first, row), last), lanes.i32()))
    shift = tiling.block_size.bit_length() - 1
    for key in keys:
        is_visible = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, key, first_key),
            arith.cmpi(arith.CmpIPredicate.slt, key, end_key),
        )
        visible_key = arith.select(is_visible, key, arith.subi(end_key, lanes.const(1)))
        block = lanes.load(table_g, arith.shrui(visible_key, lanes.const(shift)), lanes.i32())
        token = arith.andi(visible_key, lanes.const(tiling.block_size - 1))
        sources.append(cache_pointer(cache_g, block, token, lanes.const(0), kv_head, tiling=tiling))
        sizes.append(arith.select(is_visible, lanes.const(UNIT), lanes.const(0)))
    for row, source, size in zip(rows, sources, sizes, strict=True):
        tile.copy_row(row, unit, source, size)
    return ()


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
    (num_tokens, *_), (stride, head_stride, *_) = ir.MemRefType(array_g.type).shape, _byte_strides(array_g)
    start_token, start_head = fragments.scalar(first_token), fragments.scalar(first_head)
    tile = _SwizzledRows(tile_s, num_rows, head)
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


# ------------------------------------------------------------------------------------- scales
def _copy_token_scales(
    scale_s: Ref, scale_g: Ref, blocks: Sequence[Scalar], copies: Sequence[Scalar], kv_head: Scalar
) -> None:
    num = scale_g.shape[3]
    for i, block in enumerate(blocks):
        scale_s[pl.ds(i * num, num)] = scale_g[block, kv_head, copies[i]]


@with_fallback(_copy_token_scales)
def copy_token_scales(
    scale_s: Ref, scale_g: Ref, blocks: Sequence[Scalar], copies: Sequence[Scalar], kv_head: Scalar
) -> None:
    """Start to copy the scales per token of a tile of 64 keys; each warp copies those of its 16 keys.

    Args:
        scale_s: Scales in SMEM, f32 [64].
        scale_g: Scales [blocks, kv_heads, copies, tokens_per_copy]; see `copy_tile` for the other arguments.
        blocks: Block ids.
        copies: Indices within the blocks.
        kv_head: Index of the KV head.
    """
    types = plgpu.RefType(), plgpu.RefType(), [SCALAR] * (2 * len(blocks) + 1)
    run = plgpu.inline_mgpu(arg_types=types, return_type=())
    run(_copy_token_scales_by_lanes)(scale_s, scale_g, [kv_head, *blocks, *copies])


def _copy_token_scales_by_lanes(
    _ctx: mgpu.LaunchContext, scale_s: ir.Value, scale_g: ir.Value, scalars: Sequence[mgpu.FragmentedArray]
) -> tuple[()]:
    kv_head, *registers = map(fragments.scalar, scalars)
    blocks, copies = registers[: len(registers) // 2], registers[len(registers) // 2 :]
    tokens = WARPS * WARP_ROWS // len(blocks)
    lane, warp = lanes.lane_and_warp()
    row = lanes.add(lanes.times(warp, WARP_ROWS), arith.andi(lane, lanes.const(WARP_ROWS - 1)))
    block, copy = blocks[0], copies[0]
    for i in range(1, len(blocks)):
        is_reached = arith.cmpi(arith.CmpIPredicate.sge, row, lanes.const(i * tokens))
        block, copy = (
            arith.select(is_reached, values[i], value) for values, value in ((blocks, block), (copies, copy))
        )
    token = arith.andi(row, lanes.const(tokens - 1))
    strides = _byte_strides(scale_g)
    places = zip((kv_head, copy, token), strides[1:], strict=True)
    offset = lanes.add(*(lanes.times(x, stride) for x, stride in places))
    source = lanes.advance(lanes.pointer(scale_g), block, strides[0], offset)
    target = lanes.add(lanes.address(scale_s), lanes.times(row, 4))
    # The upper half of the lanes would copy the same numbers again.
    code = "cp.async.ca.shared.global [$0], [$1], 4;"
    lanes.run(code, target, source, predicate=lanes.is_below(lane, WARP_ROWS))
    return ()


# ------------------------------------------------------------------------------------- queries
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
    run(functools.partial(_copy_queries_by_lanes, tile_q=q_s.shape[1], head=head))(q_s, query_g)


def _copy_queries_by_lanes(
    _ctx: mgpu.LaunchContext,
    q_s: ir.Value,
    query_g: ir.Value,
    *,
    tile_q: int,
    head: HeadChunks,
    has_barrier: bool = True,
) -> tuple[()]:
    (rows, *_), (stride, *_) = ir.MemRefType(query_g.type).shape, _byte_strides(query_g)
    tile = _SwizzledRows(q_s, tile_q, head, swizzle=128)
    lane, warp = lanes.lane_and_warp()
    unit, row_in_warp = tile.unit_and_row(lane)
    # Warps past the last row copy it again, and write the same bytes.
    if has_barrier:
        mgpu.warpgroup_barrier()  # no warp reads the shared memory any more
    for start in range(0, tile_q, WARPS * tile.rows_at_once):
        row = lanes.add(lanes.times(warp, tile.rows_at_once), row_in_warp, start)
        row = arith.minsi(row, lanes.const(tile_q - 1))
        size = None
        if rows < tile_q:
            size = arith.select(lanes.is_below(row, rows), lanes.const(UNIT), lanes.const(0))
        source = lanes.advance(
            lanes.pointer(query_g), arith.minsi(row, lanes.const(rows - 1)), stride, lanes.const(0)
        )
        tile.copy_row(row, unit, source, size)
    return ()


# ------------------------------------------------------------------------------------- rows
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
    run(functools.partial(_copy_queries_by_lanes, tile_q=rows, head=head, has_barrier=False))(tile_s, rows_g)


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
    strides = _byte_strides(from_g)
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


# ------------------------------------------------------------------------------------- groups
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
