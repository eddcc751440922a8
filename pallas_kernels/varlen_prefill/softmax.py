"""The bias and the online softmax of one warpgroup's rows, one tile of keys at a time; row-max policies.

The softmax subtracts a number `row_max` (in base 2) from the scores of a row before it computes exponentials.
A policy chooses this number. RunningRowMax uses the largest score so far. LazyRescale uses an upper bound of
all scores so far, which it replaces only when a score reaches it. So most tiles need neither a maximum nor a
rescale of the accumulators; the threads of a warp vote on whether a tile does. NoRowMax uses 0, for scores
that a soft cap keeps small.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx import warp_votes
from pallas_kernels.score_mod import KernelScoreMod, Lookups
from pallas_kernels.shared.layouts import COLUMN, ROW, WGMMA
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Columns, Ref, Rows, Scalar, Tile, f32
from pallas_kernels.varlen_prefill.spec import AlibiOperands, PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import KvTile

# ------------------------------------------------------------------------------------- bias
SLOPE_TERMS = 3  # 16-bit numbers that add up to an f32 slope


class Scaling(NamedTuple):
    """Conversion of scores to base-2 exponents by the softmax: `s * factor + row_term`.

    Attributes:
        factor: Factor of all scores. Static.
        row_term: Scalar or term per row, or None.
    """

    factor: float
    row_term: Scalar | Rows | None = None


class Bias:
    """Soft cap, ALiBi bias and score function of one warpgroup.

    Attributes:
        factor: Factor that the softmax multiplies the scores by without a score function.
    """

    def __init__(
        self,
        operands: AlibiOperands | None,
        column_indices: Callable[[], Columns],
        wg: Scalar,
        spec: PrefillSpec,
        score_mod: KernelScoreMod | None,
    ):
        """Create the bias.

        Args:
            operands: Shared memory for the operands of the ALiBi product; None if no product adds the bias.
            column_indices: Function that returns the index of each key within its tile, f32 [tile_kv].
            wg: Index of the warpgroup.
            spec: Static description of the kernel.
            score_mod: Score function, or None.
        """
        self.column_indices, self.spec, self.wg, self.score_mod = column_indices, spec, wg, score_mod
        self.all_operands = operands
        self.operands = None if operands is None else AlibiOperands(*(ref.at[wg] for ref in operands))
        self.factor = spec.score_factor

    def store_columns(self, wg: Scalar | int) -> None:
        """Store the right operand of the ALiBi product, which is the same for all heads."""
        if self.all_operands is None:
            return
        columns_s = self.all_operands.columns
        iota = [plgpu.broadcasted_iota(jnp.int32, columns_s.shape[1:], axis, layout=WGMMA) for axis in (0, 1)]
        columns_s[wg] = jnp.where(iota[1] < SLOPE_TERMS, iota[0], 0).astype(f32).astype(self.spec.dtype)

    def store_slope(self, slope: Scalar | Rows) -> None:
        """Store the left operand of the ALiBi product: the slope as a sum of SLOPE_TERMS 16-bit numbers."""
        if self.operands is None:
            return
        slopes_s, dtype = self.operands.slopes, self.spec.dtype
        tile = plgpu.layout_cast(jnp.zeros(slopes_s.shape, f32), WGMMA)
        remainder = slope * (1 / self.factor)
        column = plgpu.broadcasted_iota(jnp.int32, slopes_s.shape, 1, layout=WGMMA)
        for term in range(SLOPE_TERMS):
            rounded = remainder.astype(dtype).astype(f32)
            remainder, tile = (
                remainder - rounded,
                jnp.where(column == term, broadcast_to_keys(rounded, tile), tile),
            )
        slopes_s[...] = tile.astype(dtype)
        plgpu.commit_smem()

    def columns(self) -> Tile:
        """Return the index of each key within its tile, f32 [rows, tile_kv]."""
        return lax.broadcast_in_dim(self.column_indices(), self.spec.s_shape, [1])

    def load(self, tile: KvTile) -> Lookups | None:
        """Load what the score function looks up. Call it early, because the arrays are in global memory."""
        if self.score_mod is None:
            return None
        return self.score_mod.load(tile.score_tile(self.column_indices))

    def apply(self, tile: KvTile, s: Tile, lookups: Lookups | None) -> tuple[Tile, Scaling]:
        """Apply the soft cap, the bias and the score function.

        Args:
            tile: KV tile of the scores.
            s: Q K^T; with ALiBi operands, the ALiBi product is already added.
            lookups: Result of `load`.

        Returns:
            The scores, and how the softmax converts them to base-2 exponents.
        """
        score, rows, scaling = self.spec.score, tile.rows, Scaling(self.factor)
        if score.soft_cap is not None:
            s = jnp.tanh(s * (score.scale / score.soft_cap))
        if self.score_mod is not None:
            assert lookups is not None
            return self._apply_score_mod(tile, s, self.score_mod, lookups)
        if self.factor == 1.0:
            s = s * ((score.soft_cap or score.scale) * LOG2E)
        if rows.slope is None:
            return s, scaling
        first = (rows.positions() - tile.first_key()).astype(f32)
        slope = broadcast_to_keys(rows.slope * (1 / self.factor), s)
        if score.sqrt_alibi:
            first = lax.broadcast_in_dim(first, s.shape, [0])
            distances = jnp.maximum(first - self.columns(), 0.0)
            return s - jnp.sqrt(distances) * slope, scaling
        # The bias is slope * (column - first): linear in the column, plus a term of the row.
        s = s if self.operands is not None else s + self.columns() * slope
        return s, scaling._replace(row_term=first * -rows.slope)

    def _apply_score_mod(
        self, tile: KvTile, s: Tile, score_mod: KernelScoreMod, lookups: Lookups
    ) -> tuple[Tile, Scaling]:
        """Add the ALiBi bias to capped scores, and apply the score function."""
        rows, factor = tile.rows, self.spec.score.soft_cap or self.spec.score.scale
        if rows.slope is not None:
            s, factor = s * factor, 1.0
            first = lax.broadcast_in_dim((rows.positions() - tile.first_key()).astype(f32), s.shape, [0])
            distances = first - self.columns()
            if self.spec.score.sqrt_alibi:
                distances = jnp.sqrt(jnp.maximum(distances, 0.0))
            s = s - distances * broadcast_to_keys(rows.slope * (1 / LOG2E), s)
        new_scores = score_mod.apply(s, factor, tile.score_tile(self.column_indices), lookups)
        query_term = new_scores.query_term
        row_term = None if query_term is None else query_term * LOG2E
        return new_scores.tile, Scaling(new_scores.factor * LOG2E, row_term)


def broadcast_to_keys(x: Scalar | Rows, tile: Tile) -> Scalar | Tile:
    """Broadcast a value, or a value per row, to the columns of a tile."""
    return x if x.ndim == 0 else lax.broadcast_in_dim(x, tile.shape, [0])


# A new row_max is this many powers of two above the row's largest score, and is kept until a score reaches
# it. bf16 has the exponent range of f32; f16 probabilities must not fall below the range of f16.
HEADROOM = {jnp.dtype(jnp.bfloat16): 80.0, jnp.dtype(jnp.float16): 4.0}
# With ALiBi the largest score rises from tile to tile. 8 x 2k takes 480 us with RunningRowMax, 488 with a
# headroom of 40 powers of two, 470 with 80, 461 with 100. In tiles of 128 keys it rises too far: 669 us with
# RunningRowMax, 695 with a headroom of 80.
BIASED_HEADROOM = 100.0
MAX_BIASED_TILE_KV = 64
LANE_COLUMNS = 8  # a thread holds two adjacent ones of every eight columns of a tile


# ------------------------------------------------------------------------- row-max policies
class ShiftedScores(NamedTuple):
    """Scores of a tile minus row_max.

    Attributes:
        exponent: Base-2 logarithm of each unnormalized probability: score minus row_max.
        row_max: Number that is subtracted from the scores of each row, from this tile on.
        alpha: Factor for the earlier sums and accumulators of each row: 2 ** (old row_max - new row_max).
        needs_rescale: Whether alpha differs from 1 in any row of the warp; None if the policy does not test
            it.
    """

    exponent: Tile
    row_max: Rows
    alpha: Rows
    needs_rescale: Scalar | None = None


@dataclasses.dataclass(frozen=True)
class RowMaxPolicy(abc.ABC):
    """Base class of the policies that choose row_max.

    The main loop calls `prescale`, masks the result, and passes it to `shift_scores`. Scores come as
    `Bias.apply` returns them; the policy applies their `scaling`.

    Attributes:
        spec: Static description of the kernel.
        initial_row_max: The row_max of rows before their first tile.
        tests_rescale: Whether the policy tests `needs_rescale`.
    """

    initial_row_max: ClassVar[float] = -math.inf
    tests_rescale: ClassVar[bool] = False

    spec: PrefillSpec

    @abc.abstractmethod
    def prescale(self, s: Tile, scaling: Scaling, row_max: Rows, *, is_first: bool) -> Tile:
        """Return the scores in the form in which invisible pairs are replaced by -inf."""

    @abc.abstractmethod
    def shift_scores(self, s: Tile, scaling: Scaling, row_max: Rows, *, is_first: bool) -> ShiftedScores:
        """Subtract row_max, or a new row_max, from masked scores of `prescale`.

        On a row's first tile `row_max` is `initial_row_max`, and the resulting alpha has no meaning.
        """

    @abc.abstractmethod
    def rescale(self, alpha: Rows, needs_rescale: Scalar | None, sums: Sequence[Tile]) -> Sequence[Tile]:
        """Return the sums and accumulators of the earlier tiles multiplied by alpha."""


def choose_row_max_policy(spec: PrefillSpec) -> RowMaxPolicy:
    """Choose the row-max policy of a kernel."""
    max_score = spec.max_score if spec.has_score_mod or spec.has_alibi else spec.score.soft_cap
    if max_score is not None and max_score * LOG2E <= HEADROOM[spec.dtype]:
        return NoRowMax(spec)
    # LazyRescale rounds a row's first scores once in the work tile's first step, but twice if earlier steps
    # were masked out, which would make the result depend on the other rows.
    must_round_alike = spec.sizes.batch_invariant and (spec.has_window or spec.has_lists)
    rises_little = spec.dtype == jnp.bfloat16 and spec.sizes.tile_kv <= MAX_BIASED_TILE_KV
    if must_round_alike or (spec.has_alibi and not rises_little):
        return RunningRowMax(spec)
    headroom = BIASED_HEADROOM if spec.has_alibi else HEADROOM[spec.dtype]
    return LazyRescale(spec, headroom)


@dataclasses.dataclass(frozen=True)
class NoRowMax(RowMaxPolicy):
    """Policy for small scores: row_max is 0."""

    initial_row_max: ClassVar[float] = 0.0  # stays the row_max of all tiles

    def prescale(self, s: Tile, scaling: Scaling, row_max: Rows, *, is_first: bool) -> Tile:
        """Return the scaled scores."""
        s, row_term = s * scaling.factor, scaling.row_term
        return s if row_term is None else s + broadcast_to_keys(row_term, s)

    def shift_scores(self, s: Tile, scaling: Scaling, row_max: Rows, *, is_first: bool) -> ShiftedScores:
        """Return the scores unchanged; row_max stays 0."""
        return ShiftedScores(s, row_max, row_max)

    def rescale(self, alpha: Rows, needs_rescale: Scalar | None, sums: Sequence[Tile]) -> Sequence[Tile]:
        """Return the sums unchanged."""
        return sums


@dataclasses.dataclass(frozen=True)
class RunningRowMax(RowMaxPolicy):
    """Policy whose row_max is the largest score of the row so far."""

    def prescale(self, s: Tile, scaling: Scaling, row_max: Rows, *, is_first: bool) -> Tile:
        """Return the scores unchanged: their maximum comes first."""
        return s

    def shift_scores(self, s: Tile, scaling: Scaling, row_max: Rows, *, is_first: bool) -> ShiftedScores:
        """Subtract the larger of row_max and the maximum of the tile's scores from the scores."""
        return shift_by_tile_max(s, scaling, row_max, headroom=0.0)

    def rescale(self, alpha: Rows, needs_rescale: Scalar | None, sums: Sequence[Tile]) -> Sequence[Tile]:
        """Multiply the sums by alpha in every tile."""
        return multiply_rows(sums, alpha)


@dataclasses.dataclass(frozen=True)
class LazyRescale(RowMaxPolicy):
    """Policy that keeps row_max until one of the row's scores reaches it.

    The new row_max is the largest score plus `headroom`. Only warps with such a row compute it.

    Attributes:
        headroom: Distance of a new row_max from the row's largest score, in powers of two.
    """

    tests_rescale: ClassVar[bool] = True

    headroom: float

    def prescale(self, s: Tile, scaling: Scaling, row_max: Rows, *, is_first: bool) -> Tile:
        """Return the scores minus row_max, which most tiles keep."""
        if is_first:
            return s
        base, row_term = finite_row_max(row_max), scaling.row_term
        return s * scaling.factor - broadcast_rows(base if row_term is None else base - row_term, s)

    def shift_scores(self, s: Tile, scaling: Scaling, row_max: Rows, *, is_first: bool) -> ShiftedScores:
        """Keep row_max unless a score of the warp reaches it; every row's first tile sets it."""
        if is_first:
            return shift_by_tile_max(s, scaling, row_max, headroom=self.headroom)
        needs_rescale = warp_votes.needs_rescale(s, row_max, is_interpreted=self.spec.is_interpreted)
        exponent, row_max, alpha = lax.cond(
            needs_rescale,
            self.raise_row_max,
            lambda exponent, row_max: (exponent, row_max, row_max),
            s,
            row_max,
        )
        return ShiftedScores(exponent, row_max, alpha, needs_rescale)

    def raise_row_max(self, exponent: Tile, row_max: Rows) -> tuple[Tile, Rows, Rows]:
        """Return the exponents for a new row_max, the new row_max, and alpha.

        Only rows with a score at or above row_max get a new row_max, so that a row's result does not depend
        on the other rows of its warp.
        """
        tile_max, base = exponent.max(axis=1), finite_row_max(row_max)
        needs_new = (tile_max >= 0) | (row_max == -jnp.inf)
        new_max = jnp.where(needs_new, tile_max + base + self.headroom, row_max)
        new_base = finite_row_max(new_max)
        return exponent - broadcast_rows(new_base - base, exponent), new_max, jnp.exp2(row_max - new_base)

    def rescale(self, alpha: Rows, needs_rescale: Scalar | None, sums: Sequence[Tile]) -> Sequence[Tile]:
        """Multiply the sums by alpha, but only in warps where alpha differs from 1."""
        return lax.cond(
            needs_rescale, lambda sums: multiply_rows(sums, alpha), lambda sums: sums, tuple(sums)
        )


def shift_by_tile_max(s: Tile, scaling: Scaling, row_max: Rows, *, headroom: float) -> ShiftedScores:
    """Subtract the larger of row_max and (maximum of the tile's scores + headroom) from the scores."""
    factor, row_term = scaling
    tile_max = s.max(axis=1) * factor + (0.0 if row_term is None else row_term)
    new_max = jnp.maximum(row_max, tile_max + headroom)
    base = finite_row_max(new_max)
    exponent = s * factor - broadcast_rows(base if row_term is None else base - row_term, s)
    return ShiftedScores(exponent, new_max, jnp.exp2(row_max - base))


def multiply_rows(tiles: Sequence[Tile], factor: Rows) -> tuple[Tile, ...]:
    """Return the tiles with each row multiplied by its factor."""
    return tuple([x * broadcast_rows(factor, x) for x in tiles])


def full_rows(num: int, value: float) -> Rows:
    """Return a vector with one element per row, `num` in total, all equal to `value`."""
    return plgpu.layout_cast(jnp.full((num,), value, f32), ROW)


def zero_accumulators(spec: PrefillSpec) -> tuple[Tile, ...]:
    """Return accumulators of zeros, one per chunk of the head."""
    zeros = plgpu.layout_cast(jnp.zeros(spec.acc_shape, f32), WGMMA)
    return (zeros,) * spec.shape.head.num_chunks


def load_column_indices(columns_s: Ref) -> Columns:
    """Load the index of each column of a tile from shared memory, f32.

    Call this at each use: otherwise the compiler keeps all of them in registers.
    """
    return plgpu.load(columns_s, layout=COLUMN, optimized=False)


def broadcast_rows(x: Rows, like: Tile) -> Tile:
    """Broadcast a value per row to a tile."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def finite_row_max(row_max: Rows) -> Rows:
    """Return row_max, or 0 for rows without a visible key so far, whose row_max is -inf."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def probabilities(exponent: Tile) -> tuple[Tile, Tile]:
    """Return 2 ** exponent, and the sums over the columns that each thread holds."""
    p = jnp.exp2(exponent)
    row_sum = p[:, :LANE_COLUMNS]
    for column in range(LANE_COLUMNS, p.shape[1], LANE_COLUMNS):
        row_sum = row_sum + p[:, column : column + LANE_COLUMNS]
    return p, row_sum
