"""The matrix multiplications of one tile, by the whole warpgroup or by each warp separately.

WarpgroupMma uses wgmma over 64 or 128 keys and up to 64 query rows; its warps wait for each other between the
two multiplications. WarpMma uses mma.sync: each warp takes 16 of 64 keys and few query rows, and waits for no
other warp until a segment ends. `DecodeSizes.per_warp_mma` selects one of them.
"""

import functools
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.architectures import ARCHITECTURES
from pallas_kernels.paged_decode.span import Segment, TileKeys
from pallas_kernels.paged_decode.spec import DecodeSmem, DecodeSpec
from pallas_kernels.ptx.warp_mma import (
    WARPS,
    WarpTile,
    load_query_fragments,
    pv_mma,
    qk_mma,
    store_warp_outputs,
    warp_row_max,
)
from pallas_kernels.shared.dequant import load_dequantized
from pallas_kernels.shared.layouts import COLUMN, WGMMA
from pallas_kernels.shared.memory import swizzle_bytes
from pallas_kernels.shared.tile_rows import clear_masked_out
from pallas_kernels.shared.types import Columns, Ref, Scalar, Slice, Tile, f32

# f16 probabilities go up to 2 ** 14 instead of 1: otherwise small probabilities and small scales would lose
# bits as subnormals.
LOG2_HEADROOM = 14


@runtime_checkable
class TileMma(Protocol):
    """K Q^T and V^T P of one tile, and the reductions between them; the caller keeps the state.

    The caller calls `init_state` and `load_query` once per segment, then for every tile `qk`, `row_max`,
    `broadcast`, `store_probabilities` and `pv`, and once after the segment's last tile `combine_warps`. It
    waits for the keys before `qk` and for the values before `pv`; if `dequantizes_values`, it waits for them
    before `dequantize_values`, which it calls before `row_max`. All threads of the warpgroup call with the
    same scalars.

    `init_state` chooses the shapes and layouts of accumulators, maxima and sums, which the caller carries
    through jax.lax.fori_loop. `combine_warps` converts them to the shapes of a segment's results.

    Attributes:
        log2_headroom: Base-2 logarithm of the largest probability. 0 = probabilities are at most 1. A larger
            value keeps small probabilities from becoming subnormal in f16.
        row_max_is_finite: Whether each query attends to a key of the first tile, so that row_max is finite
            after every tile.
        dequantizes_values: Whether `dequantize_values` converts 8-bit values to 16 bits in shared memory.
    """

    log2_headroom: int
    row_max_is_finite: bool
    dequantizes_values: bool

    def init_state(self) -> tuple[tuple[Tile, ...], Columns | Tile, Tile]:
        """Return the accumulators, row maxima and row sums before a request's first tile."""
        ...

    def load_query(self, q_s: Ref) -> tuple[Any, Any]:
        """Return the query operand of `qk` for a segment, and a factor that its scores must be multiplied by.

        Args:
            q_s: Queries in SMEM, [num_chunks, tile_q, width]; the caller frees them after the last tile.
        """
        ...

    def qk(self, stage: Scalar, query: Any) -> Tile:
        """Return K Q^T of a stage, f32 [tile_kv, tile_q].

        The stage's keys are not read after this returns.
        """
        ...

    def dequantize_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """Dequantize the values if `dequantizes_values`, with zeros for masked-out keys."""
        ...

    def row_max(self, s: Tile) -> Columns | Tile:
        """Return the maximum of each query's scores."""
        ...

    def broadcast(self, x: Columns | Tile) -> Tile:
        """Broadcast one number per query, such as row_max, over a tile of scores."""
        ...

    def store_probabilities(self, p: Tile) -> Tile:
        """Return the probabilities in the form that `pv` takes, after storing them if it reads memory."""
        ...

    def pv(
        self,
        accs: tuple[Tile, ...],
        alpha: Columns | Tile,
        p: Tile,
        stage: Scalar,
        segment: Segment,
        keys: TileKeys,
    ) -> tuple[Tile, ...]:
        """Return accs * alpha + V^T P with p rounded to 16 bits; values of masked-out keys count as 0."""
        ...

    def combine_warps(
        self, accs: tuple[Tile, ...], row_max: Columns | Tile, row_sum: Tile
    ) -> tuple[tuple[Tile, ...], Columns, Columns]:
        """Return O^T of each chunk, [width, tile_q] in the layout WGMMA, and each query's maximum and sum."""
        ...


class WarpgroupMma(TileMma):
    """Matrix multiplications by the whole warpgroup; see TileMma.

    Every warp has the maximum and the rescale factor of each query. 8-bit keys and values become the queries'
    16-bit dtype on the way into the tensor core: keys in registers, values through shared memory, since wgmma
    transposes 16-bit operands only.
    """

    def __init__(self, smem: DecodeSmem, spec: DecodeSpec):
        self.smem, self.head, self.dtype = smem, spec.shape.head, spec.dtype
        self.tile, self.is_interpreted = spec.tile, spec.is_interpreted
        needs_headroom = spec.dtype == jnp.float16 and smem.v_scale is not None
        self.log2_headroom = LOG2_HEADROOM if needs_headroom else 0
        self.dequantizes_values = smem.v.dtype != spec.dtype
        # A single query attends to a key of every tile that is not from a list; others may not have yet. A
        # score function may return -inf.
        is_single = spec.shape.query_len == 1 and not spec.shape.list_block_size
        self.row_max_is_finite = is_single and not spec.has_score_mod

    def broadcast(self, x: Columns) -> Tile:
        """Broadcast one number per query over a tile."""
        return lax.broadcast_in_dim(x, self.tile, [1])

    def init_state(self) -> tuple[tuple[Tile, ...], Columns, Tile]:
        """Return one accumulator [width, tile_q] per chunk, row maxima of -inf and row sums of 0."""

        def zeros(*shape: int) -> Tile:
            return plgpu.layout_cast(jnp.zeros(shape, f32), WGMMA)

        tile_q = self.tile[1]
        row_max = plgpu.layout_cast(jnp.full((tile_q,), -jnp.inf, f32), COLUMN)
        accs = tuple(zeros(self.head.width, tile_q) for _ in range(self.head.num_chunks))
        return accs, row_max, zeros(*self.tile)

    def load_query(self, q_s: Ref) -> tuple[Ref, float]:
        """Return the queries in shared memory, and 1.0, because their scores need no extra factor."""
        return q_s, 1.0

    def qk(self, stage: Scalar, query: Ref) -> Tile:
        """Return K Q^T of a stage."""

        def multiply(acc: Ref) -> Tile:
            for chunk in range(self.head.num_chunks):
                for columns, operand in self.key_operands(stage, chunk):
                    plgpu.wgmma(acc, operand, query.at[chunk, :, columns].T)
            # Reading the accumulator waits for wgmma: values dequantized while it runs would need more
            # registers than two thread blocks per SM have.
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC(self.tile, f32))

    def key_operands(self, stage: Scalar, chunk: int) -> Iterator[tuple[Slice, Ref]]:
        """Yield (columns, operand) of a chunk of keys: a 16-bit ref, or keys dequantized to registers."""
        tile_s = self.smem.k.at[stage, chunk]
        if self.smem.k.dtype == self.dtype:
            yield slice(None), tile_s
            return
        for columns in swizzle_rows(self.head.width):
            operand = load_dequantized(tile_s.at[:, columns], self.dtype)
            if self.is_interpreted:  # interpret mode takes no operand from registers
                self.smem.dequantized[chunk, :, columns] = operand
                operand = self.smem.dequantized.at[chunk, :, columns]
            yield columns, operand

    def row_max(self, s: Tile) -> Columns:
        """Return the maximum of each query's scores."""
        return s.max(axis=0)

    def dequantize_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """Convert the 8-bit values of a stage to 16 bits, through shared memory."""
        for chunk in range(self.head.num_chunks):
            for columns in swizzle_rows(self.head.width):
                v = load_dequantized(self.smem.v.at[stage, chunk, :, columns], self.dtype)
                clear = functools.partial(keys.where_visible, v, segment, 0.0)
                v = lax.cond(keys.has_masked_out(segment), clear, lambda v=v: v)
                self.smem.dequantized[chunk, :, columns] = v

    def clear_masked_out_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """Overwrite values of masked-out keys with zeros: a probability of 0 does not remove a NaN."""

        @pl.when(keys.has_masked_out(segment))
        def _() -> None:
            rows = pl.ds(0, self.tile[0])
            clear_masked_out(
                self.smem.v.at[stage], rows, keys.tile_positions, segment.first_key, segment.end_key
            )
            plgpu.commit_smem()

    def store_probabilities(self, p: Tile) -> Tile:
        """Store P in shared memory: wgmma reads it, and dequantized values, there."""
        self.smem.p.T[...] = plgpu.layout_cast(p.astype(self.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        return p

    def pv(
        self,
        accs: tuple[Tile, ...],
        alpha: Columns,
        p: Tile,
        stage: Scalar,
        segment: Segment,
        keys: TileKeys,
    ) -> tuple[Tile, ...]:
        """Return accs * alpha + V^T P, with P from shared memory."""
        if not self.dequantizes_values:
            self.clear_masked_out_values(stage, segment, keys)
        return tuple(
            self.accumulate_chunk(acc * lax.broadcast_in_dim(alpha, acc.shape, [1]), stage, chunk)
            for chunk, acc in enumerate(accs)
        )

    def accumulate_chunk(self, acc: Tile, stage: Scalar, chunk: int) -> Tile:
        """Return acc + V^T P for one chunk of a head."""

        def multiply(ref: Ref) -> None:
            values = self.smem.v.at[stage, chunk]
            if self.dequantizes_values:
                values = self.smem.dequantized.at[chunk]
            plgpu.wgmma(ref, values.T, self.smem.p.T)

        def multiply_from_zero(ref: Ref) -> Tile:
            multiply(ref)
            return ref[...]

        if self.is_interpreted:  # interpret mode has no run_state of an accumulator
            rows, columns = acc.shape
            return acc + pl.run_scoped(multiply_from_zero, plgpu.ACC((rows, columns), f32))
        return pl.run_state(multiply)(plgpu.ACC.init(acc))

    def combine_warps(
        self, accs: tuple[Tile, ...], row_max: Columns, row_sum: Tile
    ) -> tuple[tuple[Tile, ...], Columns, Columns]:
        """Return the results, after adding the partial row sums of the threads."""
        return accs, row_max, row_sum.sum(axis=0)


class WarpMma(TileMma):
    """Matrix multiplications by four warps that do not wait for each other; see TileMma.

    Each warp takes 16 of a tile's 64 keys and computes a separate softmax over these keys. The four maxima,
    sums and accumulators are combined after the segment's last tile, as split outputs are. Nothing is written
    to shared memory between two tiles, and warps wait only for TMA. Each warp has an accumulator [head_dim,
    rows], so this class supports few query rows.

    Arrays of a tile are [64, rows]: row 16 w + i belongs to warp w. The accumulators are a tuple of such
    arrays, one for every 16 columns of a head.
    """

    row_max_is_finite = False  # no query may attend to any of a warp's own keys
    dequantizes_values = False  # they are dequantized in registers on the way into the tensor core

    def __init__(self, smem: DecodeSmem, spec: DecodeSpec):
        self.smem, self.head, self.is_interpreted = smem, spec.shape.head, spec.is_interpreted
        dtypes = jnp.dtype(spec.dtype), smem.k.dtype, smem.v.dtype
        has_fp8_conversion = ARCHITECTURES[spec.sizes.gpu].has_fp8_conversion
        self.tile = WarpTile(spec.shape.tile_q, self.head, *dtypes, has_fp8_conversion)
        self.log2_headroom = LOG2_HEADROOM if self.tile.value_operand == jnp.float16 else 0

    def broadcast(self, x: Tile) -> Tile:
        """Return `x`: here row_max and alpha have the shape of a tile."""
        return x

    def init_state(self) -> tuple[tuple[Tile, ...], Tile, Tile]:
        """Return one accumulator for every 16 columns of a head, row maxima of -inf and row sums of 0."""
        row_max = plgpu.layout_cast(jnp.full(self.tile.shape, -jnp.inf, f32), WGMMA)
        zeros = plgpu.layout_cast(jnp.zeros(self.tile.shape, f32), WGMMA)
        return (zeros,) * self.tile.num_accs, row_max, zeros

    def load_query(self, q_s: Ref) -> tuple[Tile, Tile]:
        """Return the queries in registers, as right operands of mma.sync, and the factor for their scores."""
        return load_query_fragments(q_s, tile=self.tile, is_interpreted=self.is_interpreted)

    def qk(self, stage: Scalar, query: Tile) -> Tile:
        """Return K Q^T of a stage."""
        k_s = self.smem.k.at[stage]
        return qk_mma(k_s, query, tile=self.tile, is_interpreted=self.is_interpreted)

    def dequantize_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """Do nothing, because `pv` dequantizes values in registers."""

    def row_max(self, s: Tile) -> Tile:
        """Return the maximum over each warp's rows, in all of its rows."""
        return warp_row_max(s, tile=self.tile, is_interpreted=self.is_interpreted)

    def store_probabilities(self, p: Tile) -> Tile:
        """Return the probabilities, which stay in registers."""
        return p

    def pv(
        self,
        accs: tuple[Tile, ...],
        alpha: Tile,
        p: Tile,
        stage: Scalar,
        segment: Segment,
        keys: TileKeys,
    ) -> tuple[Tile, ...]:
        """Return accs * alpha + V^T P of each warp's keys."""
        first_key, end_key, run_starts = segment.first_key, segment.end_key, keys.run_starts
        run_length, tile_kv = keys.run_length, self.tile.shape[0]
        if keys.load_listed is not None:  # every row holds a visible value or zeros
            zero = stage * 0
            first_key, end_key, run_starts, run_length = zero, zero + tile_kv, (zero,), tile_kv
        return pv_mma(
            self.smem.v.at[stage],
            p,
            [acc * alpha for acc in accs],
            first_key,
            end_key,
            run_starts,
            run_length=run_length,
            tile=self.tile,
            is_interpreted=self.is_interpreted,
        )

    def combine_warps(
        self, accs: tuple[Tile, ...], row_max: Tile, row_sum: Tile
    ) -> tuple[tuple[Tile, ...], Columns, Columns]:
        """Combine the results of the four warps through shared memory."""
        outputs_s, dim = self.smem.warp_outputs, self.head.padded_dim
        store_warp_outputs(
            outputs_s, accs, row_max, row_sum, tile=self.tile, is_interpreted=self.is_interpreted
        )
        # Rows of a warp's output: O^T [dim], then the row maxima, then the row sums.
        load_row = functools.partial(plgpu.load, layout=COLUMN, optimized=False)
        warp_max = [load_row(outputs_s.at[w, dim]) for w in range(WARPS)]
        total_max = functools.reduce(jnp.maximum, warp_max)
        finite_max = jnp.where(total_max == -jnp.inf, 0.0, total_max)
        alphas = [jnp.exp2(row_max - finite_max) for row_max in warp_max]
        total_sum = functools.reduce(
            jnp.add, [alphas[w] * load_row(outputs_s.at[w, dim + 1]) for w in range(WARPS)]
        )
        outs = []
        for chunk in range(self.head.num_chunks):
            rows = slice(chunk * self.head.width, (chunk + 1) * self.head.width)
            warp_outs = [
                plgpu.load(outputs_s.at[w, rows], layout=WGMMA, optimized=False) for w in range(WARPS)
            ]
            over_rows = functools.partial(
                lax.broadcast_in_dim, shape=warp_outs[0].shape, broadcast_dimensions=[1]
            )
            outs.append(
                functools.reduce(
                    jnp.add, [out * over_rows(alpha) for out, alpha in zip(warp_outs, alphas, strict=True)]
                )
            )
        return tuple(outs), total_max, total_sum


def swizzle_rows(width: int) -> list[Slice]:
    """Split `width` columns of an 8-bit tile into slices of one swizzle row each."""
    row = swizzle_bytes(1)
    return [pl.ds(start, row) for start in range(0, width, row)]
