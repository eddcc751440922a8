"""How the keys of tiles of queries are cut into splits: computed on the device, once a step.

A tile of queries before many keys takes long, and where there are few of them most thread blocks have none.
So the tiles of keys of each are cut into splits of about equal length, each of which leaves a partial result;
into as many as make the step end earliest, which may be one. (FlashAttention-3 chooses its num_splits on the
host.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.shared.arithmetic import sorts_before
from pallas_kernels.varlen_prefill.sizes import PrefillSizes

# What a kernel reads of a split, after the columns of its tile of queries:
SPLIT_COLUMNS = (
    "skipped",  # tiles of keys before it
    "split_tiles",  # tiles of keys in it, at most
    "partial",  # which partial result it leaves; -1: none, the tile of queries is not cut
    "num_splits",  # of its tile of queries: their partial results follow each other
)
NUM_SPLITS_CANDIDATES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # splits of the longest tile
# What thread blocks spend besides tiles, in keys: for an item's beginning and end, and for all combining.
TILE_OVERHEAD_KEYS = 128
COMBINE_OVERHEAD_KEYS = 512
SPLIT_OUTPUTS_PER_CTA = 6  # that leave partial results, for each thread block: 100 MB of heads of 256


class KvSplits(NamedTuple):
    """The splits of a step, tile after tile; or whole tiles, as splits of which there is one.

    Attributes:
        tile: Which tile of queries each is of.
        is_live: Whether it is one at all.
        num_tiles: Its tiles of keys, at most.
        columns: SPLIT_COLUMNS.
    """

    tile: Int32[Array, " rows"]
    is_live: Bool[Array, " rows"]
    num_tiles: Int32[Array, " rows"]
    columns: tuple[Int32[Array, " rows"], ...]


class SplitTiles(NamedTuple):
    """The tiles of queries that are cut.

    Attributes:
        num_valid: How many there are.
        rows: Of each the first split's row of the schedule's table.
    """

    num_valid: Int32[Array, " 1"]
    rows: Int32[Array, " most"]


def max_split_outputs(q_heads: int, sizes: PrefillSizes) -> int:
    """Partial results of a head, or of the heads that share a tile, at most."""
    return max(SPLIT_OUTPUTS_PER_CTA * sizes.ctas * sizes.pack_gqa // q_heads, 2)


def choose_num_splits(
    kv_tiles: Int32[Array, " tiles"], is_live: Bool[Array, " tiles"], *, q_heads: int, sizes: PrefillSizes
) -> Int32[Array, " tiles"]:
    """Into how many splits each tile of queries is cut: 1 where it is not, 0 where there is none.

    Each candidate's step is reckoned, thread block by thread block: items are dealt to and fro, the longest
    first (Worklist.rounds_of).

    Args:
        kv_tiles: Tiles of keys of each.
        is_live: Whether there is one.
        q_heads: Each is as many items, but for heads that share a tile.
        sizes: The kernel's.
    """
    kv_tiles, is_live = kv_tiles[None], is_live[None]  # the first axis is the candidates'
    candidates = jnp.asarray([n for n in NUM_SPLITS_CANDIDATES if n <= sizes.max_splits], jnp.int32)[:, None]
    length = _ceil_div(jnp.max(jnp.where(is_live, kv_tiles, 0), initial=1), candidates)
    splits = jnp.where(is_live, jnp.maximum(_ceil_div(kv_tiles, length), 1), 0)
    each = _ceil_div(kv_tiles, jnp.maximum(splits, 1))
    items = splits * (q_heads // sizes.pack_gqa)
    begin = jnp.where(sorts_before(-each), items[:, None, :], 0).sum(axis=2, dtype=jnp.int32)
    workers = sizes.workers
    worker = jnp.arange(workers, dtype=jnp.int32)[None, :, None]
    dealt = _dealt(begin, items, 2 * workers - worker, workers) + _dealt(begin, items, worker + 1, workers)
    shares = (dealt * (each * sizes.tile_kv + TILE_OVERHEAD_KEYS)[:, None, :]).sum(axis=2, dtype=jnp.int32)
    partials = jnp.where(splits > 1, splits, 0).sum(axis=1, dtype=jnp.int32)
    end = shares.max(axis=1) + jnp.where(partials > 0, COMBINE_OVERHEAD_KEYS, 0)
    fits = partials <= max_split_outputs(q_heads, sizes)
    return splits[jnp.argmin(jnp.where(fits, end, jnp.iinfo(jnp.int32).max))]


def _dealt(begin: Array, items: Array, shift: Array, workers: int) -> Array:
    """Of items in places [begin, begin + items), how many are `shift` before a multiple of two rounds."""
    first = begin[:, None, :] + shift
    return _ceil_div(first + items[:, None, :], 2 * workers) - _ceil_div(first, 2 * workers)


def split_kv_tiles(
    kv_tiles: Int32[Array, " tiles"], splits: Int32[Array, " tiles"], *, rows: int
) -> KvSplits:
    """The splits of all tiles of queries, in `rows` rows."""
    ends = jnp.cumsum(splits, dtype=jnp.int32)
    partial_ends = jnp.cumsum(jnp.where(splits > 1, splits, 0), dtype=jnp.int32)
    row = jnp.arange(rows, dtype=jnp.int32)
    tile = jnp.minimum((ends[None, :] <= row[:, None]).sum(axis=1, dtype=jnp.int32), len(splits) - 1)
    count = splits[tile]
    nth = row - (ends[tile] - count)
    num_tiles = _ceil_div(kv_tiles[tile], jnp.maximum(count, 1))
    partial = jnp.where(count > 1, partial_ends[tile] - count + nth, -1)
    return KvSplits(tile, row < ends[-1], num_tiles, (nth * num_tiles, num_tiles, partial, count))


def find_split_tiles(cut: KvSplits, places: Int32[Array, " rows"], *, most: int) -> SplitTiles:
    """Which tiles are cut, `most` of them at most, by the places of their splits in the table."""
    skipped, _, partial, _ = cut.columns
    is_first = cut.is_live & (partial >= 0) & (skipped == 0)
    nth = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    is_it = is_first[None, :] & (nth[None, :] == jnp.arange(most, dtype=jnp.int32)[:, None])
    rows = jnp.where(is_it, places[None, :], 0).sum(axis=1, dtype=jnp.int32)
    return SplitTiles(is_first.sum(dtype=jnp.int32)[None], rows)


def _ceil_div(x: Array, n: Array | int) -> Array:
    return (x + (n - 1)) // n
