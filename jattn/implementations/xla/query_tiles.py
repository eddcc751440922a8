"""Query tiles of the prefill region: up to tile_q tokens of one request each, computed once per step."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32, Shaped

from jattn.batch.metadata import BatchMetadata
from jattn.pytree import pytree, static

TILE_Q = 64  # queries per tile


@pytree
class QueryTiles:
    """Query tiles of the prefill region, in token order; unused tiles have length 0.

    Attributes:
        rows: Row of the metadata that each tile belongs to.
        starts: Index of each tile's first token, counted from the start of the prefill region.
        lens: Number of valid tokens per tile.
        tile_q: Tokens per tile (static).
    """

    rows: Int32[Array, " tiles"]
    starts: Int32[Array, " tiles"]
    lens: Int32[Array, " tiles"]
    tile_q: int = static()

    def token_index(self, past_end: int) -> Int[Array, "tiles tile_q"]:
        """Return the token indices of each tile, `past_end` for unused entries."""
        offsets = jnp.arange(self.tile_q, dtype=jnp.int32)[None, :]
        return jnp.where(offsets < self.lens[:, None], self.starts[:, None] + offsets, past_end)

    def first_positions(self, metadata: BatchMetadata) -> Int32[Array, " tiles"]:
        """Return the position of each tile's first token in its request."""
        first_token = self.starts + metadata.bucket.max_decode_tokens
        return metadata.num_computed_tokens[self.rows] + first_token - metadata.row_starts[self.rows]


def prefill_tiles(metadata: BatchMetadata, tile_q: int | None = None) -> QueryTiles:
    """Split the prefill region into query tiles; the bucket bounds their number.

    Args:
        metadata: Metadata of the step.
        tile_q: Tokens per tile; None uses TILE_Q, or fewer if the region is smaller.
    """
    bucket = metadata.bucket
    if tile_q is None:
        tile_q = min(TILE_Q, -(-max(bucket.max_prefill_tokens, 1) // 8) * 8)
    bound = min(bucket.max_prefill_tokens // tile_q + bucket.max_prefills, bucket.max_prefill_tokens)
    lens = metadata.query_lens[bucket.max_decodes :]
    tiles_of_row = -(-lens // tile_q)
    ends = jnp.cumsum(tiles_of_row, dtype=jnp.int32)
    tile = jnp.arange(bound, dtype=jnp.int32)
    prefill_row = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), max(bucket.max_prefills - 1, 0))
    prefill_row = prefill_row.astype(jnp.int32)
    index = tile - (ends - tiles_of_row)[prefill_row]
    row = bucket.max_decodes + prefill_row
    starts = metadata.row_starts[row] - bucket.max_decode_tokens + index * tile_q
    remaining = lens[prefill_row] - index * tile_q
    return QueryTiles(
        rows=row,
        starts=starts.astype(jnp.int32),
        lens=jnp.where(tile < ends[-1], jnp.clip(remaining, 0, tile_q), 0).astype(jnp.int32),
        tile_q=tile_q,
    )


def group_tiles(x: Shaped[Array, "tiles ..."], size: int, fill: int = 0) -> Shaped[Array, "groups size ..."]:
    """Group per-tile values by `size`, padding the last group with `fill`."""
    ends = [(0, -x.shape[0] % size)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, ends, constant_values=fill).reshape(-1, size, *x.shape[1:])
