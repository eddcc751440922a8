"""What queries see of a tile of keys, and the bias of ALiBi: what becomes of scores before the softmax."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.paged_decode.tile_keys import TileKeys
from pallas_kernels.shared import paged_kv
from pallas_kernels.shared.types import Columns, Scalar, Tile

W = plgpu.Layout.WGMMA


class Mask:
    """The mask of a layer, for one tile of query rows."""

    def __init__(self, spec: DecodeSpec, head_tile: Scalar):
        self.spec, self.score, self.shape = spec, spec.score, spec.shape
        self.rows = plgpu.broadcasted_iota(jnp.int32, spec.tile, 0, layout=W)
        self.first_query_row = lax.rem(head_tile, jnp.int32(self.shape.row_tiles)) * self.shape.tile_q

    def apply(self, s: Tile, segment: Segment, keys: TileKeys, slopes: Columns | None) -> Tile:
        """Scores with ALiBi, -inf where a query does not see a key: past its end, or out of its window."""
        position = self.query_positions(segment)
        if slopes is not None:
            s = self.with_alibi(s, slopes, position, keys)
        s = self.only_in_range(s, segment, position, keys)
        return self.only_listed(s, keys) if self.shape.lists_have_head_bits else s

    def query_positions(self, segment: Segment) -> Scalar | Tile:
        """Positions of the queries: a scalar where all rows are one token."""
        if self.shape.query_len == 1:
            return segment.seq_len - 1
        rows = self.query_rows()
        return lax.div(rows, jnp.full_like(rows, self.shape.group)) + (segment.seq_len - self.shape.query_len)

    def query_rows(self) -> Tile:
        """Which of a kv head's query rows each column of the scores is."""
        return plgpu.broadcasted_iota(jnp.int32, self.spec.tile, 1, layout=W) + self.first_query_row

    def with_alibi(self, s: Tile, slopes: Columns, position: Scalar | Tile, keys: TileKeys) -> Tile:
        """Scores less a head's slope times the distance, or its root."""
        back = (position - keys.of_rows(self.rows)).astype(jnp.float32)
        if self.score.sqrt_alibi:
            back = jnp.sqrt(jnp.maximum(back, 0.0))
        return s - lax.broadcast_in_dim(slopes, self.spec.tile, [1]) * back

    def only_in_range(self, s: Tile, segment: Segment, position: Scalar | Tile, keys: TileKeys) -> Tile:
        """Causality, windows and chunks. Skipped where every query sees every key of the tile."""
        seen_by_all, _ = self.score.key_range(segment.seq_len - 1, segment.seq_len)
        _, until = self.score.key_range(segment.seq_len - self.shape.query_len, segment.seq_len)

        def mask() -> Tile:
            at = keys.of_rows(self.rows)
            low, high = self.score.key_range(position, segment.seq_len)
            return jnp.where((at >= low) & (at < high), s, -jnp.inf)

        return lax.cond(keys.reach_out(seen_by_all, until), mask, lambda: s)

    def only_listed(self, s: Tile, keys: TileKeys) -> Tile:
        """What a list says that a query head sees of its group's blocks."""
        rows = self.query_rows()
        head = lax.rem(rows, jnp.full_like(rows, self.shape.group))
        return jnp.where(lax.shift_right_logical(keys.heads_of(self.rows), head) & 1 != 0, s, -jnp.inf)


def has_unseen(segment: Segment, keys: TileKeys) -> Scalar:
    """Whether the tile has keys that no query sees."""
    return keys.reach_out(segment.low, segment.high)


def where_visible(x: Tile, segment: Segment, keys: TileKeys, otherwise: float) -> Tile:
    """Rows of x, one a key; `otherwise` for keys that no query sees."""
    return paged_kv.where_visible(x, keys.over(x.shape), segment.low, segment.high, otherwise)
