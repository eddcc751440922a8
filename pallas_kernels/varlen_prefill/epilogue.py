"""The epilogue of a work tile: stores the output and log-sum-exp, or the unnormalized split output."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx.stores import store_tiles, store_token_rows, store_tokens
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.softmax import SplitOutputs, finalize_softmax
from pallas_kernels.shared.types import Index, Ref, Rows, Scalar, Slice, Tile
from pallas_kernels.varlen_prefill.schedule import ALIGN
from pallas_kernels.varlen_prefill.softmax import broadcast_rows
from pallas_kernels.varlen_prefill.spec import PrefillOutputs
from pallas_kernels.varlen_prefill.tile_scheduler import PackedHead, QueryRows, align_row, packed_heads


class RowResults(NamedTuple):
    """Unnormalized results of rows over all of their keys, or over a KV split.

    Attributes:
        accs: P V, one per chunk of the head.
        row_max: Number that was subtracted from the scores of each row.
        row_sum: Sum of the probabilities of each row.
    """

    accs: tuple[Tile, ...]
    row_max: Rows
    row_sum: Rows


def store_output(
    outputs: PrefillOutputs, sinks: Ref, rows: QueryRows, results: RowResults, swizzled_s: Ref, plain_s: Ref
) -> None:
    """Normalize the results of rows, and store their output and log-sum-exp.

    Args:
        outputs: Arrays in global memory that are written.
        sinks: `PrefillInputs.sinks`.
        rows: Query rows of the warpgroup: positions, tile and row offsets.
        results: Results of the rows over all keys.
        swizzled_s: Shared memory for the output, see `store_rows`.
        plain_s: The same memory without swizzling.
    """
    factor, lse = output_scale_and_lse(rows, results.row_max, results.row_sum, sinks)
    # Read the table row before the fence in store_rows: TMA may then replace it by another work tile's.
    valid = None if outputs.lse is None else valid_rows(rows)
    outs = [(acc * broadcast_rows(factor, acc)).astype(rows.spec.dtype) for acc in results.accs]
    store_rows(outputs.out, rows, swizzled_s, plain_s, outs)
    if valid is not None:
        # After the output: with tile lists, the other order takes 1 % longer.
        store_lse(outputs.lse, rows, valid, lse)


def output_scale_and_lse(rows: QueryRows, row_max: Rows, row_sum: Rows, sinks: Ref) -> tuple[Rows, Rows]:
    """Return the factor that normalizes P V, and the log-sum-exp, both including the sinks."""
    work_tile, sink = rows.work_tile, None
    if sinks is not None:
        # A padding row has no keys and no sink: its output is 0.
        has_sink = work_tile["seq_len"] > 0
        if rows.spec.score.rows_per_token > 1:
            no_sink = jnp.where(has_sink, jnp.float32(0.0), -jnp.inf)
            sink = rows.load_per_row_of_token(sinks) + no_sink
        else:
            sink = rows.per_head(lambda head: jnp.where(has_sink, sinks[head], -jnp.inf))
    return finalize_softmax(row_max, row_sum, sink)


def store_output_from_registers(
    outputs: PrefillOutputs, sinks: Ref, rows: QueryRows, results: RowResults
) -> None:
    """Do what `store_output` does without shared memory and TMA."""
    factor, lse = output_scale_and_lse(rows, results.row_max, results.row_sum, sinks)
    valid, head = valid_rows(rows), rows.spec.shape.head
    for chunk, acc in enumerate(results.accs):
        out_g = outputs.out.at[:, :, chunk] if head.is_padded else outputs.out
        store_token_rows(
            out_g,
            acc * broadcast_rows(factor, acc),
            packed_heads(rows.work_tile, rows.spec)[0].head,
            *valid,
            tokens_per_head=rows.tokens,
            columns=head.chunk_dim,
            is_interpreted=rows.spec.is_interpreted,
        )
    if outputs.lse is not None:
        store_lse(outputs.lse, rows, valid, lse)


class ValidRows(NamedTuple):
    """The valid rows of a warpgroup, which are the same within each packed head.

    Attributes:
        token: Token of row 0.
        first_row: First valid row.
        end_row: One past the last valid row.
    """

    token: Scalar
    first_row: Scalar
    end_row: Scalar


def valid_rows(rows: QueryRows) -> ValidRows:
    """Return the valid rows, which are the same for each packed head."""
    work_tile, tokens, first = rows.work_tile, rows.tokens, rows.rank * rows.tokens
    begin, end = [jnp.clip(row - first, 0, tokens) for row in (work_tile["begin"], work_tile["end"])]
    return ValidRows(work_tile["first_row"] + first, begin, end)


def store_lse(lse_g: Ref, rows: QueryRows, valid: ValidRows, lse: Rows) -> None:
    """Store the log-sum-exp of a warpgroup's valid rows.

    It is stored from registers: Pallas stores whole tiles only, and XLA would need another kernel to turn
    them into rows of tokens.
    """
    first, *_ = packed_heads(rows.work_tile, rows.spec)
    is_interpreted = rows.spec.is_interpreted
    store_tokens(lse_g, lse, first.head, *valid, tokens_per_head=rows.tokens, is_interpreted=is_interpreted)


def store_split_output(
    split_outputs: SplitOutputs, index: Scalar, rows: QueryRows, results: RowResults
) -> None:
    """Store the unnormalized results of a KV split, for all rows, including invalid ones."""
    split, row_slice = (index, rows.work_tile.head), warpgroup_rows(rows)
    for chunk, acc in enumerate(results.accs):
        store_unoptimized(split_outputs.out.at[(*split, chunk, row_slice)], acc)
    split_outputs.row_max[(*split, row_slice)] = results.row_max
    split_outputs.row_sum[(*split, row_slice)] = results.row_sum
    if not rows.spec.sizes.per_warp_mma:
        # The work tile's table row has been read: TMA may replace it by another work tile's.
        plgpu.commit_smem()


def warpgroup_rows(rows: QueryRows) -> Slice:
    """Return the warpgroup's rows within the query tile."""
    num = rows.spec.sizes.warpgroup_rows
    return pl.ds(pl.multiple_of(rows.rank * num, num), num)


def store_rows(out_g: Ref, rows: QueryRows, swizzled_s: Ref, plain_s: Ref, outs: Sequence[Tile]) -> None:
    """Store a warpgroup's valid rows: by one copy if all are valid, else by copies of powers of two rows.

    Args:
        out_g: Output in global memory, see PrefillOutputs.
        rows: Query rows of the warpgroup: positions, tile and row offsets.
        swizzled_s: Shared memory [chunks, 64, width].
        plain_s: The same memory without swizzling.
        outs: Output in 16 bits, one per chunk of the head.
    """
    head_dims = rows.spec.shape.head

    def index(tokens: Slice, head: Scalar, chunk: int) -> Index:
        return (tokens, head, *head_dims.gmem_index(chunk, head * 0))

    store_valid_rows(
        out_g, index, packed_heads(rows.work_tile, rows.spec), valid_rows(rows),
        swizzled_s, plain_s, outs, is_interpreted=rows.spec.is_interpreted,
    )  # fmt: skip


def store_valid_rows(
    out_g: Ref,
    index_of: Callable[[Slice, Scalar, int], Index],
    heads: Sequence[PackedHead],
    valid: ValidRows,
    swizzled_s: Ref,
    plain_s: Ref,
    outs: Sequence[Tile],
    *,
    is_interpreted: bool,
) -> None:
    """Store the valid rows of each head of a warpgroup: outs[i] to `out_g[index_of(rows, head, i)]`.

    If all rows are valid, one copy stores a head's rows of each tile. Otherwise each copy stores a power of
    two rows.

    Args:
        out_g: Array in global memory whose first axis is the rows.
        index_of: Function that returns the index in `out_g`.
        heads: Heads whose rows follow each other in the tiles.
        valid: Valid rows of each head.
        swizzled_s: Shared memory [tiles, 64, width].
        plain_s: The same memory without swizzling.
        outs: Tiles in 16 bits, of a chunk or a panel of the heads each.
        is_interpreted: Whether the kernel runs in interpret mode. Static.
    """
    (first, begin, end), tokens = valid, outs[0].shape[0] // len(heads)
    num = jnp.maximum(end - begin, 0)

    @pl.when(num == tokens)
    def _() -> None:
        # All rows are valid: one swizzled copy per head and tile.
        for index, out in enumerate(outs):
            swizzled_s[index] = out
        plgpu.commit_smem()
        for index, (head, row) in itertools.product(range(len(outs)), heads):
            rows_s = swizzled_s.at[index, pl.ds(row, tokens)]
            out_index = index_of(pl.ds(align_row(first), tokens), head, index)
            if out_g.shape[0] % ALIGN == 0:
                plgpu.copy_smem_to_gmem(rows_s, out_g.at[out_index])
            else:
                store_tiles(out_g, rows_s, out_index, is_interpreted=is_interpreted)

    @pl.when((num > 0) & (num < tokens))
    def _() -> None:
        # Swizzled memory can only be copied in units of 8 rows, so partial tiles go through the plain view.
        for index, out in enumerate(outs):
            store_unoptimized(plain_s.at[index], out)
        plgpu.commit_smem()
        offset, size = begin, tokens // 2
        while size:

            @pl.when((num & size) != 0)
            def _(offset: Scalar = offset, size: int = size) -> None:
                for index, (head, row) in itertools.product(range(len(outs)), heads):
                    rows_s = plain_s.at[index, pl.ds(row + offset, size)]
                    out_index = index_of(pl.ds(first + offset, size), head, index)
                    plgpu.copy_smem_to_gmem(rows_s, out_g.at[out_index])

            offset, size = offset + (num & size), size // 2
