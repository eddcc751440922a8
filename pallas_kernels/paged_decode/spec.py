"""What is static about a call of the decode kernel: what must recompile when it changes."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.paged_decode.sizes import DecodeSizes
from pallas_kernels.shared.head_dims import HeadChunks
from pallas_kernels.shared.paged_kv import CacheTiling
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.types import Interpret, Scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a call besides the kernel's.

    Attributes:
        kv_heads: Key/value heads.
        row_tiles: Tiles that one kv head's query rows are cut into.
        rows: Live query rows of a tile: decode token major, then query head; the last tile may hold fewer.
        group: Query heads of a kv head.
        query_len: Queries of a request.
        block_size: Tokens of a cache block.
        is_hnd: Blocks are [kv_heads, block_size, head_dim].
        cut: The cut of head_dim.
        tile_q: `rows` rounded up for the tensor core.
        list_block_size: Keys of a sparse block, where each request and kv head has its own list of them; None
            = every key is visited. With lists, "a request" of the schedule, the queries and the results is a
            kv head of a request, so that lists of any lengths keep all thread blocks busy.
        lists_have_head_bits: Each entry of a list says which query heads of the group see the block.
    """

    kv_heads: int
    row_tiles: int
    rows: int
    group: int
    query_len: int
    block_size: int
    is_hnd: bool
    cut: HeadChunks
    tile_q: int
    list_block_size: int | None
    lists_have_head_bits: bool = False

    @property
    def head_tiles(self) -> int:
        """Tiles of query rows of a request of the schedule."""
        return self.row_tiles if self.list_block_size else self.kv_heads * self.row_tiles

    def request_of(self, row: Scalar, head_tile: Scalar) -> tuple[Scalar, Scalar]:
        """The request, and the tile of query rows in it, of a row of the schedule."""
        if not self.list_block_size:
            return row, head_tile
        request = lax.div(row, jnp.int32(self.kv_heads))
        return request, (row - request * self.kv_heads) * self.row_tiles + head_tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """All that is static about a call.

    Attributes:
        shape: Its sizes.
        score: The layer.
        sizes: The kernel's sizes.
        num_spans: Spans of the schedule: thread blocks for each tile of query rows.
        dtype: The queries' 16 bits, in which the tensor core multiplies.
        interpret: Interpret-mode parameters, or None for a GPU.
    """

    shape: Shape
    score: Score
    sizes: DecodeSizes
    num_spans: int
    dtype: DTypeLike
    interpret: Interpret = None

    @property
    def is_interpreted(self) -> bool:
        """Without lanes."""
        return bool(self.interpret)

    @property
    def tile(self) -> tuple[int, int]:
        """Of the scores: keys by query rows."""
        return self.sizes.tile_kv, self.shape.tile_q

    @property
    def piece(self) -> int:
        """Keys of a tile that are neighbours in the request."""
        return min(self.shape.list_block_size or self.sizes.tile_kv, self.sizes.tile_kv)

    @property
    def cache_tiling(self) -> CacheTiling:
        """How a tile's neighbours are copied from the cache: a block at once, or what of it is needed."""
        shape = self.shape
        return CacheTiling(
            block_size=shape.block_size, tile_kv=self.piece, is_hnd=shape.is_hnd, head=shape.cut
        )
