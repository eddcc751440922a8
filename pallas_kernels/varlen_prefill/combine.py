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
    factor_and_lse,
    live_rows,
    rows_of_tile,
    store_live,
    store_lse,
)
from pallas_kernels.varlen_prefill.refs import MergeRefs, Outputs, Partials
from pallas_kernels.varlen_prefill.softmax import above_infinity, rows_of, wide
from pallas_kernels.varlen_prefill.spec import ROW, M, PrefillSpec, W, f32
from pallas_kernels.varlen_prefill.splits import Merges
from pallas_kernels.varlen_prefill.tile_scheduler import Item, columns_of

BLOCKS_PER_SM = 2  # more of them take longer to start than they save
STRIP = 64  # columns of a head that a thread block merges
AT_ONCE = 4  # splits whose loads are in flight together: 32 registers each


def merge_splits(
    outputs: Outputs, table: jax.Array, merges: Merges, sinks: jax.Array | None, spec: PrefillSpec
) -> Outputs:
    """The outputs of the prefill kernel, those of cut tiles written in place.

    Args:
        outputs: The prefill kernel's.
        table: Of the schedule that they were made by.
        merges: Likewise.
        sinks: As Inputs.sinks.
        spec: Static.
    """
    tile, partials = (1, M, STRIP), outputs.partials
    assert partials is not None
    kernel = plgpu.kernel(
        Merger(spec).body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),  # a kernel must have an output; nothing writes it
        scratch_types=(plgpu.RefUnion((swizzled_smem(tile, spec.dtype),), (plgpu.SMEM(tile, spec.dtype),)),),
        grid=(BLOCKS_PER_SM * spec.sizes.ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="varlen_prefill_merge",
        interpret=spec.interpret,
    )
    out_ref = jax.new_ref(outputs.out)
    lse_ref = None if outputs.lse is None else jax.new_ref(outputs.lse)
    kernel(MergeRefs(partials, table, merges.num_live, merges.rows, sinks, out_ref, lse_ref))
    lse = None if lse_ref is None else jax.freeze(lse_ref)
    return Outputs(out=jax.freeze(out_ref), lse=lse, partials=None)


@dataclasses.dataclass(frozen=True)
class Merger:
    """What a thread block does: 64 rows of a cut tile in a strip of a head, then the next of its share.

    Attributes:
        spec: Static.
    """

    spec: PrefillSpec

    def body(self, refs: MergeRefs, unused_g: Ref, out_s: Ref) -> None:
        """The kernel."""
        shape, sizes = self.spec.shape, self.spec.sizes
        strips, ranks = jnp.int32(shape.cut.padded_dim // STRIP), jnp.int32(sizes.team_size)
        heads = jnp.int32(self.spec.items_per_tile)
        cta, ctas = lax.axis_index("cta"), jnp.int32(BLOCKS_PER_SM * sizes.ctas)
        units = refs.num_live[0] * heads * ranks * strips

        @pl.loop(0, lax.div(units - cta + (ctas - 1), ctas))
        def _(nth: Scalar) -> None:
            unit = cta + nth * ctas
            of_rows = lax.div(unit, strips)
            of_head = lax.div(of_rows, ranks)
            row, head = refs.rows[lax.div(of_head, heads)], lax.rem(of_head, heads)
            columns = {name: refs.table[row, i] for i, name in enumerate(columns_of(self.spec))}
            item = Item(head, columns.__getitem__, None, self.spec)
            rows = QueryRows(item, lax.rem(of_rows, ranks), None, self.spec)
            self.merge(rows, lax.rem(unit, strips), refs, out_s)

    def merge(self, rows: QueryRows, strip: Scalar, refs: MergeRefs, out_s: Ref) -> None:
        """A strip of rows of a tile, if some of them are live."""
        item, first, cut = rows.item, rows.rank * rows.tokens, self.spec.shape.cut
        # Chunks of a padded head are as wide as strips.
        columns = pl.ds(pl.multiple_of(strip * STRIP, STRIP), STRIP)
        (swizzled_s,), (plain_s,) = out_s

        def to(live: Slice, head: Scalar, nth: int) -> Ref:
            if cut.is_padded:
                return refs.out.at[(live, head, strip, *cut.at(0, strip * 0)[1:])]
            return refs.out.at[live, head, columns]

        @pl.when((first < item["end"]) & (first + rows.tokens > item["begin"]))
        def _() -> None:
            chunk, columns_of_chunk = (strip, pl.ds(0, STRIP)) if cut.is_padded else (strip * 0, columns)
            acc, top, total = self.summed(rows, chunk, columns_of_chunk, refs.partials)
            factor, lse = factor_and_lse(rows, top, total, refs.sinks)
            if refs.lse is not None:
                pl.when(strip == 0)(lambda: store_lse(refs.lse, rows, live_rows(rows), lse))
            store_live(to, rows, swizzled_s, plain_s, [(acc * wide(factor, acc)).astype(self.spec.dtype)])
            plgpu.wait_smem_to_gmem(0)

    def summed(
        self, rows: QueryRows, chunk: Scalar, columns: Slice, partials: Partials
    ) -> tuple[Tile, Rows, Rows]:
        """P V of all splits, in some columns of a chunk; what scores were less; sums of probabilities."""
        item, here = rows.item, rows_of_tile(rows)
        num = item["num_splits"]
        load = functools.partial(plgpu.load, optimized=False)

        def add(i: Scalar, carry: tuple[Tile, Rows, Rows]) -> tuple[Tile, Rows, Rows]:
            acc, top, total = carry
            nth = [i * AT_ONCE + j for j in range(AT_ONCE)]
            at = [(item["partial"] + jnp.minimum(n, num - 1), item.head) for n in nth]
            # All loads of a round before any use.
            tops = [load(partials.top.at[(*split, here)], layout=ROW) for split in at]
            totals = [load(partials.total.at[(*split, here)], layout=ROW) for split in at]
            outs = [load(partials.out.at[(*split, chunk, here, columns)], layout=W) for split in at]
            tops = [x + jnp.where(n < num, 0.0, -jnp.inf) for n, x in zip(nth, tops, strict=True)]
            new_top = functools.reduce(jnp.maximum, tops, top)
            base = above_infinity(new_top)
            shrink = jnp.exp2(top - base)
            acc, total = acc * wide(shrink, acc), total * shrink
            for split_top, split_total, out in zip(tops, totals, outs, strict=True):
                weight = jnp.exp2(split_top - base)
                acc, total = acc + out * wide(weight, out), total + split_total * weight
            return acc, new_top, total

        zeros = plgpu.layout_cast(jnp.zeros((M, STRIP), f32), W)
        rounds = lax.div(num + (AT_ONCE - 1), jnp.int32(AT_ONCE))
        return lax.fori_loop(0, rounds, add, (zeros, rows_of(-jnp.inf), rows_of(0.0)))
