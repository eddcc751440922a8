"""What a segment's attention leaves in global memory: a request's output, or a partial result of it."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.refs import Outputs
from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.ptx.stores import store_transposed
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.softmax import finalize_softmax
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile

W = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Store:
    """Stores for one tile of query rows, by registers.

    Attributes:
        outputs: Where to.
        sinks: Inputs.sinks.
        head_tile: Tile of query rows.
        spec: Static.
    """

    outputs: Outputs
    sinks: Ref
    head_tile: Scalar
    spec: DecodeSpec

    def segment(self, segment: Segment, accs: tuple[Tile, ...], top: Columns, total: Columns) -> None:
        """A segment's results: O^T a chunk, each query's largest score and its sum of exponentials."""
        pl.when(segment.is_whole)(lambda: self.whole(segment, accs, top, total))
        pl.when(jnp.logical_not(segment.is_whole))(lambda: self.partial(segment, accs, top, total))

    def partial(self, segment: Segment, accs: tuple[Tile, ...], top: Columns, total: Columns) -> None:
        """For merge.py to add up, and with them the sink."""
        partials = self.outputs.partials
        for chunk, acc in enumerate(accs):
            partials.out[segment.partial, self.head_tile, chunk] = acc
        store_unoptimized(partials.top.at[segment.partial, self.head_tile], top)
        store_unoptimized(partials.total.at[segment.partial, self.head_tile], total)

    def whole(self, segment: Segment, accs: tuple[Tile, ...], top: Columns, total: Columns) -> None:
        """A request's output and log-sum-exp."""
        sink = None
        if self.sinks is not None:
            sink = plgpu.load(self.sinks.at[segment.heads], layout=W.reduce(0), optimized=False)
            sink = jnp.minimum(sink, jnp.where(segment.seq_len > 0, jnp.inf, -jnp.inf))
        factor, lse = finalize_softmax(top, total, sink)
        store_unoptimized(self.outputs.lse.at[segment.row, self.head_tile], lse)
        for chunk, acc in enumerate(accs):
            which = (chunk,) if self.spec.shape.cut.is_padded else ()
            to = self.outputs.out.at[(segment.row, self.head_tile, slice(None), *which)]
            acc = acc * lax.broadcast_in_dim(factor, acc.shape, [1])
            store_transposed(to, acc, is_interpreted=self.spec.is_interpreted)
