"""The 64 rows of an item that one warpgroup computes, and which tiles of keys are for them."""

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref, Rows, Scalar, Tile
from pallas_kernels.varlen_prefill.kernel_mask import PairTile
from pallas_kernels.varlen_prefill.schedule import key_range
from pallas_kernels.varlen_prefill.spec import ROW, M, PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillWorkTile, packed_heads


class MaskedEnds(enum.Flag):
    """Which ends of what is seen a tile of keys may hold: with none of them there is nothing to mask."""

    NONE = 0
    LOW = enum.auto()
    HIGH = enum.auto()
    BOTH = LOW | HIGH


class KvTileRange(NamedTuple):
    """Tiles [begin, end) of an item are for its rows; before low_edge and from high_edge on with a mask."""

    begin: Scalar
    low_edge: Scalar
    high_edge: Scalar
    end: Scalar


class QueryRows:
    """Rows `rank * 64` onward of an item.

    Attributes:
        item: The item.
        rank: The warpgroup's, in its team.
        slope: ALiBi's times log2(e), of the item's head or, where heads share its tile, of each row; or None.
    """

    def __init__(self, item: PrefillWorkTile, rank: Scalar, slopes: Ref, spec: PrefillSpec):
        """With the slopes of all heads, or None."""
        self.item, self.rank, self.spec = item, rank, spec
        self.tokens = spec.sizes.warpgroup_tokens
        self.slope = None if slopes is None else self.of_heads(lambda head: slopes[head])

    def of_heads(self, value_of: Callable[[Scalar], Scalar]) -> Scalar | Rows:
        """The value of the item's head or, where heads share the tile, of each row's."""
        first, *others = packed_heads(self.item, self.spec)
        value = value_of(first.head)
        if not others:
            return value
        row = plgpu.broadcasted_iota(jnp.int32, (M,), 0, layout=ROW)
        of_rows = jnp.where(row >= 0, value, 0.0)
        for head, first_row in others:
            of_rows = jnp.where(row >= first_row, value_of(head), of_rows)
        return of_rows

    @property
    def first_query(self) -> Scalar:
        """Position of the first row."""
        return self.item["position"] + self.rank * self.tokens

    def positions(self) -> Rows:
        """Position of each row."""
        first, row = self.first_query, plgpu.broadcasted_iota(jnp.int32, (M,), 0, layout=ROW)
        return (row if self.tokens == M else row & (self.tokens - 1)) + first

    def has_work(self) -> Scalar:
        """Whether these rows are some of the item's, and it has keys."""
        first, item = self.rank * self.tokens, self.item
        return (item.num > 0) & (first < item["end"]) & (first + self.tokens > item["begin"])

    def first_tile(self, begin: Scalar) -> "KvTile":
        """The first tile of a share, either end of what is seen perhaps in it."""
        return KvTile(self, self.item.first_entry() + begin, MaskedEnds.BOTH)

    def tile(self, i: Scalar, edges: MaskedEnds) -> "KvTile":
        """The item's tile i; what its list says is read early, if somebody asks: it is in global memory."""
        is_asked = edges is not MaskedEnds.NONE or self.spec.has_alibi
        return KvTile(self, self.item.entry(i) if is_asked else None, edges)

    def share(self) -> KvTileRange:
        """Which tiles of the item are for these rows."""
        item = self.item
        if self.spec.has_lists:
            low_edge = jnp.maximum(jnp.minimum(item["num_partial"], item.num), 1)
            return KvTileRange(jnp.int32(0), low_edge, item.num, item.num)
        score, tile = self.spec.score, jnp.int32(self.spec.sizes.tile_kv)
        nearest = lambda row: item["position"] + jnp.clip(row, item["begin"], item["end"] - 1)
        live, last = nearest(self.rank * self.tokens), nearest(self.rank * self.tokens + (self.tokens - 1))
        full_low, _ = key_range(score, last, item["seq_len"])
        _, full_high = key_range(score, live, item["seq_len"])
        full_low, full_high = jnp.maximum(full_low, 0), jnp.minimum(full_high, item["seq_len"])
        # Later tiles are for the rows of later warpgroups, with a window earlier ones for those of earlier.
        low, _ = key_range(score, live, item["seq_len"])
        _, high = key_range(score, last, item["seq_len"])
        end = lax.div(jnp.clip(high, 0, item["seq_len"]) + item.skew + (tile - 1), tile) - item.first
        end = jnp.clip(end, 1, item.num)
        begin, low_edge = jnp.int32(0), jnp.int32(1)
        if self.spec.has_window:
            begin = jnp.clip(lax.div(jnp.maximum(low, 0) + item.skew, tile) - item.first, 0, end - 1)
            low_edge = lax.div(full_low + item.skew + (tile - 1), tile) - item.first
            low_edge = jnp.clip(low_edge, begin + 1, end)
        high_edge = lax.div(jnp.maximum(full_high, 0) + item.skew, tile) - item.first
        return KvTileRange(begin, low_edge, jnp.clip(high_edge, low_edge, end), end)


class KvTile(NamedTuple):
    """A tile of keys before a warpgroup's rows.

    Attributes:
        rows: The rows.
        entry: What the item's list says of the tile; None where nobody asks.
        edges: Which ends of what a query sees may be in it.
    """

    rows: QueryRows
    entry: Scalar | None
    edges: MaskedEnds

    def first_key(self) -> Scalar:
        """Position of its first key."""
        assert self.entry is not None
        return self.rows.item.first_key(self.entry)

    def pairs(self, columns: Callable[[], Tile]) -> PairTile:
        """As masks are asked about it; `columns()` is the number of each key in the tile."""
        spec = self.rows.spec
        assert spec.sizes.pack_gqa == 1 or spec.mask is None  # masks are asked about a head
        return PairTile(
            head=self.rows.item.head,
            first_query=self.rows.first_query,
            first_key=self.first_key(),
            columns=columns,
            shape=self.rows.spec.s_shape,
            interpret=self.rows.spec.interpret,
        )
