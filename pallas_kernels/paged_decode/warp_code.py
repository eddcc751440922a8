"""What each lane of Warps' warps does; arrays are their registers here, and every function has a twin there.

Keys and values come out of shared memory as the tensor core's left operands, 8 bits widened on the way in
registers. Values are turned around by ldmatrix, which moves 16 bits: pairs of 8-bit columns, taken apart
afterwards, as FlashAttention-3 does on its way through shared memory.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.shared import lanes
from pallas_kernels.shared.dequant import swizzle_of

W = plgpu.Layout.WGMMA
KEYS = 16  # of a warp
QUERY_BITS = 10  # bf16 queries become f16 with their largest element about 2 ** QUERY_BITS


def query_fragments(_: Any, q_s: Any, *, warps: Any, layout: Any, is_scaled: bool) -> Any:
    """See Warps.query.

    Where keys are 8-bit, an operand's columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16 are a head's 4 t to
    4 t + 3: one register of keys holds four neighbours.
    """
    g, t = lanes.lane_row_and_pair()
    is_narrow, width = warps.k_dtype.itemsize == 1, warps.cut.width
    row_tiles, per_chunk = warps.shape.tile_q // 8, width // KEYS
    unit, inside = g, lanes.times(t, 4)  # of 16 bytes, turned by the swizzle; bytes in it
    if is_narrow:
        unit = arith.xori(g, arith.shrui(t, lanes.const(1)))
        inside = lanes.times(arith.andi(t, lanes.const(1)), 8)
    first = lanes.add(lanes.address(q_s), lanes.times(g, 128), lanes.times(unit, 16), inside)

    def read(chunk: int, tile: int, step: int) -> list[Any]:
        """Two registers: the 16 columns of a step that this lane holds."""
        offset = ((chunk * row_tiles + tile) * (width // 64) + step // 4) * 1024
        at = lambda unit: arith.xori(first, lanes.const(unit * 16))
        if is_narrow:
            code = f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {offset}];"
            return list(lanes.ptx(code, at(step % 4 * 2), results=2, touches_memory=True))
        code = f"ld.shared.b32 $0, [$1 + {offset}];"
        return [lanes.ptx(code, at(step % 4 * 2 + half), touches_memory=True) for half in (0, 1)]

    steps = [(chunk, step) for chunk in range(warps.cut.chunks) for step in range(per_chunk)]
    rows = [[read(chunk, tile, step) for chunk, step in steps] for tile in range(row_tiles)]
    factors = [[lanes.number(1.0)] * 4 for _ in rows]
    if is_scaled:
        scaled = [scaled_row(row) for row in rows]
        rows, factors = [row for row, _ in scaled], [factor for _, factor in scaled]
    pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(warps.key_operand))
    registers = [
        utils.bitcast(row[s][half], pair) for s in range(len(steps)) for row in rows for half in (0, 1)
    ]
    shape = warps.cut.padded_dim, warps.shape.tile_q
    fragments = lanes.shaped(registers, layout.to_mgpu(), shape)
    return fragments, lanes.array_of(factors, W.to_mgpu())


def scaled_row(row: Any) -> Any:
    """bf16 queries as f16, times a power of 2 that keeps them in its range; and what takes it back."""
    as_f32 = lambda x: arith.bitcast(lanes.f32(), x)
    wide = [
        [as_f32(arith.shli(x, lanes.const(16))), as_f32(arith.andi(x, lanes.const(0xFFFF0000)))]
        for registers in row for x in registers
    ]  # fmt: skip
    magnitude = lambda x: lanes.ptx("abs.f32 $0, $1;", x, of=lanes.f32())
    largest = functools.reduce(arith.maxnumf, [magnitude(x) for pair in wide for x in pair])
    for distance in (1, 2):
        largest = arith.maxnumf(largest, lanes.shuffled(largest, "bfly", lanes.const(distance)))
    exponent = arith.shrui(arith.bitcast(lanes.i32(), largest), lanes.const(23))
    exponent = arith.minsi(arith.maxsi(exponent, lanes.const(QUERY_BITS + 1)), lanes.const(254))
    power = lambda e: as_f32(arith.shli(e, lanes.const(23)))
    factor = power(arith.subi(lanes.const(254 + QUERY_BITS), exponent))
    inverse = power(arith.subi(exponent, lanes.const(QUERY_BITS)))
    narrow = [lanes.rounded(arith.mulf(a, factor), arith.mulf(b, factor), jnp.float16) for a, b in wide]
    _, t = lanes.lane_row_and_pair()
    # A column of the scores is a row of the queries: that row's lanes have its factor.
    of_column = [lanes.shuffled(inverse, "idx", lanes.add(lanes.times(t, 8), 4 * i)) for i in (0, 1)]
    return [narrow[i : i + 2] for i in range(0, len(narrow), 2)], of_column * 2


def key_products(_: Any, k_s: Any, fragments: Any, *, warps: Any) -> Any:
    """See Warps.scores."""
    row_tiles = warps.shape.tile_q // 8
    registers = [utils.bitcast(x, lanes.i32()) for x in fragments.registers.flatten()]
    right = lambda step, tile: registers[(step * row_tiles + tile) * 2 :][:2]
    matrices = matrices_of(k_s, warps.k_dtype, warps)
    # Two sums a tile: a product waits for the one before it.
    sums: Any = [[[lanes.number(0.0)] * 4 for _ in range(row_tiles)] for _ in (0, 1)]
    step = 0
    for chunk in range(warps.cut.chunks):
        for pair in range(matrices.steps):
            for left in left_keys(matrices.load(chunk, pair), warps.k_dtype):
                for tile in range(row_tiles):
                    acc = sums[step % 2][tile]
                    sums[step % 2][tile] = lanes.product(acc, left, right(step, tile), warps.key_operand)
                step += 1
    both = [[arith.addf(a, b) for a, b in zip(*tiles, strict=True)] for tiles in zip(*sums, strict=True)]
    return lanes.array_of(both, W.to_mgpu())


def matrices_of(ref: Any, dtype: Any, warps: Any) -> lanes.Matrices:
    """A stage's keys or values."""
    itemsize, width = dtype.itemsize, warps.cut.width
    return lanes.Matrices(ref, rows=64, row_bytes=width * itemsize, swizzle=swizzle_of(itemsize, width))


def left_keys(loaded: Any, dtype: Any) -> Any:
    """Left operands of what ldmatrix gave: one of 16-bit keys, two of 8-bit ones."""
    if dtype.itemsize == 2:
        return [loaded]
    low, high, next_low, next_high = (lanes.widen(x, dtype, lanes.NEIGHBOURS) for x in loaded)
    return [(a[0], b[0], a[1], b[1]) for a, b in ((low, high), (next_low, next_high))]


def warp_largest(_: Any, x: Any) -> Any:
    """See Warps.largest."""
    columns = []
    for a, b, c, d in lanes.numbers(x):
        pair = [arith.maxnumf(a, c), arith.maxnumf(b, d)]
        for distance in (4, 8, 16):
            pair = [arith.maxnumf(v, lanes.shuffled(v, "bfly", lanes.const(distance))) for v in pair]
        columns.append(pair * 2)
    return lanes.array_of(columns, W.to_mgpu())


def value_products(_: Any, v_s: Any, p: Any, accs: Any, scalars: Any, *, warps: Any, piece: int) -> Any:
    """See Warps.add_values."""
    low, high, *firsts = (x.registers.item() for x in scalars)
    masks = seen_masks(low, high, firsts, piece)
    matrices = matrices_of(v_s, warps.v_dtype, warps)
    right = []
    for a, b, c, d in lanes.numbers(p):
        halves = (lanes.rounded(a, b, warps.value_operand), lanes.rounded(c, d, warps.value_operand))
        right.append([lanes.transposed(half) for half in halves])
    sums: Any = [lanes.numbers(acc) for acc in accs]
    nth = 0
    for chunk in range(warps.cut.chunks):
        for pair in range(matrices.steps):
            loaded = matrices.load(chunk, pair, transpose=True)
            loaded = [arith.andi(x, masks[i % 2]) for i, x in enumerate(loaded)]
            for left in left_values(loaded, warps.v_dtype):
                tiles = zip(sums[nth], right, strict=True)
                sums[nth] = [lanes.product(acc, left, b, warps.value_operand) for acc, b in tiles]
                nth += 1
    return tuple(lanes.array_of(columns, W.to_mgpu()) for columns in sums)


def left_values(loaded: Any, dtype: Any) -> Any:
    """Left operands of what ldmatrix gave, turned around: 16 columns of a head by 16 keys.

    Of 8 bits, rows g and g + 8 are columns 2 g and 2 g + 1: ldmatrix turns pairs of them.
    """
    if dtype.itemsize == 2:
        keys_low, keys_high, next_low, next_high = loaded
        return [(keys_low, next_low, keys_high, next_high)]
    low, high, next_low, next_high = (lanes.widen(x, dtype, lanes.EVERY_OTHER) for x in loaded)
    return [(a[0], a[1], b[0], b[1]) for a, b in ((low, high), (next_low, next_high))]


def seen_masks(low: Any, high: Any, firsts: Any, piece: int) -> list[Any]:
    """Ones where some query sees a key: for a register of keys 2 t, 2 t + 1 and one of those 8 further on."""
    _, warp = lanes.lane_and_warp()
    _, t = lanes.lane_row_and_pair()
    row = lanes.times(warp, KEYS)
    key = lanes.add(firsts[0], row)
    for i, first in enumerate(firsts[1:], 1):
        inside = arith.cmpi(arith.CmpIPredicate.sge, row, lanes.const(i * piece))
        key = arith.select(inside, lanes.add(first, row, -i * piece), key)
    key = lanes.add(key, lanes.times(t, 2))

    def half(offset: int, ones: int) -> Any:
        at = lanes.add(key, offset)
        after = arith.cmpi(arith.CmpIPredicate.sge, at, low)
        before = arith.cmpi(arith.CmpIPredicate.slt, at, high)
        return arith.select(arith.andi(after, before), lanes.const(ones), lanes.const(0))

    return [arith.ori(half(offset, 0xFFFF), half(offset + 1, 0xFFFF0000)) for offset in (0, 8)]


def store_results(_: Any, merge_s: Any, accs: Any, top: Any, total: Any, *, warps: Any) -> Any:
    """See Warps.merged: each warp's into its place, columns of a head in their order; then all may read."""
    g, t = lanes.lane_row_and_pair()
    _, warp = lanes.lane_and_warp()
    row_bytes = 4 * warps.shape.tile_q
    spread, far = (2, 1) if warps.v_dtype.itemsize == 1 else (1, 8)
    place = lanes.add(
        lanes.address(merge_s),
        lanes.times(warp, (warps.cut.padded_dim + 2) * row_bytes),
        lanes.times(t, 8),
    )
    first = lanes.add(place, lanes.times(g, spread * row_bytes))

    def store(at: Any, offset: int, pair: Any, **only: Any) -> None:
        code = f"st.shared.v2.f32 [$0 + {offset}], {{$1, $2}};"
        utils.inline_ptx(code, at, *pair, has_side_effects=True, **only)

    utils.warpgroup_barrier()  # the results before these have been read
    for nth, acc in enumerate(accs):
        for tile, four in enumerate(lanes.numbers(acc)):
            for half in (0, 1):
                store(first, (nth * KEYS + half * far) * row_bytes + tile * 32, four[2 * half : 2 * half + 2])
    is_first = arith.cmpi(arith.CmpIPredicate.eq, g, lanes.const(0))
    for tile, (tops, sums) in enumerate(zip(lanes.numbers(top), lanes.numbers(total), strict=True)):
        pair = [arith.addf(a, b) for a, b in zip(sums[:2], sums[2:], strict=True)]
        for distance in (4, 8, 16):
            pair = [arith.addf(x, lanes.shuffled(x, "bfly", lanes.const(distance))) for x in pair]
        offset = warps.cut.padded_dim * row_bytes + tile * 32
        store(place, offset, tops[:2], predicate=is_first)
        store(place, offset + row_bytes, pair, predicate=is_first)
    utils.warpgroup_barrier()
    return ()
