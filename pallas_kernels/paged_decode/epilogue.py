"""The epilogue of decode: a segment's result goes to global memory, as an output or as a split output."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.refs import DecodeOutputs
from pallas_kernels.paged_decode.span import Segment
from pallas_kernels.paged_decode.spec import DecodeSpec
from pallas_kernels.ptx.stores import store_transposed
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.softmax import finalize_softmax
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile

W = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class DecodeEpilogue:
    """The stores of one tile of query rows, from registers.

    Attributes:
        outputs: Arrays to write.
        sinks: `DecodeInputs.sinks`.
        head_tile: Index of the tile of query rows within each schedule row.
        spec: Static description of the call.
    """

    outputs: DecodeOutputs
    sinks: Ref
    head_tile: Scalar
    spec: DecodeSpec

    def store(self, segment: Segment, accs: tuple[Tile, ...], row_max: Columns, row_sum: Columns) -> None:
        """Store the result of a segment.

        Args:
            segment: Segment of the result.
            accs: O^T of each chunk, [width, tile_q], not normalized.
            row_max: Maximum score of each query, times log2(e).
            row_sum: Sum of the exponentials of each query.
        """
        pl.when(segment.is_complete)(lambda: self.store_output(segment, accs, row_max, row_sum))
        pl.when(jnp.logical_not(segment.is_complete))(
            lambda: self.store_split(segment, accs, row_max, row_sum)
        )

    def store_split(
        self, segment: Segment, accs: tuple[Tile, ...], row_max: Columns, row_sum: Columns
    ) -> None:
        """Store a split output.

        The combine kernel merges it with the request's other split outputs and the sinks.
        """
        splits = self.outputs.splits
        for chunk, acc in enumerate(accs):
            splits.out[segment.split_index, self.head_tile, chunk] = acc
        store_unoptimized(splits.row_max.at[segment.split_index, self.head_tile], row_max)
        store_unoptimized(splits.row_sum.at[segment.split_index, self.head_tile], row_sum)

    def store_output(
        self, segment: Segment, accs: tuple[Tile, ...], row_max: Columns, row_sum: Columns
    ) -> None:
        """Store the output and the log-sum-exp of a request that lies in one span."""
        sink = None
        if self.sinks is not None:
            sink = plgpu.load(self.sinks.at[segment.request_head_tile], layout=W.reduce(0), optimized=False)
            # A padding row has no keys and no sink: its output is 0.
            sink = jnp.minimum(sink, jnp.where(segment.seq_len > 0, jnp.inf, -jnp.inf))
        factor, lse = finalize_softmax(row_max, row_sum, sink)
        store_unoptimized(self.outputs.lse.at[segment.row, self.head_tile], lse)
        for chunk, acc in enumerate(accs):
            chunk_index = (chunk,) if self.spec.shape.head.is_padded else ()
            out = self.outputs.out.at[(segment.row, self.head_tile, slice(None), *chunk_index)]
            acc = acc * lax.broadcast_in_dim(factor, acc.shape, [1])
            store_transposed(out, acc, is_interpreted=self.spec.is_interpreted)
