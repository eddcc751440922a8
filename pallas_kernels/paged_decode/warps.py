"""One tile by four warps that do not wait for each other: each takes 16 of its 64 keys through the tensor core.

A warp has a softmax of its own, with its own largest score; the four are merged where a request ends, as spans
are. Keys and values come out of shared memory as the tensor core's operands, 8 bits widened on the way in
registers: nothing is written back, and no barrier stands between two tiles but TMA's. The way of the values,
pairs of 8-bit columns turned around by ldmatrix and taken apart afterwards, is FlashAttention-3's; here they are
the left operand, so they stay in registers.

For few query rows: an accumulator is [head_dim, rows] in every warp.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.paged_decode.stages import HEADROOM, Stages
from pallas_kernels.paged_decode.walk import Place, Segment, Shape
from pallas_kernels.shared import lanes
from pallas_kernels.shared.dequant import swizzle_of

W = plgpu.Layout.WGMMA
f32 = jnp.float32
WARPS, KEYS = 4, 16
QUERY_BITS = 10  # bf16 queries become f16 with their largest element about 2 ** QUERY_BITS


class Warps:
    """Products and reductions over a tile of 64 keys, a warp at a time.

    Arrays of a tile are [64, rows]: row 16 w + i belongs to warp w. The accumulators are a list of them, one for
    every 16 columns of a head.
    """

    def __init__(self, refs: Stages, shape: Shape, *, dtype: Any, is_interpreted: bool):
        self.refs, self.shape, self.cut = refs, shape, shape.cut
        self.dtype, self.is_interpreted = dtype, is_interpreted
        self.k_dtype, self.v_dtype = refs.k_s.dtype, refs.v_s.dtype
        self.key_operand, self.value_operand = (operand_of(x, dtype) for x in (self.k_dtype, self.v_dtype))
        self.tile = 64, shape.tile_q
        self.num_accs = self.cut.padded_dim // KEYS
        self.headroom = HEADROOM if self.value_operand == jnp.float16 else 0
        self.widens_values = False  # in shared memory
        self.sees_a_key = False

    def spread(self, x: Any) -> Any:
        """What is known of each query, over a tile."""
        return x

    def zeros(self) -> Any:
        """Nothing summed yet."""
        return plgpu.layout_cast(jnp.zeros(self.tile, f32), W)

    def start(self) -> tuple[Any, Any, Any]:
        """Accumulators, largest scores and sums of a request's first tile."""
        lowest = plgpu.layout_cast(jnp.full(self.tile, -jnp.inf, f32), W)
        return tuple(self.zeros() for _ in range(self.num_accs)), lowest, self.zeros()

    def query(self, q_s: Any) -> tuple[Any, Any]:
        """The queries of a request as the tensor core's right operand, and what scores are to be multiplied by.

        Args:
            q_s: [chunks, tile_q, width] in SMEM.
        """
        is_scaled = self.key_operand != self.dtype  # bf16 has a wider range than f16
        if self.is_interpreted:
            q = q_s[...].astype(f32)
            if not is_scaled:
                return q, self.zeros() + 1.0
            largest = jnp.abs(q).max(axis=(0, 2))
            exponent = jnp.clip(jnp.floor(jnp.log2(jnp.maximum(largest, 2.0**-116))) - QUERY_BITS, -126, 126)
            q = (q * jnp.exp2(-exponent)[None, :, None]).astype(self.key_operand).astype(f32)
            return q, jnp.broadcast_to(jnp.exp2(exponent)[None], self.tile)
        layout = plgpu.Layout.MMA_RHS(self.key_operand, m_warps=4)
        load = functools.partial(query_fragments, warps=self, layout=layout, is_scaled=is_scaled)
        fragments = plgpu.ShapeDtypeStruct((self.cut.padded_dim, self.shape.tile_q), self.key_operand, layout)
        factors = plgpu.ShapeDtypeStruct(self.tile, f32, W)
        types = (ref_type(2),)
        return plgpu.inline_mgpu(arg_types=types, return_type=(fragments, factors))(load)(q_s)

    def scores(self, stage: Any, fragments: Any) -> Any:
        """K Q^T of a stage: [64, rows]."""
        if self.is_interpreted:
            k = self.refs.k_s[stage].astype(f32)
            return jnp.einsum("ckd,cqd->kq", k, fragments)
        k_s = self.refs.k_s.at[stage]
        types = (ref_type(self.k_dtype.itemsize, self.cut.width), fragments_layout(self.key_operand))
        run = plgpu.inline_mgpu(arg_types=types, return_type=plgpu.ShapeDtypeStruct(self.tile, f32, W))
        return run(functools.partial(key_products, warps=self))(k_s, fragments)

    def largest(self, x: Any) -> Any:
        """The largest of each warp's rows, in all of its rows."""
        if self.is_interpreted:
            of_warp = x.reshape(WARPS, KEYS, -1).max(axis=1, keepdims=True)
            return jnp.broadcast_to(of_warp, (WARPS, KEYS, x.shape[1])).reshape(x.shape)
        run = plgpu.inline_mgpu(arg_types=(W,), return_type=plgpu.ShapeDtypeStruct(self.tile, f32, W))
        return run(warp_largest)(x)

    def add_values(self, accs: Any, shrink: Any, p: Any, stage: Any, segment: Segment, place: Place) -> Any:
        """Accs * shrink + V^T P of each warp's keys; waits for the values."""
        if self.refs.v_scale_s is None:
            plgpu.barrier_wait(self.refs.v_full.at[stage])
        accs = self.products([acc * shrink for acc in accs], p, stage, segment, place)
        plgpu.barrier_arrive(self.refs.v_free.at[stage])
        return accs

    def products(self, accs: list[Any], p: Any, stage: Any, segment: Segment, place: Place) -> Any:
        """Accs + V^T P; values of keys that no query sees count as 0."""
        if self.is_interpreted:
            rows = jnp.arange(64, dtype=jnp.int32)
            at = place.keys(rows)
            is_seen = (at >= segment.low) & (at < segment.high)
            v = jnp.where(is_seen[:, None], self.refs.v_s[stage].astype(f32), 0.0)
            v = v.reshape(-1, WARPS, KEYS, self.cut.width)
            p = p.astype(self.value_operand).astype(f32).reshape(WARPS, KEYS, -1)
            new = jnp.einsum("cwkd,wkq->cdwq", v, p).reshape(self.num_accs, KEYS, WARPS, -1)
            return tuple(acc + x.swapaxes(0, 1).reshape(self.tile) for acc, x in zip(accs, new, strict=True))
        v_s = self.refs.v_s.at[stage]
        of_ref, scalar = ref_type(self.v_dtype.itemsize, self.cut.width), plgpu.Layout.WG_SPLAT
        types = (of_ref, W, [W] * self.num_accs, [scalar] * (2 + len(place.firsts)))
        result = plgpu.ShapeDtypeStruct(self.tile, f32, W)
        run = plgpu.inline_mgpu(arg_types=types, return_type=(result,) * self.num_accs)
        body = functools.partial(value_products, warps=self, piece=place.piece)
        return tuple(run(body)(v_s, p, accs, [segment.low, segment.high, *place.firsts]))

    def merged(self, accs: Any, top: Any, total: Any) -> tuple[Any, Any, Any]:
        """The four warps' results as one: O^T a chunk, each query's largest score and sum of exponentials."""
        column = functools.partial(lax.broadcast_in_dim, shape=self.tile, broadcast_dimensions=[1])
        of_all = top.max(axis=0)
        shrink = jnp.exp2(top - column(jnp.where(of_all == -jnp.inf, 0.0, of_all)))
        total = (total * shrink).sum(axis=0)
        scaled = [acc * shrink for acc in accs]
        merge_s = self.refs.merge_s
        if self.is_interpreted:
            stacked = jnp.stack(scaled).reshape(self.num_accs, WARPS, KEYS, -1).swapaxes(0, 1)
            merge_s[...] = stacked.reshape(merge_s.shape)
        else:
            run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [W] * self.num_accs), return_type=())
            run(functools.partial(store_accumulators, warps=self))(merge_s, scaled)
        plgpu.commit_smem()
        outs = []
        for chunk in range(self.cut.chunks):
            rows = slice(chunk * self.cut.width, (chunk + 1) * self.cut.width)
            parts = [plgpu.load(merge_s.at[w, rows], layout=W, optimized=False) for w in range(WARPS)]
            outs.append(functools.reduce(jnp.add, parts))
        return tuple(outs), of_all, total


def operand_of(stored: Any, dtype: Any) -> Any:
    """What the tensor core multiplies: 8 bits have instructions to f16 only, and fit into it exactly."""
    return jnp.dtype(dtype) if stored.itemsize == 2 else jnp.dtype(jnp.float16)


def merge_smem(shape: Shape) -> Any:
    """Where the warps' accumulators meet."""
    return plgpu.SMEM((WARPS, shape.cut.padded_dim, shape.tile_q), f32)


def fragments_layout(dtype: Any) -> Any:
    """The right operand's, whole in every warp."""
    return plgpu.Layout.MMA_RHS(dtype, m_warps=4)


def ref_type(itemsize: int, width: int = 64) -> Any:
    """A tile of shared memory as shared.dequant.swizzled_smem lays it out."""
    swizzle = swizzle_of(itemsize, width)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return plgpu.RefType((tiling, plgpu.SwizzleTransform(swizzle)))


# What follows builds a lane's code; arrays are their registers.


def query_fragments(_: Any, q_s: Any, *, warps: Warps, layout: Any, is_scaled: bool) -> Any:
    """See Warps.query. Where keys are 8-bit, an operand's columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16 are a
    head's 4 t to 4 t + 3: one register of keys holds four neighbours.
    """
    g, t = lanes.lane_row_and_pair()
    is_narrow, width = warps.k_dtype.itemsize == 1, warps.cut.width
    row_tiles, per_chunk = warps.shape.tile_q // 8, width // KEYS
    unit, inside = (arith.shrui(t, lanes.const(1)), arith.andi(t, lanes.const(1))) if is_narrow else (0, t)
    unit = arith.xori(unit, g) if is_narrow else g
    inside = lanes.times(inside, 8 if is_narrow else 4)
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
    factors = [[one()] * 4 for _ in rows]
    if is_scaled:
        rows, factors = zip(*(scaled_row(row) for row in rows), strict=True)
    pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(warps.key_operand))
    registers = [
        utils.bitcast(row[s][half], pair) for s in range(len(steps)) for row in rows for half in (0, 1)
    ]
    layout = layout.to_mgpu()
    shape = warps.cut.padded_dim, warps.shape.tile_q
    shaped = lanes.shaped(registers, layout, shape)
    return shaped, lanes.array_of(factors, W.to_mgpu())


def one() -> Any:
    """1.0."""
    return arith.constant(lanes.f32(), ir.FloatAttr.get(lanes.f32(), 1.0))


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
    narrow = [lanes.rounded(*(arith.mulf(x, factor) for x in pair), jnp.float16) for pair in wide]
    _, t = lanes.lane_row_and_pair()
    # A column of the scores is a row of the queries: that row's lanes have its factor.
    of_column = [lanes.shuffled(inverse, "idx", lanes.add(lanes.times(t, 8), 4 * i)) for i in (0, 1)]
    return [narrow[i : i + 2] for i in range(0, len(narrow), 2)], of_column * 2


def key_products(_: Any, k_s: Any, fragments: Any, *, warps: Warps) -> Any:
    """See Warps.scores."""
    itemsize, width = warps.k_dtype.itemsize, warps.cut.width
    row_tiles = warps.shape.tile_q // 8
    registers = [utils.bitcast(x, lanes.i32()) for x in fragments.registers.flatten()]
    right = lambda step, tile: registers[(step * row_tiles + tile) * 2 :][:2]
    matrices = lanes.Matrices(k_s, rows=64, row_bytes=width * itemsize, swizzle=swizzle_of(itemsize, width))
    # Two sums a tile: a product waits for the one before it.
    sums = [[[zero()] * 4 for _ in range(row_tiles)] for _ in (0, 1)]
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


def zero() -> Any:
    """0.0."""
    return arith.constant(lanes.f32(), ir.FloatAttr.get(lanes.f32(), 0.0))


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


def value_products(_: Any, v_s: Any, p: Any, accs: Any, scalars: Any, *, warps: Warps, piece: int) -> Any:
    """See Warps.add_values."""
    low, high, *firsts = (x.registers.item() for x in scalars)
    itemsize, width = warps.v_dtype.itemsize, warps.cut.width
    masks = seen_masks(low, high, firsts, piece)
    matrices = lanes.Matrices(v_s, rows=64, row_bytes=width * itemsize, swizzle=swizzle_of(itemsize, width))
    right = []
    for a, b, c, d in lanes.numbers(p):
        halves = (lanes.rounded(a, b, warps.value_operand), lanes.rounded(c, d, warps.value_operand))
        right.append([lanes.transposed(half) for half in halves])
    sums = [lanes.numbers(acc) for acc in accs]
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
    """For a register that holds keys 2 t and 2 t + 1 of a warp's 16, and one with those 8 further on: all ones
    where some query sees the key.
    """
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


def store_accumulators(_: Any, merge_s: Any, accs: Any, *, warps: Warps) -> Any:
    """Into [warps, head_dim, rows], columns of a head in their order."""
    g, t = lanes.lane_row_and_pair()
    _, warp = lanes.lane_and_warp()
    row_bytes = 4 * warps.shape.tile_q
    spread, far = (2, 1) if warps.v_dtype.itemsize == 1 else (1, 8)
    first = lanes.add(
        lanes.address(merge_s),
        lanes.times(warp, warps.cut.padded_dim * row_bytes),
        lanes.times(g, spread * row_bytes),
        lanes.times(t, 8),
    )
    for nth, acc in enumerate(accs):
        for tile, four in enumerate(lanes.numbers(acc)):
            for half in (0, 1):
                offset = (nth * KEYS + half * far) * row_bytes + tile * 32
                code = f"st.shared.v2.f32 [$0 + {offset}], {{$1, $2}};"
                utils.inline_ptx(code, first, *four[2 * half : 2 * half + 2], has_side_effects=True)
    return ()
