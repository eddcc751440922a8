"""The combine kernel: merges the split outputs of query tiles whose keys are split.

A strip is a warpgroup's rows and one panel of the output of a query tile and head. Each thread block
combines several strips.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx.stores import store_token_rows
from pallas_kernels.shared.memory import PANEL, swizzled_smem
from pallas_kernels.shared.softmax import add_splits
from pallas_kernels.shared.types import Index, Ref, Scalar, Slice
from pallas_kernels.varlen_prefill.epilogue import (
    output_scale_and_lse,
    store_lse,
    store_valid_rows,
    valid_rows,
    warpgroup_rows,
)
from pallas_kernels.varlen_prefill.schedule import SplitTiles
from pallas_kernels.varlen_prefill.softmax import broadcast_rows
from pallas_kernels.varlen_prefill.spec import CombineRefs, PrefillOutputs, PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import (
    PrefillWorkTile,
    QueryRows,
    packed_heads,
)

CTAS_PER_SM = 2  # starting more of them takes longer than they save


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
    tile, split_outputs = (1, spec.sizes.warpgroup_rows, PANEL), outputs.split_outputs
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
        strips, ranks = jnp.int32(shape.head.padded_dim // PANEL), jnp.int32(sizes.team_size)
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
            columns = {name: refs.table[row, i] for i, name in enumerate(self.spec.table_columns)}
            work_tile = PrefillWorkTile(head, columns.__getitem__, None, self.spec)
            rows = QueryRows(work_tile, lax.rem(rank_index, ranks), None, self.spec)
            self.combine(rows, lax.rem(index, strips), refs, out_s)

    def combine(self, rows: QueryRows, strip: Scalar, refs: CombineRefs, out_s: Ref) -> None:
        """Combine and store a strip of a warpgroup's rows, if at least one of the rows is valid."""
        work_tile, first, head_dims = rows.work_tile, rows.rank * rows.tokens, self.spec.shape.head
        # Chunks of a padded head are as wide as strips.
        columns = pl.ds(pl.multiple_of(strip * PANEL, PANEL), PANEL)
        (swizzled_s,), (plain_s,) = out_s

        def index_of(tokens: Slice, head: Scalar, index: int) -> Index:
            if head_dims.is_padded:
                return (tokens, head, strip, *head_dims.gmem_index(0, strip * 0)[1:])
            return tokens, head, columns

        @pl.when((first < work_tile["end"]) & (first + rows.tokens > work_tile["begin"]))
        def _() -> None:
            chunk, chunk_columns = (strip, pl.ds(0, PANEL)) if head_dims.is_padded else (strip * 0, columns)
            row_slice = warpgroup_rows(rows)
            acc, row_max, row_sum = add_splits(
                refs.split_outputs, work_tile["split_output"], work_tile["num_splits"],
                work_tile.head,
                queries=(row_slice,), strip=(chunk, row_slice, chunk_columns), axis=0,
            )  # fmt: skip
            factor, lse = output_scale_and_lse(rows, row_max, row_sum, refs.sinks)
            # The first strip stores the log-sum-exp of its rows.
            if refs.lse is not None:
                pl.when(strip == 0)(lambda: store_lse(refs.lse, rows, valid_rows(rows), lse))
            if self.spec.sizes.per_warp_mma:
                out_g = refs.out.at[:, :, strip] if head_dims.is_padded else refs.out.at[:, :, columns]
                store_token_rows(
                    out_g, acc * broadcast_rows(factor, acc), packed_heads(work_tile, self.spec)[0].head,
                    *valid_rows(rows), tokens_per_head=rows.tokens,
                    columns=head_dims.chunk_dim if head_dims.is_padded else PANEL,
                    is_interpreted=self.spec.is_interpreted,
                )  # fmt: skip
                return
            out = (acc * broadcast_rows(factor, acc)).astype(self.spec.dtype)
            store_valid_rows(
                refs.out, index_of, packed_heads(work_tile, self.spec), valid_rows(rows),
                swizzled_s, plain_s, [out], is_interpreted=self.spec.is_interpreted,
            )  # fmt: skip
            # The next strip reuses the same shared memory.
            plgpu.wait_smem_to_gmem(0)
