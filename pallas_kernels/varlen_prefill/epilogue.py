"""A warpgroup's output into global memory."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx.stores import store_tokens
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.softmax import finalize_softmax
from pallas_kernels.shared.types import Ref, Rows, Scalar, Slice, Tile
from pallas_kernels.varlen_prefill.block_info import QueryRows
from pallas_kernels.varlen_prefill.refs import PrefillOutputs, SplitOutputs
from pallas_kernels.varlen_prefill.softmax import broadcast_rows
from pallas_kernels.varlen_prefill.spec import M
from pallas_kernels.varlen_prefill.tile_scheduler import align_row, packed_heads


class RowResults(NamedTuple):
    """Rows behind all of their keys, or behind those of a split.

    Attributes:
        accs: P V, not normalized: a chunk of a head each.
        top: What scores were less, of each row.
        total: Sum of its probabilities.
    """

    accs: tuple[Tile, ...]
    top: Rows
    total: Rows


def store_output(
    outputs: PrefillOutputs, sinks: Ref, rows: QueryRows, attended: RowResults, swizzled_s: Ref, plain_s: Ref
) -> None:
    """Writes rows behind all of their keys, normalized, and their log-sum-exp.

    Args:
        outputs: Where to.
        sinks: As Inputs.sinks.
        rows: Which.
        attended: What they are.
        swizzled_s: See store_rows.
        plain_s: See store_rows.
    """
    factor, lse = output_scale_and_lse(rows, attended.top, attended.total, sinks)
    # Read before the fence in store_rows: TMA may put another item's row in its place.
    live = None if outputs.lse is None else valid_rows(rows)
    outs = tuple((acc * broadcast_rows(factor, acc)).astype(rows.spec.dtype) for acc in attended.accs)
    store_rows(outputs.out, rows, swizzled_s, plain_s, outs)
    if live is not None:
        # Behind the outputs: before them it cost lists of tiles 4 us more of 414 (forward-lse).
        store_lse(outputs.lse, rows, live, lse)


def output_scale_and_lse(rows: QueryRows, top: Rows, total: Rows, sinks: Ref) -> tuple[Rows, Rows]:
    """What P V is multiplied by, and the log-sum-exp, once a sink has joined; see Attended."""
    item, sink = rows.item, None
    if sinks is not None:
        sink = rows.of_heads(lambda head: jnp.where(item["seq_len"] > 0, sinks[head], -jnp.inf))
    return finalize_softmax(top, total, sink)


class ValidRows(NamedTuple):
    """Which of a warpgroup's rows of a head are the item's: `begin` to `end`; `token` is that of row 0."""

    token: Scalar
    begin: Scalar
    end: Scalar


def valid_rows(rows: QueryRows) -> ValidRows:
    """They are alike in each head that shares the tile."""
    item, each, before = rows.item, rows.tokens, rows.rank * rows.tokens
    begin, end = (jnp.clip(row - before, 0, each) for row in (item["begin"], item["end"]))
    return ValidRows(item["first_row"] + before, begin, end)


def store_lse(lse_g: Ref, rows: QueryRows, live: ValidRows, lse: Rows) -> None:
    """Writes a warpgroup's live rows of Outputs.lse.

    From registers: Pallas stores whole tiles alone, which XLA turned into rows of tokens in 5 us.
    """
    first, *_ = packed_heads(rows.item, rows.spec)
    is_interpreted = rows.spec.is_interpreted
    store_tokens(lse_g, lse, first.head, *live, tokens_per_head=rows.tokens, is_interpreted=is_interpreted)


def store_split_output(
    partials: SplitOutputs, partial: Scalar, rows: QueryRows, attended: RowResults
) -> None:
    """Writes rows behind the keys of a split, live or not, as one of the partial results."""
    at, here = (partial, rows.item.head), warpgroup_rows(rows)
    for chunk, acc in enumerate(attended.accs):
        store_unoptimized(partials.out.at[(*at, chunk, here)], acc)
    partials.top[(*at, here)] = attended.top
    partials.total[(*at, here)] = attended.total
    plgpu.commit_smem()  # the item's row has been read: TMA may put another in its place


def warpgroup_rows(rows: QueryRows) -> Slice:
    """A warpgroup's among those of its tile."""
    return pl.ds(pl.multiple_of(rows.rank * M, M), M)


def store_rows(out_g: Ref, rows: QueryRows, swizzled_s: Ref, plain_s: Ref, outs: Sequence[Tile]) -> None:
    """Writes a warpgroup's live rows: in one piece if all are, else in powers of two.

    Args:
        out_g: As Outputs.out.
        rows: Which.
        swizzled_s: [chunks, 64, width] in SMEM.
        plain_s: The same memory.
        outs: A chunk of a head each, in 16 bits.
    """
    cut = rows.spec.shape.cut

    def to(live: Slice, head: Scalar, chunk: int) -> Ref:
        return out_g.at[(live, head, *cut.gmem_index(chunk, head * 0))]

    store_valid_rows(to, rows, swizzled_s, plain_s, outs)


def store_valid_rows(
    to: Callable[[Slice, Scalar, int], Ref],
    rows: QueryRows,
    swizzled_s: Ref,
    plain_s: Ref,
    outs: Sequence[Tile],
) -> None:
    """As store_rows; `to(tokens, head, nth)` is where the nth of outs goes."""
    each, heads = rows.tokens, packed_heads(rows.item, rows.spec)
    first, begin, end = valid_rows(rows)
    num = jnp.maximum(end - begin, 0)

    @pl.when(num == each)
    def _() -> None:
        for nth, out in enumerate(outs):
            swizzled_s[nth] = out
        plgpu.commit_smem()
        for nth, (head, row) in itertools.product(range(len(outs)), heads):
            live = pl.ds(align_row(first), each)
            plgpu.copy_smem_to_gmem(swizzled_s.at[nth, pl.ds(row, each)], to(live, head, nth))

    @pl.when((num > 0) & (num < each))
    def _() -> None:
        for nth, out in enumerate(outs):
            store_unoptimized(plain_s.at[nth], out)
        plgpu.commit_smem()
        offset, size = begin, each // 2
        while size:

            @pl.when((num & size) != 0)
            def _(offset: Scalar = offset, size: int = size) -> None:
                for nth, (head, row) in itertools.product(range(len(outs)), heads):
                    piece = plain_s.at[nth, pl.ds(row + offset, size)]
                    plgpu.copy_smem_to_gmem(piece, to(pl.ds(first + offset, size), head, nth))

            offset, size = offset + (num & size), size // 2
