"""What multiplies a tile: the protocol that the whole warpgroup and its warps alone both meet.

WgmmaProducts: wgmma over 64 or 128 keys and up to 64 query rows; warps wait for each other between the two
products. MmaProducts: mma.sync, each warp 16 keys of 64, few rows; they wait for nobody until a segment ends.
KernelSizes.by_warp says which is compiled.
"""

from typing import Any, Protocol, runtime_checkable

from pallas_kernels.paged_decode.segments import Segment
from pallas_kernels.paged_decode.tile_keys import TileKeys
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile


@runtime_checkable
class Products(Protocol):
    """K Q^T and V^T P of one tile, and the reductions between them; state is in the caller's hands.

    Asked in this order: `start` and `query` once a segment; then of every tile `scores`, `widen_values`,
    `largest` and `spread` (through the softmax), `add_values`; `merged` once, after the segment's last tile.
    All threads of the warpgroup ask, with the same scalars.

    Who waits for what a stage holds, and who frees it:
        keys: the caller waits before `scores` and frees them behind it.
        values, where `widens_values`: `widen_values` waits; the caller frees them once it has read their
            scales, before `largest`.
        other values with a scale per token: the caller waits, for the scales; `add_values` frees them.
        other values: `add_values` waits for them and frees them.

    Accumulators, largest scores and sums may be of any form that `start` makes, as long as they go through
    jax.lax.fori_loop; only `merged` gives them the form that all results have.

    Attributes:
        headroom: The softmax may let probabilities grow to 2 ** headroom, since they are rounded to f16; 0:
            to 1.
        sees_a_key: Each query has seen a key after any tile, so that its largest score is finite.
        widens_values: 8-bit values pass through shared memory on their way to the tensor core.
    """

    headroom: int
    sees_a_key: bool
    widens_values: bool

    def start(self) -> tuple[tuple[Tile, ...], Columns | Tile, Tile]:
        """Accumulators, largest scores and sums of a request's first tile."""
        ...

    def query(self, q_s: Ref) -> tuple[Any, Any]:
        """The queries of a request in the form that `scores` wants, and what scores are to be multiplied by.

        Args:
            q_s: [chunks, tile_q, width] in SMEM, full; the caller frees it behind the last tile.
        """
        ...

    def scores(self, stage: Scalar, query: Any) -> Tile:
        """K Q^T of a stage: [tile_kv, tile_q] f32. Its keys have been read when it returns."""
        ...

    def widen_values(self, stage: Scalar, segment: Segment, keys: TileKeys) -> None:
        """Waits for values and widens them where `widens_values`; of keys that no query sees, to 0."""
        ...

    def largest(self, s: Tile) -> Columns | Tile:
        """The largest of each query's scores."""
        ...

    def spread(self, x: Columns | Tile) -> Tile:
        """What is known of each query, such as its largest score, over a tile."""
        ...

    def add_values(
        self,
        accs: tuple[Tile, ...],
        shrink: Columns | Tile,
        p: Tile,
        stage: Scalar,
        segment: Segment,
        keys: TileKeys,
    ) -> tuple[Tile, ...]:
        """Accs * shrink + V^T P, p rounded to 16 bits. Values of keys that no query sees count as 0."""
        ...

    def merged(
        self, accs: tuple[Tile, ...], top: Columns | Tile, total: Tile
    ) -> tuple[tuple[Tile, ...], Columns, Columns]:
        """O^T a chunk, [width, tile_q] in the layout WGMMA; each query's largest score and its sum."""
        ...
