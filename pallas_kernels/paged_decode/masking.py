"""ALiBi and the mask of decode, applied to a tile of scores before the softmax."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.paged_decode.tile_keys import TileKeys
from pallas_kernels.shared import paged_kv
from pallas_kernels.shared.types import Columns, Scalar, Tile

W = plgpu.Layout.WGMMA


class DecodeMask:
    """The mask and the bias of a layer, for one tile of query rows."""

    def __init__(self, spec: DecodeSpec, head_tile: Scalar):
        self.spec, self.score, self.shape = spec, spec.score, spec.shape
        self.rows = plgpu.broadcasted_iota(jnp.int32, spec.tile, 0, layout=W)
        self.first_query_row = lax.rem(head_tile, jnp.int32(self.shape.row_tiles)) * self.shape.tile_q

    def apply(self, s: Tile, segment: Segment, keys: TileKeys, slopes: Columns | None) -> Tile:
        """Return the scores with ALiBi's bias, and -inf where a query does not attend to a key.

        Args:
            s: Scores times log2(e), [tile_kv, tile_q].
            segment: Segment of the tile.
            keys: Key positions of the tile.
            slopes: ALiBi slopes times log2(e), or None.
        """
        position = self.query_positions(segment)
        if slopes is not None:
            s = self.add_alibi(s, slopes, position, keys)
        s = self.mask_range(s, segment, position, keys)
        return self.mask_heads(s, keys) if self.shape.lists_have_head_bits else s

    def query_positions(self, segment: Segment) -> Scalar | Tile:
        """Return the position of each column's query; a scalar if all columns belong to one token."""
        if self.shape.query_len == 1:
            return segment.seq_len - 1
        rows = self.query_rows()
        return lax.div(rows, jnp.full_like(rows, self.shape.group)) + (segment.seq_len - self.shape.query_len)

    def query_rows(self) -> Tile:
        """Return, for each column of the scores, the index of its query row among the rows of the KV head."""
        return plgpu.broadcasted_iota(jnp.int32, self.spec.tile, 1, layout=W) + self.first_query_row

    def add_alibi(self, s: Tile, slopes: Columns, position: Scalar | Tile, keys: TileKeys) -> Tile:
        """Return the scores minus the slope times the distance to the key, or its square root."""
        distance = (position - keys.row_positions(self.rows)).astype(jnp.float32)
        if self.score.sqrt_alibi:
            distance = jnp.sqrt(jnp.maximum(distance, 0.0))
        return s - lax.broadcast_in_dim(slopes, self.spec.tile, [1]) * distance

    def mask_range(self, s: Tile, segment: Segment, position: Scalar | Tile, keys: TileKeys) -> Tile:
        """Apply the causal, window and chunk masks, unless every query attends to every key of the tile."""
        first_key_for_all, _ = self.score.key_range(segment.seq_len - 1, segment.seq_len)
        _, end_key_for_all = self.score.key_range(segment.seq_len - self.shape.query_len, segment.seq_len)

        def mask() -> Tile:
            key = keys.row_positions(self.rows)
            first_key, end_key = self.score.key_range(position, segment.seq_len)
            return jnp.where((key >= first_key) & (key < end_key), s, -jnp.inf)

        return lax.cond(keys.has_key_outside(first_key_for_all, end_key_for_all), mask, lambda: s)

    def mask_heads(self, s: Tile, keys: TileKeys) -> Tile:
        """Mask the keys of sparse blocks that a query head does not visit.

        Each list entry has one bit per query head of the group (`lists_have_head_bits`).
        """
        rows = self.query_rows()
        head = lax.rem(rows, jnp.full_like(rows, self.shape.group))
        head_bits = keys.row_head_bits(self.rows)
        return jnp.where(lax.shift_right_logical(head_bits, head) & 1 != 0, s, -jnp.inf)


def has_masked_out_keys(segment: Segment, keys: TileKeys) -> Scalar:
    """Return whether the tile has keys that no query of the request attends to."""
    return keys.has_key_outside(segment.first_key, segment.end_key)


def where_visible(x: Tile, segment: Segment, keys: TileKeys, fill: float) -> Tile:
    """Return `x`, which has one row per key, with `fill` in the rows of keys that no query attends to."""
    return paged_kv.where_visible(x, keys.tile_positions(x.shape), segment.first_key, segment.end_key, fill)
