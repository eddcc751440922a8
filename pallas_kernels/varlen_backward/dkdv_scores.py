"""Probabilities and score gradients of the 64 keys of a warpgroup and a query tile; one row per key."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.score_mod import KernelScoreMod, PairValue, Positions, ScoreTile
from pallas_kernels.shared.layouts import COLUMN, ROW, WARPGROUP_ROWS
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Columns, Ref, Rows, Scalar, Tile, f32
from pallas_kernels.varlen_backward.dkdv_spec import DkDvSpec
from pallas_kernels.varlen_backward.dkdv_tile_scheduler import DkDvWorkTile
from pallas_kernels.varlen_backward.refs import DELTA, LSE
from pallas_kernels.varlen_backward.schedule import visible_query_range
from pallas_kernels.varlen_backward.scores import (
    LoadedScoreData,
    apply_score_mod,
    apply_soft_cap,
    has_weight,
    score_weight,
)
from pallas_kernels.varlen_prefill import PairTile
from pallas_kernels.varlen_prefill.kernel_mask import WORD_BITS, KernelMask, LoadedMask, join_half_words
from pallas_kernels.varlen_prefill.softmax import load_column_indices


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
    def query(self) -> Tile:
        """Position of each pair's query."""
        return self.columns().astype(jnp.int32) + self.first_query

    @property
    def key(self) -> Tile:
        """Position of each pair's key."""
        return self.broadcast_rows(self.row_positions)


NO_QUERY = 2**30  # position of the queries of runs that a tile lacks: after the end of every request


class QueryTile(NamedTuple):
    """A query tile that attends to the keys of a work tile.

    Attributes:
        work_tile: Work tile of the keys.
        head: Query head.
        runs: Index of each run of consecutive queries, which may be the tile itself: in the request or, with
            tile lists, among the runs of all requests. A missing run has the index of another run.
        slope: ALiBi slope of the head times log2(e), or None.
        is_masked: Whether the tile needs a mask. Static.
        num_missing: Number of missing runs, the first ones of the tile. At most 0 for none.
    """

    work_tile: DkDvWorkTile
    head: Scalar
    runs: tuple[Scalar, ...]
    slope: Scalar | None
    is_masked: bool
    num_missing: Scalar | int = 0

    @property
    def tile_index(self) -> Scalar:
        """Index of a tile of consecutive queries, its only run."""
        (run,) = self.runs
        return run

    def run_starts(self) -> tuple[Scalar, ...]:
        """Return the position of the first query of each run; NO_QUERY for missing runs."""
        starts = [self.work_tile.position(run) for run in self.runs]
        *others, last = starts  # the last run is never missing
        starts = [jnp.where(n < self.num_missing, NO_QUERY, start) for n, start in enumerate(others)]
        return *starts, last


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
        rank: Scalar,
        spec: DkDvSpec,
    ):
        """Create the functions of a warpgroup.

        Args:
            mask: Mask of partial tiles, with references to its arrays, or None.
            score_mod: Score function, with references to its arrays, or None.
            columns_s: Shared memory for the indices of the queries within a tile, f32 [tile_q].
            rank: Index of the warpgroup among those of its work tile.
            spec: Static description of the kernel.
        """
        self.mask, self.score_mod = mask, score_mod
        self.columns_s, self.rank, self.spec = columns_s, rank, spec

    def store_column_indices(self) -> None:
        """Store the column indices in shared memory."""
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_q,), 0, layout=COLUMN)
        self.columns_s[...] = columns.astype(f32)

    def load(self, tile: QueryTile) -> LoadedScoreData:
        """Load what the mask and the score function of a tile need; the data is in global memory."""
        mask: tuple[LoadedMask, ...] = ()
        lookups = None
        if tile.is_masked and jax.tree.leaves(self.mask):
            assert self.mask is not None
            mask = tuple(self.mask.load(pairs, tile.work_tile["req"]) for pairs in self._run_pairs(tile))
        if self.score_mod is not None:
            # The accumulators leave too few registers for a branch.
            score_tile = self._score_tile(tile)
            lookups = self.score_mod.load(score_tile, with_derivative=True, finds_uniform=False)
        return LoadedScoreData(mask, lookups)

    def lse(self, stats_s: Ref, tile: QueryTile) -> Columns:
        """Return the base-2 LSE of each query, from shared memory [2, tile_q].

        Call it before issuing the product that its use overlaps with: a load from shared memory waits for all
        products that were issued before it.
        """
        lse = plgpu.load(stats_s.at[LSE], layout=COLUMN, optimized=False)
        if tile.slope is None or self.spec.score.sqrt_alibi or self.score_mod is not None:
            return lse
        # The query's part of a linear ALiBi bias, -slope * column, is subtracted together with the LSE.
        return lse + self._column_indices() * tile.slope

    def delta(self, stats_s: Ref) -> Columns:
        """Return delta of each query, from shared memory [2, tile_q]; call it early, like `lse`."""
        return plgpu.load(stats_s.at[DELTA], layout=COLUMN, optimized=False)

    def probabilities(
        self, s: Tile, lse: Columns, tile: QueryTile, loaded: LoadedScoreData
    ) -> TileProbabilities:
        """Return the probabilities of transposed scores.

        Args:
            s: Transposed scores K Q^T, not scaled, f32 [64, tile_q].
            lse: Base-2 log-sum-exp of each query, from `lse`.
            tile: Query tile.
            loaded: Result of `load` for this tile.
        """
        score, tanh, derivative = self.spec.score, None, None
        y, factor = s, score.scale
        if self.score_mod is None or score.soft_cap is not None or tile.slope is not None:
            (y, tanh), factor = apply_soft_cap(s, score), 1 / LOG2E
        if tile.slope is not None:
            y = self._add_alibi(y, tile, tile.slope)
        if self.score_mod is None:
            y = y - self._broadcast_columns(lse)
        else:
            assert loaded.lookups is not None
            y, derivative = apply_score_mod(
                self.score_mod, y, factor, lse, self._score_tile(tile), loaded.lookups
            )
        p = jnp.exp2(self._masked(y, tile, loaded.mask) if tile.is_masked else y)
        weight = score_weight(p, tanh, derivative, self.score_mod)
        p = p if self.spec.sizes.per_warp_mma else p.astype(self.spec.dtype)
        return TileProbabilities(p, weight, tile.is_masked)

    def ds(self, probabilities: TileProbabilities, dp: Tile, delta: Columns) -> Tile:
        """Return dS without the softmax scale."""
        ds = probabilities.weight * (dp - self._broadcast_columns(delta))
        if not probabilities.is_masked:
            return ds
        return jnp.where(has_weight(probabilities.weight, self.score_mod), ds, 0.0)

    def _add_alibi(self, y: Tile, tile: QueryTile, slope: Scalar) -> Tile:
        """Add the ALiBi bias; without a score function, the query's part of a linear bias is in the LSE."""
        # The distance of a query and a key is the query's column minus the key's offset from the first query.
        offsets = self._rows() + self._first_key(tile) - tile.work_tile.position(tile.tile_index)
        if not self.spec.score.sqrt_alibi:
            y = y + self._broadcast_rows(offsets.astype(f32) * slope)
            return y if self.score_mod is None else y - self._columns() * slope
        distances = jnp.maximum(self._columns() - self._broadcast_rows(offsets.astype(f32)), 0.0)
        return y - jnp.sqrt(distances) * slope

    def _masked(self, y: Tile, tile: QueryTile, loaded: tuple[LoadedMask, ...]) -> Tile:
        """Return the exponents with -inf for invisible pairs.

        The queries that attend to a key are bits of words, of 32 queries each, one run after the other.
        """
        # Without the mask, each key is visible to a contiguous range of queries.
        work_tile = tile.work_tile
        first, end = work_tile["first_position"], work_tile["end_position"]
        row = self._rows() + self.rank * WARPGROUP_ROWS
        first_query, end_query = visible_query_range(
            self.spec.score, row + work_tile["key_position"], first, end
        )
        is_valid = (row >= work_tile["begin"]) & (row < work_tile["end"])
        end_query = jnp.where(is_valid, end_query, first_query)
        words: list[Rows] = []
        runs = self._run_pairs(tile)
        for pairs, data in zip(runs, loaded or ((),) * len(runs), strict=True):
            run_words = pairs.words_in_range(first_query - pairs.first_query, end_query - pairs.first_query)
            if self.mask is not None:
                visible = self.mask.visible(pairs, data)
                if not self.mask.is_words:
                    # Only tiles of consecutive queries have such masks.
                    return pairs.masked(jnp.where(visible, y, -jnp.inf), run_words)
                run_words = tuple(a & b for a, b in zip(visible, run_words, strict=True))
            words += run_words
        if self.spec.run_length < WORD_BITS:
            words = list(join_half_words(words))
        return runs[0].masked(y, tuple(words))

    def _run_pairs(self, tile: QueryTile) -> tuple[TransposedPairTile, ...]:
        """Return the pairs of each run of consecutive queries; 16 come with the 16 queries after them."""
        first_key = self._first_key(tile)
        return tuple(
            TransposedPairTile(
                head=tile.head,
                first_query=start,
                first_key=first_key,
                columns=self._columns,
                shape=(WARPGROUP_ROWS, max(self.spec.run_length, WORD_BITS)),
                interpret=self.spec.interpret,
            )
            for start in tile.run_starts()
        )

    def _score_tile(self, tile: QueryTile) -> ScoreTile:
        """Return the pairs of the tile as a score function takes them."""
        tile_q = self.spec.sizes.tile_q

        def columns() -> Columns:
            return plgpu.broadcasted_iota(jnp.int32, (tile_q,), 0, layout=COLUMN)

        return ScoreTile(
            shape=self.spec.s_shape,
            request=tile.work_tile["req"],
            head=PairValue(lambda: tile.head, ()),
            query=Positions(
                tile.work_tile.position(tile.tile_index), columns, (1,), tile_q, self._column_indices
            ),
            key=Positions(self._first_key(tile), self._rows, (0,), WARPGROUP_ROWS),
            query_axis=1,
            is_interpreted=self.spec.is_interpreted,
        )

    def _first_key(self, tile: QueryTile) -> Scalar:
        """Return the position of the warpgroup's first key."""
        return tile.work_tile["key_position"] + self.rank * WARPGROUP_ROWS

    def _rows(self) -> Rows:
        return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW)

    def _columns(self) -> Tile:
        """Return the index of each query within its tile."""
        return self._broadcast_columns(self._column_indices())

    def _column_indices(self) -> Columns:
        return load_column_indices(self.columns_s)

    def _broadcast_columns(self, x: Columns) -> Tile:
        return lax.broadcast_in_dim(x, self.spec.s_shape, [1])

    def _broadcast_rows(self, x: Rows) -> Tile:
        return lax.broadcast_in_dim(x, self.spec.s_shape, [0])
