"""A call of paged_decode: whether it may be, its static sizes, and the kernel's inputs made of it."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.checks import (
    require,
    require_arrays,
    require_axes,
    require_built_for,
    require_one_of,
    require_positive,
    require_shape,
    unsupported,
)
from pallas_kernels.list_tiles import MAX_QUERY_BLOCKS
from pallas_kernels.paged_decode.refs import CacheRefs, Inputs, ListRefs
from pallas_kernels.paged_decode.schedule import BlockList, Schedule, made_for_call, schedule_for
from pallas_kernels.paged_decode.sizes import DecodeSizes
from pallas_kernels.paged_decode.spec import DecodeSpec, Shape
from pallas_kernels.shared.head_dims import head_chunks
from pallas_kernels.shared.paged_kv import cache_dims
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.support import why_not_decode

LIST_BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """Arguments of paged_decode.

    Attributes:
        query: `decode_query_len` tokens of each request, one request after the other.
        k_cache: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim].
            Keys and values that no query sees may be anything, and so may their scales. 8 bits, or as query.
        v_cache: As k_cache; may be of another dtype.
        block_table: `block_table[r, i]` holds keys `i * block_size` onward of request r. Entries of blocks
            that no query sees are never used.
        seq_lens: Keys of each request, at most those that the table has room for. 0 marks a padding row.
        layout: "NHD" or "HND".
        decode_query_len: Tokens of each request, 1 to 8.
        k_scale: key = stored * k_scale: [], [kv_heads], or of 8-bit keys per token and head [blocks,
            kv_heads, block_size], so that a block's scales are one copy; None = 1.
        v_scale: The same for values, or per channel [kv_heads, head_dim].
        sinks: One more score of each head, without a value.
        alibi_slopes: Slope of each head.
        block_list: The sparse blocks to visit, all queries of a request the same; the score's mask holds
            inside them. None = all keys.
        list_block_size: Keys of a sparse block.
        lists_have_head_bits: Whether bit QUERY_BLOCK_SHIFT + g of an id says that query head g of the group
            visits the block; otherwise all heads do.
    """

    query: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    block_table: jax.Array
    seq_lens: jax.Array
    layout: str
    decode_query_len: int
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sinks: jax.Array | None
    alibi_slopes: jax.Array | None
    block_list: BlockList | None
    list_block_size: int | None
    lists_have_head_bits: bool

    def check(self) -> None:
        """Raises what paged_decode raises."""
        self._check_shapes()
        self._check_lists()
        q_heads, kv_heads = self.query.shape[1], self.cache_sizes[2]
        require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
        reason = why_not_decode(
            dtype=self.query.dtype,
            k_dtype=self.k_cache.dtype,
            v_dtype=self.v_cache.dtype,
            head_dim=self.query.shape[2],
            block_size=self.cache_sizes[1],
            group=self.group,
            decode_query_len=self.decode_query_len,
            has_token_scales=(
                self.k_scale is not None and self.k_scale.ndim == 3,
                self.v_scale is not None and self.v_scale.ndim == 3,
            ),
        )
        if reason is not None:
            raise unsupported("paged_decode", reason, "Use another implementation")

    def _check_shapes(self) -> None:
        require_one_of("layout", self.layout, ("NHD", "HND"))
        require_axes(4, k_cache=self.k_cache, v_cache=self.v_cache)
        require_axes(3, query=self.query)
        require_axes(2, block_table=self.block_table)
        require_axes(1, seq_lens=self.seq_lens)
        require_arrays(k_scale=self.k_scale, v_scale=self.v_scale)
        require_arrays(sinks=self.sinks, alibi_slopes=self.alibi_slopes)
        cache, (_, q_heads, head_dim), (reqs,) = self.k_cache.shape, self.query.shape, self.seq_lens.shape
        blocks, block_size, kv_heads, _ = self.cache_sizes
        expected = reqs * self.decode_query_len, q_heads, cache[3]
        require_shape("query", self.query.shape, expected, "tokens, q_heads")
        require_shape("v_cache", self.v_cache.shape, cache, "as k_cache")
        require_positive(decode_query_len=self.decode_query_len, kv_heads=kv_heads, q_heads=q_heads)
        scale_shapes = ((), (kv_heads,), (blocks, kv_heads, block_size))
        for name, per_head in (("sinks", self.sinks), ("alibi_slopes", self.alibi_slopes)):
            require_shape(name, (q_heads,) if per_head is None else per_head.shape, (q_heads,), "q_heads")
        if self.k_scale is not None:
            require_one_of("k_scale's shape", self.k_scale.shape, scale_shapes)
        if self.v_scale is not None:
            require_one_of("v_scale's shape", self.v_scale.shape, (*scale_shapes, (kv_heads, head_dim)))
        max_blocks = self.block_table.shape[1]
        require_shape("block_table", self.block_table.shape, (reqs, max_blocks), "reqs, max_blocks")

    def _check_lists(self) -> None:
        size, lists, tell_heads = self.list_block_size, self.block_list, self.lists_have_head_bits
        if lists is None:
            require(size is None, "list_block_size", "be None without block_list", size)
            require(not tell_heads, "lists_have_head_bits", "be False without block_list", tell_heads)
            return
        require_axes(3, **{"block_list.ids": lists.ids})
        expected = self.seq_lens.shape[0], self.cache_sizes[2]
        require_shape("block_list.ids", lists.ids.shape, (*expected, lists.ids.shape[2]), "reqs, kv_heads")
        require_shape("block_list.counts", lists.counts.shape, expected, "reqs, kv_heads")
        require_one_of("list_block_size", size, LIST_BLOCK_SIZES)
        rule = f"have at most {MAX_QUERY_BLOCKS} of a kv head where lists tell them apart"
        require(not tell_heads or self.group <= MAX_QUERY_BLOCKS, "q_heads", rule, self.group)

    def check_schedule(self, schedule: Schedule, score: Score, sizes: DecodeSizes) -> None:
        """Refuses a schedule made for other requests, masks, lists or units."""
        scheduled = self.seq_lens.shape[0] * (1 if self.block_list is None else self.cache_sizes[2])
        ends = schedule.unit_ends.shape
        require_shape("schedule.unit_ends", ends, (scheduled,), "requests, or their kv heads")
        how = self.decode_query_len, self.list_block_size, self.cache_sizes[2]
        wanted = made_for_call(score, sizes, *how)
        require_built_for("schedule", schedule.built_for, wanted)

    def make_schedule(self, score: Score, sizes: DecodeSizes) -> Schedule:
        """Its own."""
        return schedule_for(
            self.seq_lens,
            score=score,
            sizes=sizes,
            kv_heads=self.cache_sizes[2],
            group=self.group,
            decode_query_len=self.decode_query_len,
            block_list=self.block_list,
            list_block_size=self.list_block_size,
            max_kv=self.block_table.shape[1] * self.cache_sizes[1],
        )

    @property
    def cache_sizes(self) -> tuple[int, int, int, int]:
        """Blocks, block_size, kv_heads and head_dim."""
        return cache_dims(self.k_cache, is_hnd=self.layout == "HND")

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.query.shape[1] // self.cache_sizes[2]

    @property
    def rows(self) -> int:
        """Query rows of a kv head."""
        return self.group * self.decode_query_len

    def shape(self, sizes: DecodeSizes) -> Shape:
        """Static sizes."""
        _, block_size, kv_heads, head_dim = self.cache_sizes
        itemsize = min(cache.dtype.itemsize for cache in (self.k_cache, self.v_cache))
        rows, tile_q, row_tiles = self.rows, sizes.row_tile(self.rows), sizes.row_tiles(self.rows)
        needs_padding = row_tiles > 1 or (rows > 8 and rows % 8 != 0)
        return Shape(
            kv_heads=kv_heads,
            row_tiles=row_tiles,
            rows=tile_q if needs_padding else rows,
            group=self.group,
            query_len=self.decode_query_len,
            block_size=block_size,
            is_hnd=self.layout == "HND",
            cut=head_chunks(head_dim, itemsize=itemsize),
            tile_q=tile_q,
            list_block_size=self.list_block_size,
            lists_have_head_bits=self.lists_have_head_bits,
        )

    def inputs(self, spec: DecodeSpec, unit_ends: jax.Array) -> Inputs:
        """The kernel's."""
        shape, lists = spec.shape, ListRefs(None, None)
        query = to_rows(self.query, shape)
        if self.block_list is not None:  # a kv head of a request is a request of its own
            rows = self.seq_lens.shape[0] * shape.kv_heads
            query = query.reshape(rows, shape.row_tiles, *query.shape[2:])
            lists = ListRefs(self.block_list.ids.reshape(rows, -1), self.block_list.counts.reshape(-1))
        cache = CacheRefs(
            k=spec.cache_tiling.tile_cache(self.k_cache),
            v=spec.cache_tiling.tile_cache(self.v_cache),
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            k_scale=cut_scale(self.k_scale, spec),
            v_scale=cut_scale(self.v_scale, spec),
        )
        return Inputs(
            query=shape.cut.split(query),
            cache=cache,
            unit_ends=unit_ends,
            slopes=heads_to_rows(self.alibi_slopes, shape),
            sinks=heads_to_rows(self.sinks, shape),
            lists=lists,
        )


def cut_scale(scale: jax.Array | None, spec: DecodeSpec) -> jax.Array | None:
    """A scale as CacheRefs has it."""
    if scale is None or scale.ndim == 1:
        return scale
    if scale.ndim == 3:
        return spec.cache_tiling.tile_scales(scale)
    if scale.ndim == 0:
        return scale.reshape(1)
    return spec.cache_tiling.tile_channel_scales(scale)


def to_rows(x: jax.Array, shape: Shape) -> jax.Array:
    """[reqs * query_len, q_heads, ...] to [reqs, kv_heads * row_tiles, rows, ...].

    TMA fills up a single tile of rows with zeros; several tiles, or one of odd size, are padded here.
    """
    rest, rows = x.shape[2:], shape.group * shape.query_len
    x = x.reshape(-1, shape.query_len, shape.kv_heads, shape.group, *rest)
    if shape.query_len > 1:
        x = jnp.swapaxes(x, 1, 2)
    x = x.reshape(x.shape[0], shape.kv_heads, rows, *rest)
    padding = shape.row_tiles * shape.rows - rows
    if padding:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *[(0, 0)] * len(rest)))
    return x.reshape(x.shape[0], shape.kv_heads * shape.row_tiles, shape.rows, *rest)


def from_rows(x: jax.Array, shape: Shape) -> jax.Array:
    """The inverse; rows may be as many as tile_q, and a request of the schedule a kv head."""
    rest, rows = x.shape[3:], shape.group * shape.query_len
    reqs = x.shape[0] * x.shape[1] // (shape.kv_heads * shape.row_tiles)
    x = x.reshape(reqs, shape.kv_heads, -1, *rest)[:, :, :rows]
    x = x.reshape(reqs, shape.kv_heads, shape.query_len, shape.group, *rest)
    if shape.query_len > 1:
        x = jnp.swapaxes(x, 1, 2)
    return x.reshape(reqs * shape.query_len, shape.kv_heads * shape.group, *rest)


def heads_to_rows(x: jax.Array | None, shape: Shape) -> jax.Array | None:
    """[q_heads] to [kv_heads * row_tiles, tile_q] f32, times log2(e)."""
    if x is None:
        return None
    x = jnp.broadcast_to(x.astype(jnp.float32)[None] * LOG2E, (shape.query_len, x.shape[0]))
    x = to_rows(x, shape)[0]
    return jnp.pad(x, ((0, 0), (0, shape.tile_q - shape.rows)))
