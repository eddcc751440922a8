"""Of a warpgroup's keys and a tile of queries: probabilities, and gradients of scores. A row is a key."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Columns, Ref, Rows, Scalar, Tile
from pallas_kernels.varlen_backward.schedule import visible_query_range
from pallas_kernels.varlen_backward.spec import COLUMN, ROW, BackwardSpec, f32
from pallas_kernels.varlen_backward.tile_scheduler import BackwardWorkTile
from pallas_kernels.varlen_prefill import PairTile
from pallas_kernels.varlen_prefill.kernel_mask import LoadedMask


def apply_soft_cap(s: Tile, score: Score) -> tuple[Tile, Tile | None]:
    """Q K^T scaled and soft-capped, times log2(e); and of what the cap bends its tanh, None without a cap."""
    if score.soft_cap is None:
        return s * (score.scale * LOG2E), None
    bend = jnp.tanh(s * (score.scale / score.soft_cap))
    return bend * (score.soft_cap * LOG2E), bend


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransposedPairTile(PairTile):
    """PairTile on its side."""

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
        """Of the tile."""
        return self.shape[1]

    @property
    def queries(self) -> Columns:
        """Position of each query."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape[1:], 0, layout=COLUMN) + self.first_query

    def of_queries(self, x: Scalar) -> Columns:
        """One value to that of each query."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape[1:], []), COLUMN)

    def wide_queries(self, x: Columns) -> Tile:
        """One value a query to one a pair."""
        return lax.broadcast_in_dim(x, self.shape, [1])

    @property
    def query(self) -> Tile:
        """Position of each pair's query."""
        return self.columns().astype(jnp.int32) + self.first_query

    @property
    def key(self) -> Tile:
        """Position of each pair's key."""
        return self.wide(self.rows)


class QueryTile(NamedTuple):
    """A tile of queries before a warpgroup's keys.

    Attributes:
        item: The keys' item.
        head: The query head.
        nth: Number of the tile, of the request's.
        slope: ALiBi's of the head, times log2(e), or None.
        is_masked: Static: some pair of it may not be seen.
    """

    item: BackwardWorkTile
    head: Scalar
    nth: Scalar
    slope: Scalar | None
    is_masked: bool

    def live(self) -> tuple[Scalar, Scalar]:
        """First of its rows that is the request's, and one past the last."""
        position = self.item.position(self.nth)
        return self.item["first_position"] - position, self.item["seq_len"] - position


class TileProbabilities(NamedTuple):
    """Of a tile.

    Attributes:
        p: Probabilities, in 16 bits.
        weight: The same in f32, times the soft cap's derivative.
        is_masked: Static: as the tile is; 0 where a pair is not seen.
    """

    p: Tile
    weight: Tile
    is_masked: bool


class DkDvScores:
    """Of one warpgroup."""

    def __init__(self, arrays: tuple[Ref, ...], columns_s: Ref, wg: Scalar, spec: BackwardSpec):
        """With the mask's arrays, and of shared memory what refs.Smem has for it."""
        self.arrays, self.columns_s, self.wg, self.spec = arrays, columns_s, wg, spec

    def store_columns(self) -> None:
        """Numbers the queries of a tile."""
        columns = plgpu.broadcasted_iota(jnp.int32, (self.spec.sizes.tile_q,), 0, layout=COLUMN)
        self.columns_s[...] = columns.astype(f32)
        plgpu.commit_smem()

    def stored(self, tile: QueryTile) -> LoadedMask:
        """What the mask has stored of a tile: read early, for it comes from global memory."""
        if not tile.is_masked or not self.arrays:
            return ()
        assert self.spec.mask is not None
        return self.spec.mask.load(self._pairs(tile), tile.item["req"], self.arrays)

    def stats(self, stats_s: Ref, which: int, tile: QueryTile) -> Columns:
        """Of [2, tile_q] in SMEM: what scores are less (0), or gradients of probabilities (1).

        To be loaded before the tensor core is given what runs beside their use: a load of shared memory waits
        behind every product that was issued before it.
        """
        less = plgpu.load(stats_s.at[which], layout=COLUMN, optimized=False)
        if which or tile.slope is None or self.spec.score.sqrt_alibi:
            return less
        return less + plgpu.load(self.columns_s, layout=COLUMN, optimized=False) * tile.slope

    def probabilities(self, s: Tile, less: Columns, tile: QueryTile, stored: LoadedMask) -> TileProbabilities:
        """Of Q K^T; `less` is stats(0), `stored` what the mask has stored."""
        y, bend = apply_soft_cap(s, self.spec.score)
        if tile.slope is not None:
            y = self._biased(y, tile, tile.slope)
        y = y - self._wide(less)
        p = jnp.exp2(self._masked(y, tile, stored) if tile.is_masked else y)
        # Not the cap's part and p: registers are short.
        weight = p if bend is None else p * (1.0 - bend * bend)
        return TileProbabilities(p.astype(self.spec.dtype), weight, tile.is_masked)

    def gradients(self, of: TileProbabilities, grad_p: Tile, less: Columns) -> Tile:
        """Of scores, but for the scale; `less` is stats(1)."""
        grad = of.weight * (grad_p - self._wide(less))
        return jnp.where(of.weight > 0.0, grad, 0.0) if of.is_masked else grad

    def _biased(self, y: Tile, tile: QueryTile, slope: Scalar) -> Tile:
        """With ALiBi's slope times the distance; of what is linear a column's part is in stats(0)."""
        first = self._positions(tile) - tile.item.position(tile.nth)
        if not self.spec.score.sqrt_alibi:
            return y + self._of_rows(first.astype(f32) * slope)
        distances = jnp.maximum(self._columns() - self._of_rows(first.astype(f32)), 0.0)
        return y - jnp.sqrt(distances) * slope

    def _masked(self, y: Tile, tile: QueryTile, stored: LoadedMask) -> Tile:
        """-inf where a pair is not seen: of each key the queries from one on up to another see it at most."""
        item = tile.item
        first, seq_len = item["first_position"], item["seq_len"]
        row = self._rows() + self.wg * UNIT
        low, high = visible_query_range(self.spec.score, row + item["key_position"], first, seq_len)
        is_live = (row >= item["begin"]) & (row < item["end"])
        high = jnp.where(is_live, high, low)
        position = item.position(tile.nth)
        low, high = low - position, high - position
        pairs, mask = self._pairs(tile), self.spec.mask
        words = pairs.words_between(low, high)
        if mask is None:
            return pairs.masked(y, words)
        seen = mask.visible(pairs, stored)
        if mask.is_words:
            return pairs.masked(y, tuple(a & b for a, b in zip(seen, words, strict=True)))
        return pairs.masked(jnp.where(seen, y, -jnp.inf), words)

    def _pairs(self, tile: QueryTile) -> TransposedPairTile:
        return TransposedPairTile(
            head=tile.head,
            first_query=tile.item.position(tile.nth),
            first_key=tile.item["key_position"] + self.wg * UNIT,
            columns=self._columns,
            shape=self.spec.s_shape,
            interpret=self.spec.interpret,
        )

    def _positions(self, tile: QueryTile) -> Rows:
        return self._rows() + (tile.item["key_position"] + self.wg * UNIT)

    def _rows(self) -> Rows:
        return plgpu.broadcasted_iota(jnp.int32, (UNIT,), 0, layout=ROW)

    def _columns(self) -> Tile:
        """Number of each query in its tile. Read, or the compiler keeps them all in registers."""
        return self._wide(plgpu.load(self.columns_s, layout=COLUMN, optimized=False))

    def _wide(self, x: Columns) -> Tile:
        return lax.broadcast_in_dim(x, self.spec.s_shape, [1])

    def _of_rows(self, x: Rows) -> Tile:
        return lax.broadcast_in_dim(x, self.spec.s_shape, [0])
