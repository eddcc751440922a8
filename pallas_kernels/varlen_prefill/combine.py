"""The combine kernel: merges the split outputs of query tiles whose keys are split.

A strip is 64 rows and 64 columns of the output of a query tile and head. Each thread block combines several
strips.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.types import Ref, Rows, Scalar, Slice, Tile
from pallas_kernels.varlen_prefill.block_info import QueryRows
from pallas_kernels.varlen_prefill.epilogue import (
    output_scale_and_lse,
    store_lse,
    store_valid_rows,
    valid_rows,
    warpgroup_rows,
)
from pallas_kernels.varlen_prefill.refs import CombineRefs, PrefillOutputs, SplitOutputs
from pallas_kernels.varlen_prefill.softmax import broadcast_rows, finite_row_max, full_rows
from pallas_kernels.varlen_prefill.spec import ROW, M, PrefillSpec, W, f32
from pallas_kernels.varlen_prefill.splits import SplitTiles
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillWorkTile, table_columns

CTAS_PER_SM = 2  # starting more of them takes longer than they save
STRIP = 64  # columns of a head that a thread block combines
SPLITS_AT_ONCE = 4  # splits whose loads are in flight together: 32 registers each


def combine_splits(
    outputs: PrefillOutputs,
    table: jax.Array,
    split_tiles: SplitTiles,
    sinks: jax.Array | None,
    spec: PrefillSpec,
) -> PrefillOutputs:
    """Combine the split outputs, and return the outputs of all query tiles. Outputs are updated in place.

    Args:
        outputs: Outputs of the prefill kernel.
        table: Table of the schedule of the prefill kernel.
        split_tiles: Query tiles of that schedule whose keys are split.
        sinks: Attention sinks, see PrefillInputs.
        spec: Static description of the prefill kernel.
    """
    tile, split_outputs = (1, M, STRIP), outputs.split_outputs
    assert split_outputs is not None
    kernel = plgpu.kernel(
        Combiner(spec).body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output; nothing writes it
        scratch_types=(plgpu.RefUnion((swizzled_smem(tile, spec.dtype),), (plgpu.SMEM(tile, spec.dtype),)),),
        grid=(CTAS_PER_SM * spec.sizes.ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="varlen_prefill_combine",
        interpret=spec.interpret,
    )
    out_ref = jax.new_ref(outputs.out)
    lse_ref = None if outputs.lse is None else jax.new_ref(outputs.lse)
    kernel(
        CombineRefs(split_outputs, table, split_tiles.num_valid, split_tiles.rows, sinks, out_ref, lse_ref)
    )
    lse = None if lse_ref is None else jax.freeze(lse_ref)
    return PrefillOutputs(out=jax.freeze(out_ref), lse=lse, split_outputs=None)


@dataclasses.dataclass(frozen=True)
class Combiner:
    """Body of the combine kernel.

    Attributes:
        spec: Static description of the prefill kernel.
    """

    spec: PrefillSpec

    def body(self, refs: CombineRefs, unused_g: Ref, out_s: Ref) -> None:
        """Combine the strips of this thread block."""
        shape, sizes = self.spec.shape, self.spec.sizes
        strips, ranks = jnp.int32(shape.head.padded_dim // STRIP), jnp.int32(sizes.team_size)
        heads = jnp.int32(self.spec.work_tiles_per_query_tile)
        cta, ctas = lax.axis_index("cta"), jnp.int32(CTAS_PER_SM * sizes.ctas)
        num_strips = refs.num_valid[0] * heads * ranks * strips

        @pl.loop(0, lax.div(num_strips - cta + (ctas - 1), ctas))
        def _(iteration: Scalar) -> None:
            # The index is that of (split tile, head, rank, strip), where the strip varies fastest.
            index = cta + iteration * ctas
            rank_index = lax.div(index, strips)
            head_index = lax.div(rank_index, ranks)
            row, head = refs.rows[lax.div(head_index, heads)], lax.rem(head_index, heads)
            columns = {name: refs.table[row, i] for i, name in enumerate(table_columns(self.spec))}
            work_tile = PrefillWorkTile(head, columns.__getitem__, None, self.spec)
            rows = QueryRows(work_tile, lax.rem(rank_index, ranks), None, self.spec)
            self.combine(rows, lax.rem(index, strips), refs, out_s)

    def combine(self, rows: QueryRows, strip: Scalar, refs: CombineRefs, out_s: Ref) -> None:
        """Combine and store a strip of a warpgroup's rows, if at least one of the rows is valid."""
        work_tile, first, head_dims = rows.work_tile, rows.rank * rows.tokens, self.spec.shape.head
        # Chunks of a padded head are as wide as strips.
        columns = pl.ds(pl.multiple_of(strip * STRIP, STRIP), STRIP)
        (swizzled_s,), (plain_s,) = out_s

        def to(tokens: Slice, head: Scalar, index: int) -> Ref:
            if head_dims.is_padded:
                return refs.out.at[(tokens, head, strip, *head_dims.gmem_index(0, strip * 0)[1:])]
            return refs.out.at[tokens, head, columns]

        @pl.when((first < work_tile["end"]) & (first + rows.tokens > work_tile["begin"]))
        def _() -> None:
            chunk, chunk_columns = (strip, pl.ds(0, STRIP)) if head_dims.is_padded else (strip * 0, columns)
            acc, row_max, row_sum = self.reduce(rows, chunk, chunk_columns, refs.split_outputs)
            factor, lse = output_scale_and_lse(rows, row_max, row_sum, refs.sinks)
            # The first strip stores the log-sum-exp of its rows.
            if refs.lse is not None:
                pl.when(strip == 0)(lambda: store_lse(refs.lse, rows, valid_rows(rows), lse))
            out = (acc * broadcast_rows(factor, acc)).astype(self.spec.dtype)
            store_valid_rows(to, rows, swizzled_s, plain_s, [out])
            # The next strip reuses the same shared memory.
            plgpu.wait_smem_to_gmem(0)

    def reduce(
        self, rows: QueryRows, chunk: Scalar, columns: Slice, split_outputs: SplitOutputs
    ) -> tuple[Tile, Rows, Rows]:
        """Return P V, row_max and row_sum over all splits of a query tile, for `columns` of a chunk."""
        work_tile, slots = rows.work_tile, warpgroup_rows(rows)
        num = work_tile["num_splits"]
        load = functools.partial(plgpu.load, optimized=False)

        def add(i: Scalar, carry: tuple[Tile, Rows, Rows]) -> tuple[Tile, Rows, Rows]:
            acc, row_max, row_sum = carry
            indices = [i * SPLITS_AT_ONCE + j for j in range(SPLITS_AT_ONCE)]
            splits = [(work_tile["split_output"] + jnp.minimum(n, num - 1), work_tile.head) for n in indices]
            # Issue all loads of a round before their first use, so that their latencies overlap.
            maxima = [load(split_outputs.row_max.at[(*split, slots)], layout=ROW) for split in splits]
            sums = [load(split_outputs.row_sum.at[(*split, slots)], layout=ROW) for split in splits]
            outs = [load(split_outputs.out.at[(*split, chunk, slots, columns)], layout=W) for split in splits]
            # Splits past the last one get weight 0.
            maxima = [x + jnp.where(n < num, 0.0, -jnp.inf) for n, x in zip(indices, maxima, strict=True)]
            new_max = functools.reduce(jnp.maximum, maxima, row_max)
            base = finite_row_max(new_max)
            alpha = jnp.exp2(row_max - base)
            acc, row_sum = acc * broadcast_rows(alpha, acc), row_sum * alpha
            for split_max, split_sum, out in zip(maxima, sums, outs, strict=True):
                weight = jnp.exp2(split_max - base)
                acc, row_sum = acc + out * broadcast_rows(weight, out), row_sum + split_sum * weight
            return acc, new_max, row_sum

        zeros = plgpu.layout_cast(jnp.zeros((M, STRIP), f32), W)
        rounds = lax.div(num + (SPLITS_AT_ONCE - 1), jnp.int32(SPLITS_AT_ONCE))
        return lax.fori_loop(0, rounds, add, (zeros, full_rows(-jnp.inf), full_rows(0.0)))
