"""Probabilities and score gradients of the 64 keys of a warpgroup and a query tile; one row per key."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.score_mod import KernelScoreMod, PairValue, ScoreTile
from pallas_kernels.shared.memory import PANEL
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Columns, Ref, Rows, Scalar, Tile
from pallas_kernels.varlen_backward.schedule import visible_query_range
from pallas_kernels.varlen_backward.spec import COLUMN, ROW, BackwardSpec, f32
from pallas_kernels.varlen_backward.tile_scheduler import BackwardWorkTile
from pallas_kernels.varlen_prefill import PairTile
from pallas_kernels.varlen_prefill.kernel_mask import KernelMask, LoadedMask


def apply_soft_cap(s: Tile, score: Score) -> tuple[Tile, Tile | None]:
    """Scale and soft-cap Q K^T.

    Returns:
        The scores times log2(e), and the tanh of the soft cap, or None without a soft cap.
    """
    if score.soft_cap is None:
        return s * (score.scale * LOG2E), None
    tanh = jnp.tanh(s * (score.scale / score.soft_cap))
    return tanh * (score.soft_cap * LOG2E), tanh


def apply_score_mod(score_mod: KernelScoreMod, y: Tile, tile: ScoreTile) -> tuple[Tile, Tile | None]:
    """Return the new scores times log2(e) of scores times log2(e), and the derivatives or None for 1."""
    new_scores, derivative = score_mod.apply_with_derivative(y * (1 / LOG2E), tile)
    return new_scores * LOG2E, derivative


def score_weight(p: Tile, tanh: Tile | None, derivative: Tile | None) -> Tile:
    """Return the probabilities times the derivatives of the soft cap and of the score function.

    A pair with a probability of 0 has a weight of 0: a score function may be infinite or NaN there.
    """
    # One product of the factors, because registers are scarce.
    weight = p if tanh is None else p * (1.0 - tanh * tanh)
    return weight if derivative is None else jnp.where(p > 0.0, weight * derivative, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransposedPairTile(PairTile):
    """A PairTile with one key per row and one query per column."""

    has_key_rows: ClassVar[bool] = True

    @property
    def first_row(self) -> Scalar:
        """Position of the first key."""
        return self.first_key

    @property
    def first_column(self) -> Scalar:
        """Position of the first query."""
        return self.first_query

    @property
    def num_queries(self) -> int:
        """Number of queries in the tile."""
        return self.shape[1]

    @property
    def query_positions(self) -> Columns:
        """Position of each query."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape[1:], 0, layout=COLUMN) + self.first_query

    def fill_queries(self, x: Scalar) -> Columns:
        """Return a value per query, all equal to `x`."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape[1:], []), COLUMN)

    @property
    def query(self) -> Tile:
        """Position of each pair's query."""
        return self.columns().astype(jnp.int32) + self.first_query

    @property
    def key(self) -> Tile:
        """Position of each pair's key."""
        return self.broadcast_rows(self.row_positions)


class QueryTile(NamedTuple):
    """A query tile that attends to the keys of a work tile.

    Attributes:
        work_tile: Work tile of the keys.
        head: Query head.
        tile_index: Index of the query tile in the request.
        slope: ALiBi slope of the head times log2(e), or None.
        is_masked: Whether the tile needs a mask. Static.
    """

    work_tile: BackwardWorkTile
    head: Scalar
    tile_index: Scalar
    slope: Scalar | None
    is_masked: bool

    def valid_rows(self) -> tuple[Scalar, Scalar]:
        """Return the range [first_row, end_row) of the tile's rows that hold queries of the request."""
        position = self.work_tile.position(self.tile_index)
        return self.work_tile["first_position"] - position, self.work_tile["seq_len"] - position


class TileProbabilities(NamedTuple):
    """Probabilities of a tile, one row per key; 0 for invisible pairs.

    Attributes:
        p: Probabilities in 16 bits, or in f32 if the matrix product rounds them (sizes.per_warp_mma).
        weight: Probabilities in f32, times the derivatives of the soft cap and the score function.
        is_masked: Whether the tile needs a mask. Static.
    """

    p: Tile
    weight: Tile
    is_masked: bool


class DkDvScores:
    """Functions that compute the probabilities and score gradients of one warpgroup."""

    def __init__(
        self,
        mask: KernelMask | None,
        score_mod: KernelScoreMod | None,
        columns_s: Ref,
        wg: Scalar,
        spec: BackwardSpec,
    ):
        """Create the functions of a warpgroup.

        Args:
            mask: Mask of partial tiles, with references to its arrays, or None.
            score_mod: Score function, with references to its arrays, or None.
            columns_s: Shared memory for the indices of the queries within a tile, f32 [tile_q].
            wg: Index of the warpgroup.
            spec: Static description of the kernel.
        """
        self.mask, self.score_mod = mask, score_mod
        self.columns_s, self.wg, self.spec = columns_s, wg, spec

    def store_columns(self) -> None:
        """Store the column indices in shared memory."""
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_q,), 0, layout=COLUMN)
        self.columns_s[...] = columns.astype(f32)

    def load_mask(self, tile: QueryTile) -> LoadedMask:
        """Load the mask's data for a tile. Call it early, because the data is in global memory."""
        if not tile.is_masked or not jax.tree.leaves(self.mask):
            return ()
        assert self.mask is not None
        return self.mask.load(self._pairs(tile), tile.work_tile["req"])

    def row_stats(self, stats_s: Ref, index: int, tile: QueryTile) -> Columns:
        """Return the LSE (index 0) or delta (1) of each query, from shared memory [2, tile_q].

        Call it before issuing the product that its use overlaps with: a load from shared memory waits for all
        products that were issued before it.
        """
        stats = plgpu.load(stats_s.at[index], layout=COLUMN, optimized=False)
        if index or tile.slope is None or self.spec.score.sqrt_alibi or self.score_mod is not None:
            return stats
        # The query's part of a linear ALiBi bias, -slope * column, is subtracted together with the LSE.
        return stats + plgpu.load(self.columns_s, layout=COLUMN, optimized=False) * tile.slope

    def probabilities(self, s: Tile, lse: Columns, tile: QueryTile, loaded: LoadedMask) -> TileProbabilities:
        """Return the probabilities of transposed scores.

        Args:
            s: Transposed scores K Q^T, not scaled, f32 [64, tile_q].
            lse: Base-2 log-sum-exp of each query, from `row_stats` with index 0.
            tile: Query tile.
            loaded: Data of the mask for this tile, from `load_mask`.
        """
        y, tanh = apply_soft_cap(s, self.spec.score)
        if tile.slope is not None:
            y = self._add_alibi(y, tile, tile.slope)
        derivative = None
        if self.score_mod is not None:
            y, derivative = apply_score_mod(self.score_mod, y, self._score_tile(tile))
        y = y - self._broadcast_columns(lse)
        p = jnp.exp2(self._masked(y, tile, loaded) if tile.is_masked else y)
        weight = score_weight(p, tanh, derivative)
        p = p if self.spec.sizes.per_warp_mma else p.astype(self.spec.dtype)
        return TileProbabilities(p, weight, tile.is_masked)

    def gradients(self, probabilities: TileProbabilities, dp: Tile, delta: Columns) -> Tile:
        """Return dS without the softmax scale; `delta` comes from `row_stats` with index 1."""
        ds = probabilities.weight * (dp - self._broadcast_columns(delta))
        if not probabilities.is_masked:
            return ds
        # A score function's derivative may be negative.
        weight = probabilities.weight
        return jnp.where(weight > 0.0 if self.score_mod is None else weight != 0.0, ds, 0.0)

    def _add_alibi(self, y: Tile, tile: QueryTile, slope: Scalar) -> Tile:
        """Add the ALiBi bias; without a score function, the query's part of a linear bias is in the LSE."""
        first = self._positions(tile) - tile.work_tile.position(tile.tile_index)
        if not self.spec.score.sqrt_alibi:
            y = y + self._broadcast_rows(first.astype(f32) * slope)
            return y if self.score_mod is None else y - self._columns() * slope
        distances = jnp.maximum(self._columns() - self._broadcast_rows(first.astype(f32)), 0.0)
        return y - jnp.sqrt(distances) * slope

    def _masked(self, y: Tile, tile: QueryTile, loaded: LoadedMask) -> Tile:
        """Return the exponents with -inf for invisible pairs."""
        # Without the mask, each key is visible to a contiguous range of queries.
        work_tile = tile.work_tile
        first, seq_len = work_tile["first_position"], work_tile["seq_len"]
        row = self._rows() + self.wg * PANEL
        first_query, end_query = visible_query_range(
            self.spec.score, row + work_tile["key_position"], first, seq_len
        )
        is_valid = (row >= work_tile["begin"]) & (row < work_tile["end"])
        end_query = jnp.where(is_valid, end_query, first_query)
        position = work_tile.position(tile.tile_index)
        first_query, end_query = first_query - position, end_query - position
        pairs, mask = self._pairs(tile), self.mask
        words = pairs.words_in_range(first_query, end_query)
        if mask is None:
            return pairs.masked(y, words)
        visible = mask.visible(pairs, loaded)
        if mask.is_words:
            return pairs.masked(y, tuple(a & b for a, b in zip(visible, words, strict=True)))
        return pairs.masked(jnp.where(visible, y, -jnp.inf), words)

    def _pairs(self, tile: QueryTile) -> TransposedPairTile:
        return TransposedPairTile(
            head=tile.head,
            first_query=tile.work_tile.position(tile.tile_index),
            first_key=tile.work_tile["key_position"] + self.wg * PANEL,
            columns=self._columns,
            shape=self.spec.s_shape,
            interpret=self.spec.interpret,
        )

    def _score_tile(self, tile: QueryTile) -> ScoreTile:
        """Return the pairs of the tile as a score function takes them."""

        def query() -> PairValue:
            columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_q,), 0, layout=COLUMN)
            return PairValue(columns + tile.work_tile.position(tile.tile_index), (1,))

        return ScoreTile(
            shape=self.spec.s_shape,
            request=tile.work_tile["req"],
            head=lambda: PairValue(tile.head, ()),
            query=query,
            key=lambda: PairValue(self._positions(tile), (0,)),
            is_interpreted=self.spec.is_interpreted,
        )

    def _positions(self, tile: QueryTile) -> Rows:
        return self._rows() + (tile.work_tile["key_position"] + self.wg * PANEL)

    def _rows(self) -> Rows:
        return plgpu.broadcasted_iota(jnp.int32, (PANEL,), 0, layout=ROW)

    def _columns(self) -> Tile:
        """Return the index of each query within its tile."""
        # Loaded at each use; otherwise the compiler keeps all of them in registers.
        return self._broadcast_columns(plgpu.load(self.columns_s, layout=COLUMN, optimized=False))

    def _broadcast_columns(self, x: Columns) -> Tile:
        return lax.broadcast_in_dim(x, self.spec.s_shape, [1])

    def _broadcast_rows(self, x: Rows) -> Tile:
        return lax.broadcast_in_dim(x, self.spec.s_shape, [0])
