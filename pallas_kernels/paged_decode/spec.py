"""Static description of one call of the decode kernel: what recompiles the kernel when it changes."""

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
class DecodeShape:
    """Sizes of the arrays of a call.

    Attributes:
        kv_heads: Number of KV heads.
        row_tiles: Number of tiles of query rows per KV head.
        rows: Number of valid query rows of a tile, ordered by decode token, then by query head. The last tile
            may hold fewer.
        group: Number of query heads per KV head.
        query_len: Number of query tokens per request.
        block_size: Number of tokens per cache block.
        is_hnd: Whether blocks are [kv_heads, block_size, head_dim].
        head: Division of a head into chunks.
        tile_q: `rows` rounded up for the tensor core.
        list_block_size: Number of keys per sparse block if each KV head of each request has a list of blocks;
            None if every key is visited. With lists, a row of the schedule, of the queries and of the results
            is one KV head of a request, so that lists of any lengths keep all thread blocks busy. Without
            lists, it is a request.
        lists_have_head_bits: Whether each entry of a list says which query heads of the group visit the
            block.
    """

    kv_heads: int
    row_tiles: int
    rows: int
    group: int
    query_len: int
    block_size: int
    is_hnd: bool
    head: HeadChunks
    tile_q: int
    list_block_size: int | None
    lists_have_head_bits: bool = False

    @property
    def head_tiles(self) -> int:
        """Number of tiles of query rows per row of the schedule."""
        return self.row_tiles if self.list_block_size else self.kv_heads * self.row_tiles

    def row_request(self, row: Scalar, head_tile: Scalar) -> tuple[Scalar, Scalar]:
        """Return the request of a schedule row, and the index of a tile among the request's query tiles.

        Args:
            row: Schedule row.
            head_tile: Index of the tile of query rows within this schedule row.
        """
        if not self.list_block_size:
            return row, head_tile
        request = lax.div(row, jnp.int32(self.kv_heads))
        return request, (row - request * self.kv_heads) * self.row_tiles + head_tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """Everything that is static about a call.

    Attributes:
        shape: Sizes of the arrays.
        score: Score function of the layer.
        sizes: Sizes of the kernel.
        num_spans: Number of spans of the schedule. For each span, there is one thread block per tile of query
            rows.
        dtype: 16-bit dtype of the queries, in which the tensor core multiplies.
        interpret: Parameters of interpret mode, or None for a GPU.
    """

    shape: DecodeShape
    score: Score
    sizes: DecodeSizes
    num_spans: int
    dtype: DTypeLike
    interpret: Interpret = None

    @property
    def is_interpreted(self) -> bool:
        """Whether the kernel runs in interpret mode, which has no PTX."""
        return bool(self.interpret)

    @property
    def tile(self) -> tuple[int, int]:
        """Shape of a tile of scores: keys by query rows."""
        return self.sizes.tile_kv, self.shape.tile_q

    @property
    def run_length(self) -> int:
        """Number of consecutive keys in a tile: the size of a sparse block, at most the size of the tile."""
        return min(self.shape.list_block_size or self.sizes.tile_kv, self.sizes.tile_kv)

    @property
    def cache_tiling(self) -> CacheTiling:
        """TMA copies that load a run of consecutive keys from the cache."""
        shape = self.shape
        return CacheTiling(
            block_size=shape.block_size, tile_kv=self.run_length, is_hnd=shape.is_hnd, head=shape.head
        )
