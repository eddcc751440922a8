"""From a mask to the tiles that a kernel works through, on the device: `schedule(mask, seq_lens, ...)`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from jattn.masks import BatchSizes, Coverage, Mask, check_mask, tile_coverage
from jattn.masks.checks import require_array, require_heads, require_ints
from jattn.pytree import pytree, static
from pallas_kernels import support
from pallas_kernels.checks import require, require_shape
from pallas_kernels.list_tiles import build_lists_by_sorting, encode_tiles


@pytree
class TileSchedule:
    """Tiles of keys for every tile of queries and head: those that need a mask, then those seen whole.

    Attributes:
        kv_tiles: Tile i begins at key `i * tile_kv`. First the num_partial tiles of which some pairs are
            seen, the last one first, then the num_full of which all are, in order; then zeros.
        num_partial: Tiles of kv_tiles that need a mask.
        num_full: Tiles of kv_tiles that need none.
        order: Every `tile of queries * q_heads + head`, those with the longest lists first.
        rows: Row of the batch of each tile of queries.
        first_query: Position of a tile's first query.
        num_queries: Queries of each tile; 0 for a spare tile, whose lists are empty.
        tile_q: Static: queries of a tile.
        tile_kv: Static: keys of a tile.
    """

    kv_tiles: Int32[Array, "q_tiles q_heads max_kv_tiles"]
    num_partial: Int32[Array, "q_tiles q_heads"]
    num_full: Int32[Array, "q_tiles q_heads"]
    order: Int32[Array, " items"]
    rows: Int32[Array, " q_tiles"]
    first_query: Int32[Array, " q_tiles"]
    num_queries: Int32[Array, " q_tiles"]
    tile_q: int = static()
    tile_kv: int = static()


def schedule(
    mask: Mask,
    seq_lens: Int[Array, " reqs"],
    *,
    query_lens: Int[Array, " queries"] | None = None,
    max_query_len: int,
    max_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int | None = None,
    tile_q: int = 128,
    tile_kv: int = 128,
    is_prefill: bool = True,
) -> TileSchedule:
    """Lists the tiles of keys that each head sees from each tile of queries. Traced; nothing on the host.

    Args:
        mask: The whole mask; `Causal() & ...` where attention is causal.
        seq_lens: Keys of each request.
        query_lens: The last so many of them are queries; None = all.
        max_query_len: Static bound of query_lens.
        max_seq_len: Static bound of seq_lens; bounds the lists.
        num_q_heads: Static: query heads of this device.
        num_kv_heads: Static: kv heads; as many as query heads when None.
        tile_q: Static: queries of a tile.
        tile_kv: Static: keys of a tile.
        is_prefill: Static: whether the queries stand in the prefill region.

    Returns:
        Tiles of queries in order, `ceil(max_query_len / tile_q)` for each request.

    Raises:
        ValueError: A bound or a size is not positive, kv heads do not divide query heads, query_lens and
            seq_lens disagree or pass their bounds, or the mask has other rows or heads or reaches less far.
    """
    require_ints(1, max_query_len=max_query_len, max_seq_len=max_seq_len, tile_q=tile_q, tile_kv=tile_kv)
    require_heads(num_q_heads, num_kv_heads)
    query_lens = seq_lens if query_lens is None else query_lens
    _check_lens(seq_lens, query_lens, max_seq_len, max_query_len)
    check_mask(mask, BatchSizes(num_q_heads, seq_lens.shape[0], max_query_len, max_seq_len), causal=False)
    tiles = _tiles_of_queries(seq_lens, query_lens, -(-max_query_len // tile_q), tile_q)
    coverage = tile_coverage(
        mask,
        **tiles._asdict(),
        num_heads=(num_q_heads, num_kv_heads or num_q_heads),
        size=(tile_q, tile_kv),
        max_kv_tiles=-(-max_seq_len // tile_kv),
        is_prefill=is_prefill,
    )
    return _listed(coverage, tiles, tile_q, tile_kv)


def _check_lens(seq_lens: Any, query_lens: Any, max_seq_len: int, max_query_len: int) -> None:
    """Raises ValueError unless these are lengths of requests and, as far as is seen, of their queries.

    Beyond the bounds there are no tiles: keys and queries would be left out without a word.
    """
    for name, lens in (("seq_lens", seq_lens), ("query_lens", query_lens)):
        require_array(name, lens, "integer", {1: "[reqs]"})
    require_shape("query_lens", query_lens.shape, seq_lens.shape, "as seq_lens")
    if not support.is_concrete(seq_lens, query_lens):
        return
    keys, queries = np.asarray(seq_lens), np.asarray(query_lens)
    is_part = bool(((queries >= 0) & (queries <= keys)).all())
    require(is_part, "query_lens", f"be at least 0 and at most seq_lens {keys.tolist()}", queries.tolist())
    for name, lens, most in (("seq_lens", keys, max_seq_len), ("query_lens", queries, max_query_len)):
        rule = f"be at most max_{name[:-1]} ({most})"
        require(int(lens.max(initial=0)) <= most, name, rule, lens.tolist())


class _QueryTiles(NamedTuple):
    """Row, first query, queries, and keys of the request of each tile of queries."""

    rows: Int32[Array, " q_tiles"]
    first_query: Int32[Array, " q_tiles"]
    num_queries: Int32[Array, " q_tiles"]
    seq_lens: Int32[Array, " q_tiles"]


def _tiles_of_queries(seq_lens: Array, query_lens: Array, per_req: int, tile_q: int) -> _QueryTiles:
    rows = jnp.repeat(jnp.arange(seq_lens.shape[0], dtype=jnp.int32), per_req)
    ahead = jnp.tile(jnp.arange(per_req, dtype=jnp.int32) * tile_q, seq_lens.shape[0])
    lens, queries = seq_lens.astype(jnp.int32)[rows], query_lens.astype(jnp.int32)[rows]
    return _QueryTiles(rows, lens - queries + ahead, jnp.clip(queries - ahead, 0, tile_q), lens)


def _listed(coverage: Coverage, tiles: _QueryTiles, tile_q: int, tile_kv: int) -> TileSchedule:
    """The tiles that are seen, those that need a mask first."""
    any_visible = coverage.any_visible
    listed = build_lists_by_sorting(
        encode_tiles(any_visible, coverage.all_visible).reshape(-1, any_visible.shape[-1])
    )
    num_partial, num_full = (x.reshape(any_visible.shape[:2]) for x in (listed.num_partial, listed.num_full))
    return TileSchedule(
        kv_tiles=listed.entries.reshape(any_visible.shape),
        num_partial=num_partial,
        num_full=num_full,
        order=jnp.argsort(-(num_partial + num_full).reshape(-1), stable=True).astype(jnp.int32),
        rows=tiles.rows,
        first_query=tiles.first_query,
        num_queries=tiles.num_queries,
        tile_q=tile_q,
        tile_kv=tile_kv,
    )


def expand_schedule(
    made: TileSchedule,
) -> tuple[Bool[Array, "q_tiles q_heads tiles"], Bool[Array, "q_tiles q_heads tiles"]]:
    """The lists as arrays again: which tiles are seen in part, and which whole. For tests and pictures.

    Args:
        made: By `schedule`.
    """
    tiles = made.kv_tiles.shape[-1]
    nth = jnp.arange(tiles, dtype=jnp.int32)[None, None, :]
    partial = nth < made.num_partial[..., None]
    live = nth < (made.num_partial + made.num_full)[..., None]
    hits = made.kv_tiles[..., None] == nth[:, :, None]
    of = lambda which: (hits & which[..., None]).any(axis=-2)
    return of(partial), of(live & ~partial)
