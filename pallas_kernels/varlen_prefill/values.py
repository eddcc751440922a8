"""Values as the tensor core may have them: they have come, and hold no NaN of keys that nobody sees."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.paged_kv import clear_unseen
from pallas_kernels.shared.types import Scalar
from pallas_kernels.varlen_prefill.pipeline import Ring
from pallas_kernels.varlen_prefill.query_rows import Edges, KvTile, QueryRows
from pallas_kernels.varlen_prefill.spec import M, PrefillSpec, W

ROWS_AT_ONCE = 64


class Values:
    """Awaits values, and clears those that no query of the request sees: a probability of 0 hides no NaN.

    Warpgroups do it side by side in the same memory, so what one stores must be right at once: with both
    edges in a tile, a store of the low one that kept the high one's NaN undid another's zeros.
    """

    def __init__(self, ring: Ring, spec: PrefillSpec):
        self.ring, self.spec = ring, spec

    def await_first(self, tile: KvTile, step: Scalar) -> None:
        """Those of an item's first tile, which may hold both ends of what the request sees.

        A list begins with the tile that the request ends in, if that is listed. Without lists it ends in the
        last tile, whose end `await_last` clears.
        """
        self._await(tile, step, Edges.BOTH if self.spec.has_lists else Edges.LOW)

    def await_next(self, tile: KvTile, step: Scalar) -> None:
        """Those of a later tile: with lists, what is seen may begin in any tile that is seen in part.

        Without them it begins in the first tile: a compare for each tile behind it would be one too many.
        """
        self._await(tile, step, tile.edges & Edges.LOW if self.spec.has_lists else Edges.NONE)

    def clear_last(self, rows: QueryRows, last: Scalar, step: Scalar) -> None:
        """The end of an item's last tile, whose values have come with `step`."""
        if not self.spec.has_lists:
            self._clear(rows.tile(last, Edges.HIGH), self.ring.stage(step), Edges.HIGH)

    def _await(self, tile: KvTile, step: Scalar, edges: Edges) -> None:
        stage = self.ring.stage(step)
        plgpu.barrier_wait(self.ring.values.full.at[stage])
        if Edges.LOW in edges and self.spec.has_low_edge:
            self._clear(tile, stage, Edges.LOW)
        if Edges.HIGH in edges:
            self._clear(tile, stage, Edges.HIGH)

    def _clear(self, tile: KvTile, stage: Scalar, edge: Edges) -> None:
        """Zeros before the first key that the request sees, or behind its last, if the tile has some."""
        tile_kv, item = self.spec.sizes.tile_kv, tile.rows.item
        first_key = tile.first_key()
        begin, end = item["seen"] - first_key, item["seq_len"] - first_key
        is_low = edge is Edges.LOW
        is_edge = begin > 0 if is_low else end < tile_kv

        @pl.when(is_edge)
        def _() -> None:
            at_once = jnp.int32(ROWS_AT_ONCE)
            low_parts = lambda: (0, lax.div(begin + (ROWS_AT_ONCE - 1), at_once))
            high_parts = lambda: (lax.div(end, at_once), tile_kv // ROWS_AT_ONCE)

            @pl.loop(*(low_parts() if is_low else high_parts()))
            def _(n: Scalar) -> None:
                rows = pl.ds(n * ROWS_AT_ONCE, ROWS_AT_ONCE)
                at = plgpu.broadcasted_iota(jnp.int32, (M, ROWS_AT_ONCE), 0, layout=W) + n * ROWS_AT_ONCE
                clear_unseen(self.ring.values.tiles.at[stage], rows, lambda _: at, begin, end)

            plgpu.commit_smem()
