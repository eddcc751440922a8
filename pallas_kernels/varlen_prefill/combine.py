"""Adds up the partial results of tiles of queries whose keys are cut into splits."""

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

CTAS_PER_SM = 2  # more of them take longer to start than they save
STRIP = 64  # columns of a head that a thread block combines
SPLITS_AT_ONCE = 4  # splits whose loads are in flight together: 32 registers each


def combine_splits(
    outputs: PrefillOutputs,
    table: jax.Array,
    split_tiles: SplitTiles,
    sinks: jax.Array | None,
    spec: PrefillSpec,
) -> PrefillOutputs:
    """The outputs of the prefill kernel, those of cut tiles written in place.

    Args:
        outputs: The prefill kernel's.
        table: Of the schedule that they were made by.
        split_tiles: Likewise.
        sinks: As Inputs.sinks.
        spec: Static.
    """
    tile, partials = (1, M, STRIP), outputs.partials
    assert partials is not None
    kernel = plgpu.kernel(
        Combiner(spec).body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output; nothing writes it
        scratch_types=(plgpu.RefUnion((swizzled_smem(tile, spec.dtype),), (plgpu.SMEM(tile, spec.dtype),)),),
        grid=(CTAS_PER_SM * spec.sizes.ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="varlen_prefill_merge",
        interpret=spec.interpret,
    )
    out_ref = jax.new_ref(outputs.out)
    lse_ref = None if outputs.lse is None else jax.new_ref(outputs.lse)
    kernel(CombineRefs(partials, table, split_tiles.num_valid, split_tiles.rows, sinks, out_ref, lse_ref))
    lse = None if lse_ref is None else jax.freeze(lse_ref)
    return PrefillOutputs(out=jax.freeze(out_ref), lse=lse, partials=None)


@dataclasses.dataclass(frozen=True)
class Combiner:
    """What a thread block does: 64 rows of a cut tile in a strip of a head, then the next of its share.

    Attributes:
        spec: Static.
    """

    spec: PrefillSpec

    def body(self, refs: CombineRefs, unused_g: Ref, out_s: Ref) -> None:
        """The kernel."""
        shape, sizes = self.spec.shape, self.spec.sizes
        strips, ranks = jnp.int32(shape.cut.padded_dim // STRIP), jnp.int32(sizes.team_size)
        heads = jnp.int32(self.spec.items_per_tile)
        cta, ctas = lax.axis_index("cta"), jnp.int32(CTAS_PER_SM * sizes.ctas)
        units = refs.num_valid[0] * heads * ranks * strips

        @pl.loop(0, lax.div(units - cta + (ctas - 1), ctas))
        def _(nth: Scalar) -> None:
            unit = cta + nth * ctas
            of_rows = lax.div(unit, strips)
            of_head = lax.div(of_rows, ranks)
            row, head = refs.rows[lax.div(of_head, heads)], lax.rem(of_head, heads)
            columns = {name: refs.table[row, i] for i, name in enumerate(table_columns(self.spec))}
            item = PrefillWorkTile(head, columns.__getitem__, None, self.spec)
            rows = QueryRows(item, lax.rem(of_rows, ranks), None, self.spec)
            self.merge(rows, lax.rem(unit, strips), refs, out_s)

    def merge(self, rows: QueryRows, strip: Scalar, refs: CombineRefs, out_s: Ref) -> None:
        """A strip of rows of a tile, if some of them are live."""
        item, first, cut = rows.item, rows.rank * rows.tokens, self.spec.shape.cut
        # Chunks of a padded head are as wide as strips.
        columns = pl.ds(pl.multiple_of(strip * STRIP, STRIP), STRIP)
        (swizzled_s,), (plain_s,) = out_s

        def to(live: Slice, head: Scalar, nth: int) -> Ref:
            if cut.is_padded:
                return refs.out.at[(live, head, strip, *cut.gmem_index(0, strip * 0)[1:])]
            return refs.out.at[live, head, columns]

        @pl.when((first < item["end"]) & (first + rows.tokens > item["begin"]))
        def _() -> None:
            chunk, columns_of_chunk = (strip, pl.ds(0, STRIP)) if cut.is_padded else (strip * 0, columns)
            acc, top, total = self.summed(rows, chunk, columns_of_chunk, refs.partials)
            factor, lse = output_scale_and_lse(rows, top, total, refs.sinks)
            if refs.lse is not None:
                pl.when(strip == 0)(lambda: store_lse(refs.lse, rows, valid_rows(rows), lse))
            store_valid_rows(
                to, rows, swizzled_s, plain_s, [(acc * broadcast_rows(factor, acc)).astype(self.spec.dtype)]
            )
            plgpu.wait_smem_to_gmem(0)

    def summed(
        self, rows: QueryRows, chunk: Scalar, columns: Slice, partials: SplitOutputs
    ) -> tuple[Tile, Rows, Rows]:
        """P V of all splits, in some columns of a chunk; what scores were less; sums of probabilities."""
        item, here = rows.item, warpgroup_rows(rows)
        num = item["num_splits"]
        load = functools.partial(plgpu.load, optimized=False)

        def add(i: Scalar, carry: tuple[Tile, Rows, Rows]) -> tuple[Tile, Rows, Rows]:
            acc, top, total = carry
            nth = [i * SPLITS_AT_ONCE + j for j in range(SPLITS_AT_ONCE)]
            at = [(item["partial"] + jnp.minimum(n, num - 1), item.head) for n in nth]
            # All loads of a round before any use.
            tops = [load(partials.top.at[(*split, here)], layout=ROW) for split in at]
            totals = [load(partials.total.at[(*split, here)], layout=ROW) for split in at]
            outs = [load(partials.out.at[(*split, chunk, here, columns)], layout=W) for split in at]
            tops = [x + jnp.where(n < num, 0.0, -jnp.inf) for n, x in zip(nth, tops, strict=True)]
            new_top = functools.reduce(jnp.maximum, tops, top)
            base = finite_row_max(new_top)
            shrink = jnp.exp2(top - base)
            acc, total = acc * broadcast_rows(shrink, acc), total * shrink
            for split_top, split_total, out in zip(tops, totals, outs, strict=True):
                weight = jnp.exp2(split_top - base)
                acc, total = acc + out * broadcast_rows(weight, out), total + split_total * weight
            return acc, new_top, total

        zeros = plgpu.layout_cast(jnp.zeros((M, STRIP), f32), W)
        rounds = lax.div(num + (SPLITS_AT_ONCE - 1), jnp.int32(SPLITS_AT_ONCE))
        return lax.fori_loop(0, rounds, add, (zeros, full_rows(-jnp.inf), full_rows(0.0)))
