"""KV splits: how the keys of a query tile are split between thread blocks, computed on the device.

A query tile with many keys takes long, and if there are few such tiles most thread blocks are idle. So the KV
tiles of each query tile are split into contiguous parts of about equal length, each of which writes an
unnormalized result. The number of splits is the one with which the step ends earliest, which may be 1.
(FlashAttention-3 chooses its num_splits on the host.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.shared.arithmetic import sorts_before
from pallas_kernels.varlen_prefill.sizes import PrefillSizes

# Columns of a split in the table, after the columns of its query tile:
SPLIT_COLUMNS = (
    "skipped",  # KV tiles of the query tile before this split
    "split_tiles",  # maximum number of KV tiles in this split
    "split_output",  # index of its result in the split outputs; -1 if the query tile is not split
    "num_splits",  # number of splits of the query tile, whose results are adjacent
)
NUM_SPLITS_CANDIDATES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # numbers of splits of the longest tile
# Cost of a work tile's start and end, and of the combine kernel, in keys.
TILE_OVERHEAD_KEYS = 128
COMBINE_OVERHEAD_KEYS = 512
SPLIT_OUTPUTS_PER_CTA = 6  # work tiles with split outputs per thread block: 100 MB for heads of 256


class KvSplits(NamedTuple):
    """The splits of a step, query tile after query tile; a query tile that is not split counts as one split.

    Attributes:
        tile: Query tile of each split.
        is_valid: Whether each row holds a split.
        num_tiles: Maximum number of KV tiles in each split.
        columns: Values of each split, one array per name in SPLIT_COLUMNS.
    """

    tile: Int32[Array, " rows"]
    is_valid: Bool[Array, " rows"]
    num_tiles: Int32[Array, " rows"]
    columns: tuple[Int32[Array, " rows"], ...]


class SplitTiles(NamedTuple):
    """The query tiles whose keys are split.

    Attributes:
        num_valid: Number of split query tiles.
        rows: Row in the schedule's table of each query tile's first split.
    """

    num_valid: Int32[Array, " 1"]
    rows: Int32[Array, " max_split_tiles"]


def max_split_outputs(q_heads: int, sizes: PrefillSizes) -> int:
    """Return the maximum number of split outputs per head, or per group of packed heads."""
    return max(SPLIT_OUTPUTS_PER_CTA * sizes.ctas * sizes.pack_gqa // q_heads, 2)


def choose_num_splits(
    kv_tiles: Int32[Array, " tiles"], is_valid: Bool[Array, " tiles"], *, q_heads: int, sizes: PrefillSizes
) -> Int32[Array, " tiles"]:
    """Return the number of splits of each query tile: 1 if it is not split, 0 if it is invalid.

    The duration of the step is estimated for each candidate and thread block: work tiles are assigned back
    and forth, the longest first, as PrefillTileScheduler does.

    Args:
        kv_tiles: Number of KV tiles of each query tile.
        is_valid: Whether each query tile exists.
        q_heads: Number of query heads; each, or each group of packed heads, is a work tile.
        sizes: Tile sizes of the kernel.
    """
    kv_tiles, is_valid = kv_tiles[None], is_valid[None]  # the first axis is the candidates'
    candidates = jnp.asarray([n for n in NUM_SPLITS_CANDIDATES if n <= sizes.max_splits], jnp.int32)[:, None]
    length = _ceil_div(jnp.max(jnp.where(is_valid, kv_tiles, 0), initial=1), candidates)
    splits = jnp.where(is_valid, jnp.maximum(_ceil_div(kv_tiles, length), 1), 0)
    tiles_per_split = _ceil_div(kv_tiles, jnp.maximum(splits, 1))
    num_work_tiles = splits * (q_heads // sizes.pack_gqa)
    is_earlier = sorts_before(-tiles_per_split)
    begin = jnp.where(is_earlier, num_work_tiles[:, None, :], 0).sum(axis=2, dtype=jnp.int32)
    workers = sizes.workers
    worker = jnp.arange(workers, dtype=jnp.int32)[None, :, None]
    odd_rounds = _count_assigned(begin, num_work_tiles, 2 * workers - worker, workers)
    even_rounds = _count_assigned(begin, num_work_tiles, worker + 1, workers)
    keys_per_tile = (tiles_per_split * sizes.tile_kv + TILE_OVERHEAD_KEYS)[:, None, :]
    cta_work = ((odd_rounds + even_rounds) * keys_per_tile).sum(axis=2, dtype=jnp.int32)
    num_outputs = jnp.where(splits > 1, splits, 0).sum(axis=1, dtype=jnp.int32)
    duration = cta_work.max(axis=1) + jnp.where(num_outputs > 0, COMBINE_OVERHEAD_KEYS, 0)
    fits = num_outputs <= max_split_outputs(q_heads, sizes)
    return splits[jnp.argmin(jnp.where(fits, duration, jnp.iinfo(jnp.int32).max))]


def _count_assigned(begin: Array, num_work_tiles: Array, shift: Array, workers: int) -> Array:
    """Return how many of the positions [begin, begin + num_work_tiles) are `shift` before two full rounds."""
    first = begin[:, None, :] + shift
    return _ceil_div(first + num_work_tiles[:, None, :], 2 * workers) - _ceil_div(first, 2 * workers)


def split_kv_tiles(
    kv_tiles: Int32[Array, " tiles"], splits: Int32[Array, " tiles"], *, rows: int
) -> KvSplits:
    """Split the KV tiles of all query tiles.

    Args:
        kv_tiles: Number of KV tiles of each query tile.
        splits: Number of splits of each query tile.
        rows: Number of rows of the result. Static.
    """
    ends = jnp.cumsum(splits, dtype=jnp.int32)
    output_ends = jnp.cumsum(jnp.where(splits > 1, splits, 0), dtype=jnp.int32)
    row = jnp.arange(rows, dtype=jnp.int32)
    tile = jnp.minimum((ends[None, :] <= row[:, None]).sum(axis=1, dtype=jnp.int32), len(splits) - 1)
    count = splits[tile]
    index = row - (ends[tile] - count)
    num_tiles = _ceil_div(kv_tiles[tile], jnp.maximum(count, 1))
    split_output = jnp.where(count > 1, output_ends[tile] - count + index, -1)
    return KvSplits(tile, row < ends[-1], num_tiles, (index * num_tiles, num_tiles, split_output, count))


def find_split_tiles(cut: KvSplits, table_rows: Int32[Array, " rows"], *, max_tiles: int) -> SplitTiles:
    """Return the query tiles that are split.

    Args:
        cut: The splits of the step.
        table_rows: Row in the schedule's table of each split.
        max_tiles: Maximum number of split query tiles. Static.
    """
    skipped, _, split_output, _ = cut.columns
    is_first = cut.is_valid & (split_output >= 0) & (skipped == 0)
    index = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    is_match = is_first[None, :] & (index[None, :] == jnp.arange(max_tiles, dtype=jnp.int32)[:, None])
    rows = jnp.where(is_match, table_rows[None, :], 0).sum(axis=1, dtype=jnp.int32)
    return SplitTiles(is_first.sum(dtype=jnp.int32)[None], rows)


def _ceil_div(x: Array, n: Array | int) -> Array:
    return (x + (n - 1)) // n
