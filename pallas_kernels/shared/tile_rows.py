"""Rows of a tile of keys or queries: their positions in the request, and zeros in rows that are masked out.

A tile holds one or several runs of consecutive tokens. A row is masked out if its position lies outside of a
range [begin, end), such as the keys that any query of the request attends to. Masking the scores of such rows
is not enough, because they may hold anything and 0 times NaN is NaN.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.layouts import WGMMA
from pallas_kernels.shared.memory import PANEL
from pallas_kernels.shared.types import Ref, Scalar, Slice, Tile


def select_run(rows: Tile, values: Sequence[Scalar], run_length: int) -> Tile | Scalar:
    """Return the element of `values` for the run of consecutive tokens that each row of a tile belongs to.

    Args:
        rows: Index of each element's row in the tile.
        values: Value of each run of the tile; of a single one, a scalar is returned.
        run_length: Number of rows per run. Static.
    """
    selected = values[0]
    for run, value in enumerate(values[1:], 1):
        selected = jnp.where(rows >= run * run_length, value, selected)
    return selected


def run_offsets(rows: Tile, run_starts: Sequence[Scalar], run_length: int) -> Tile | Scalar:
    """Return the position of each row of a tile minus its index; see `select_run`.

    Args:
        rows: Index of each element's row in the tile.
        run_starts: Position of the first row of each run.
        run_length: Number of rows per run. Static.
    """
    return select_run(rows, [start - run * run_length for run, start in enumerate(run_starts)], run_length)


def where_visible(x: Tile, positions: Tile, begin: Scalar, end: Scalar, fill: float = 0.0) -> Tile:
    """Return `x` with `fill` in the rows at positions outside of [begin, end).

    Args:
        x: Tile with one row per token.
        positions: Position of each element's token, int32, of the same shape.
        begin: First position that is not masked out.
        end: One past the last position that is not masked out.
        fill: Static value of the replaced rows.
    """
    return jnp.where((positions >= begin) & (positions < end), x, jnp.full_like(x, fill))


def clear_masked_out(
    tile_s: Ref, rows: Slice, positions: Callable[[tuple[int, ...]], Tile], begin: Scalar, end: Scalar
) -> None:
    """Overwrite rows at positions outside of [begin, end) with zeros; the caller must call commit_smem.

    Args:
        tile_s: Tile in SMEM, [num_chunks, tile_rows, width].
        rows: Rows to check, a pl.ds(...).
        positions: Function that returns the position of each element's token in a part of `rows` of a given
            shape, int32.
        begin: First position that is not masked out.
        end: One past the last position that is not masked out.
    """
    num_chunks, _, width = tile_s.shape
    for chunk in range(num_chunks):
        for start in range(0, width, PANEL):
            part_s = tile_s.at[chunk, rows, pl.ds(start, PANEL)]
            part = plgpu.load(part_s, layout=WGMMA, optimized=False)
            part_s[...] = where_visible(part, positions(part.shape), begin, end)
