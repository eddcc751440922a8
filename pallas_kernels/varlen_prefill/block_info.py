"""The KV tiles that one warpgroup's query rows attend to, and which of them need masking."""

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
    """Ends of the range of visible keys that a KV tile may contain; a tile with neither needs no mask."""

    NONE = 0
    LOW = enum.auto()
    HIGH = enum.auto()
    BOTH = LOW | HIGH


class KvTileRange(NamedTuple):
    """The KV tiles that a warpgroup's rows attend to, as indices among the KV tiles of the work tile.

    Attributes:
        begin: First tile that the rows attend to.
        full_begin: First tile that needs no mask.
        full_end: One past the last tile that needs no mask.
        end: One past the last tile that the rows attend to.
    """

    begin: Scalar
    full_begin: Scalar
    full_end: Scalar
    end: Scalar


class QueryRows:
    """The 64 rows of a work tile that one warpgroup computes: rows `rank * 64` onward.

    Attributes:
        work_tile: Work tile that the rows belong to.
        rank: Index of the warpgroup in its team.
        slope: ALiBi slope times log2(e) of the head or, with packed heads, of each row; None without ALiBi.
    """

    def __init__(self, work_tile: PrefillWorkTile, rank: Scalar, slopes: Ref, spec: PrefillSpec):
        """Create the rows; `slopes` are the ALiBi slopes of all query heads times log2(e), or None."""
        self.work_tile, self.rank, self.spec = work_tile, rank, spec
        self.tokens = spec.sizes.warpgroup_tokens
        self.slope = None if slopes is None else self.per_head(lambda head: slopes[head])

    def per_head(self, head_value: Callable[[Scalar], Scalar]) -> Scalar | Rows:
        """Return `head_value(head)` for the work tile's head or, with packed heads, for each row's head."""
        first, *rest = packed_heads(self.work_tile, self.spec)
        value = head_value(first.head)
        if not rest:
            return value
        row = plgpu.broadcasted_iota(jnp.int32, (M,), 0, layout=ROW)
        values = jnp.where(row >= 0, value, 0.0)
        for head, first_row in rest:
            values = jnp.where(row >= first_row, head_value(head), values)
        return values

    @property
    def first_query(self) -> Scalar:
        """Position of the query in the first row."""
        return self.work_tile["position"] + self.rank * self.tokens

    def positions(self) -> Rows:
        """Return the position of the query in each row."""
        first, row = self.first_query, plgpu.broadcasted_iota(jnp.int32, (M,), 0, layout=ROW)
        return (row if self.tokens == M else row & (self.tokens - 1)) + first

    def has_work(self) -> Scalar:
        """Return whether at least one of these rows is valid and the work tile has keys."""
        first, work_tile = self.rank * self.tokens, self.work_tile
        return (work_tile.num > 0) & (first < work_tile["end"]) & (first + self.tokens > work_tile["begin"])

    def first_tile(self, tile_index: Scalar) -> "KvTile":
        """Return the first KV tile that the rows attend to.

        It may contain both ends of the visible range of keys.

        Args:
            tile_index: Index of the KV tile among those of the work tile; 0 with tile lists.
        """
        return KvTile(self, self.work_tile.first_entry() + tile_index, MaskedEnds.BOTH)

    def tile(self, i: Scalar, masked_ends: MaskedEnds) -> "KvTile":
        """Return the i-th KV tile of the work tile; it may contain the `masked_ends` of the key range."""
        # Read the entry early, and only if it is used: it comes from global memory.
        is_used = masked_ends is not MaskedEnds.NONE or self.spec.has_alibi
        return KvTile(self, self.work_tile.entry(i) if is_used else None, masked_ends)

    def kv_tile_range(self) -> KvTileRange:
        """Return the range of KV tiles that the rows attend to, and the range of those that need no mask."""
        work_tile = self.work_tile
        if self.spec.has_lists:
            full_begin = jnp.maximum(jnp.minimum(work_tile["num_partial"], work_tile.num), 1)
            return KvTileRange(jnp.int32(0), full_begin, work_tile.num, work_tile.num)
        score, tile, offset = self.spec.score, jnp.int32(self.spec.sizes.tile_kv), work_tile.alignment_offset

        def position_of_nearest_valid_row(row: Scalar) -> Scalar:
            return work_tile["position"] + jnp.clip(row, work_tile["begin"], work_tile["end"] - 1)

        first = position_of_nearest_valid_row(self.rank * self.tokens)
        last = position_of_nearest_valid_row(self.rank * self.tokens + (self.tokens - 1))
        # Keys in [full_first_key, full_end_key) are visible to all rows.
        full_first_key, _ = key_range(score, last, work_tile["seq_len"])
        _, full_end_key = key_range(score, first, work_tile["seq_len"])
        full_first_key = jnp.maximum(full_first_key, 0)
        full_end_key = jnp.minimum(full_end_key, work_tile["seq_len"])
        # The work tile has more KV tiles at the end, for the rows of later warpgroups, and with a window at
        # the start, for the rows of earlier warpgroups.
        first_key, _ = key_range(score, first, work_tile["seq_len"])
        _, end_key = key_range(score, last, work_tile["seq_len"])
        end = (
            lax.div(jnp.clip(end_key, 0, work_tile["seq_len"]) + offset + (tile - 1), tile) - work_tile.first
        )
        end = jnp.clip(end, 1, work_tile.num)
        begin, full_begin = jnp.int32(0), jnp.int32(1)
        if self.spec.has_window:
            begin = jnp.clip(lax.div(jnp.maximum(first_key, 0) + offset, tile) - work_tile.first, 0, end - 1)
            full_begin = lax.div(full_first_key + offset + (tile - 1), tile) - work_tile.first
            full_begin = jnp.clip(full_begin, begin + 1, end)
        full_end = lax.div(jnp.maximum(full_end_key, 0) + offset, tile) - work_tile.first
        return KvTileRange(begin, full_begin, jnp.clip(full_end, full_begin, end), end)


class KvTile(NamedTuple):
    """A KV tile together with the query rows of one warpgroup.

    Attributes:
        rows: Query rows of the warpgroup.
        entry: Entry of the tile list, or index of the KV tile without lists; None if it is not used.
        masked_ends: Which ends of the visible range may lie in the tile.
    """

    rows: QueryRows
    entry: Scalar | None
    masked_ends: MaskedEnds

    def first_key(self) -> Scalar:
        """Return the position of the tile's first key."""
        assert self.entry is not None
        return self.rows.work_tile.first_key(self.entry)

    def pairs(self, columns: Callable[[], Tile]) -> PairTile:
        """Return the (query, key) pairs of the tile, which mask functions take.

        Args:
            columns: Function that returns the index of each key within the tile, f32 [64, tile_kv].
        """
        spec = self.rows.spec
        assert spec.sizes.pack_gqa == 1 or spec.mask is None  # masks are evaluated for one head
        return PairTile(
            head=self.rows.work_tile.head,
            first_query=self.rows.first_query,
            first_key=self.first_key(),
            columns=columns,
            shape=self.rows.spec.s_shape,
            interpret=self.rows.spec.interpret,
        )
