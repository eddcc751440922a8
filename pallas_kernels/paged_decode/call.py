"""Arguments of one paged_decode call: their checks, their static sizes and the kernel's inputs."""

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
from pallas_kernels.paged_decode.refs import DecodeCacheRefs, DecodeInputs, DecodeListRefs
from pallas_kernels.paged_decode.schedule import BlockList, DecodeSchedule, make_schedule, schedule_key
from pallas_kernels.paged_decode.sizes import DecodeSizes
from pallas_kernels.paged_decode.spec import DecodeShape, DecodeSpec
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
        query: `decode_query_len` tokens of each request, request by request.
        k_cache: NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim],
            in 8 bits or in the dtype of query. Keys and values that no query attends to may hold anything,
            and so may their scales.
        v_cache: Values, of the shape of k_cache; may have another dtype.
        block_table: `block_table[r, i]` is the block of keys `i * block_size` onward of request r. Entries of
            blocks that no query attends to are never used.
        seq_lens: Number of keys of each request, at most max_blocks * block_size. 0 marks a padding row.
        layout: "NHD" or "HND".
        decode_query_len: Query tokens per request, 1 to 8.
        k_scale: Factor of the stored keys: [], [kv_heads], or for 8-bit keys per token and head [blocks,
            kv_heads, block_size], so that the scales of a block are one copy; None = 1.
        v_scale: Factor of the stored values, like k_scale, or per channel [kv_heads, head_dim].
        sinks: Attention sink of each query head: one more score, without a value.
        alibi_slopes: ALiBi slope of each query head.
        block_list: Sparse blocks to visit, the same for all queries of a request; the score's mask applies
            inside them. None = all keys.
        list_block_size: Keys per sparse block; one of LIST_BLOCK_SIZES.
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
        """Raise the errors that `paged_decode` documents."""
        self._check_shapes()
        self._check_lists()
        q_heads, kv_heads = self.query.shape[1], self.cache_dims[2]
        require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
        reason = why_not_decode(
            dtype=self.query.dtype,
            k_dtype=self.k_cache.dtype,
            v_dtype=self.v_cache.dtype,
            head_dim=self.query.shape[2],
            block_size=self.cache_dims[1],
            group=self.group,
            decode_query_len=self.decode_query_len,
            has_token_scales=(
                self.k_scale is not None and self.k_scale.ndim == 3,
                self.v_scale is not None and self.v_scale.ndim == 3,
            ),
        )
        if reason is not None:
            raise unsupported("paged_decode", reason, "Call jattn.attend with implementation='xla'")

    def _check_shapes(self) -> None:
        require_one_of("layout", self.layout, ("NHD", "HND"))
        require_axes(4, k_cache=self.k_cache, v_cache=self.v_cache)
        require_axes(3, query=self.query)
        require_axes(2, block_table=self.block_table)
        require_axes(1, seq_lens=self.seq_lens)
        require_arrays(k_scale=self.k_scale, v_scale=self.v_scale)
        require_arrays(sinks=self.sinks, alibi_slopes=self.alibi_slopes)
        cache, (_, q_heads, head_dim), (reqs,) = self.k_cache.shape, self.query.shape, self.seq_lens.shape
        blocks, block_size, kv_heads, _ = self.cache_dims
        expected = reqs * self.decode_query_len, q_heads, cache[3]
        require_shape("query", self.query.shape, expected, "reqs * decode_query_len, q_heads, head_dim")
        require_shape("v_cache", self.v_cache.shape, cache, "the shape of k_cache")
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
        size, lists, has_head_bits = self.list_block_size, self.block_list, self.lists_have_head_bits
        if lists is None:
            require(size is None, "list_block_size", "be None without block_list", size)
            require(not has_head_bits, "lists_have_head_bits", "be False without block_list", has_head_bits)
            return
        require_axes(3, **{"block_list.ids": lists.ids})
        expected = self.seq_lens.shape[0], self.cache_dims[2]
        require_shape("block_list.ids", lists.ids.shape, (*expected, lists.ids.shape[2]), "reqs, kv_heads")
        require_shape("block_list.counts", lists.counts.shape, expected, "reqs, kv_heads")
        require_one_of("list_block_size", size, LIST_BLOCK_SIZES)
        if has_head_bits and self.group > MAX_QUERY_BLOCKS:
            raise ValueError(
                f"lists_have_head_bits=True supports at most {MAX_QUERY_BLOCKS} query heads per KV head, "
                f"got {self.group}."
            )

    def check_schedule(self, schedule: DecodeSchedule, score: Score, sizes: DecodeSizes) -> None:
        """Raise ValueError if the schedule was built for other requests, masks, lists or units."""
        rows = self.seq_lens.shape[0] * (1 if self.block_list is None else self.cache_dims[2])
        meaning = "requests, with block_list times kv_heads"
        require_shape("schedule.unit_ends", schedule.unit_ends.shape, (rows,), meaning)
        expected = schedule_key(score, sizes, self.decode_query_len, self.list_block_size, self.cache_dims[2])
        require_built_for("schedule", schedule.built_for, expected)

    def make_schedule(self, score: Score, sizes: DecodeSizes) -> DecodeSchedule:
        """Return the schedule of this call."""
        return make_schedule(
            self.seq_lens,
            score=score,
            sizes=sizes,
            kv_heads=self.cache_dims[2],
            group=self.group,
            decode_query_len=self.decode_query_len,
            block_list=self.block_list,
            list_block_size=self.list_block_size,
            max_kv=self.block_table.shape[1] * self.cache_dims[1],
        )

    @property
    def cache_dims(self) -> tuple[int, int, int, int]:
        """Blocks, block_size, kv_heads and head_dim of the cache."""
        return cache_dims(self.k_cache, is_hnd=self.layout == "HND")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.cache_dims[2]

    @property
    def rows(self) -> int:
        """Query rows per KV head."""
        return self.group * self.decode_query_len

    def shape(self, sizes: DecodeSizes) -> DecodeShape:
        """Return the static sizes of the arrays."""
        _, block_size, kv_heads, head_dim = self.cache_dims
        itemsize = min(cache.dtype.itemsize for cache in (self.k_cache, self.v_cache))
        rows, tile_q, row_tiles = self.rows, sizes.row_tile(self.rows), sizes.row_tiles(self.rows)
        needs_padding = row_tiles > 1 or (rows > 8 and rows % 8 != 0)
        return DecodeShape(
            kv_heads=kv_heads,
            row_tiles=row_tiles,
            rows=tile_q if needs_padding else rows,
            group=self.group,
            query_len=self.decode_query_len,
            block_size=block_size,
            is_hnd=self.layout == "HND",
            head=head_chunks(head_dim, itemsize=itemsize),
            tile_q=tile_q,
            list_block_size=self.list_block_size,
            lists_have_head_bits=self.lists_have_head_bits,
        )

    def inputs(self, spec: DecodeSpec, unit_ends: jax.Array) -> DecodeInputs:
        """Return the arrays that the kernel reads, reshaped as DecodeInputs documents."""
        shape, lists = spec.shape, DecodeListRefs(None, None)
        query = to_rows(self.query, shape)
        if self.block_list is not None:  # each KV head of a request is a row of its own
            rows = self.seq_lens.shape[0] * shape.kv_heads
            query = query.reshape(rows, shape.row_tiles, *query.shape[2:])
            lists = DecodeListRefs(self.block_list.ids.reshape(rows, -1), self.block_list.counts.reshape(-1))
        cache = DecodeCacheRefs(
            k=spec.cache_tiling.tile_cache(self.k_cache),
            v=spec.cache_tiling.tile_cache(self.v_cache),
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            k_scale=tile_scale(self.k_scale, spec),
            v_scale=tile_scale(self.v_scale, spec),
        )
        return DecodeInputs(
            query=shape.head.split(query),
            cache=cache,
            unit_ends=unit_ends,
            slopes=heads_to_rows(self.alibi_slopes, shape),
            sinks=heads_to_rows(self.sinks, shape),
            lists=lists,
        )


def tile_scale(scale: jax.Array | None, spec: DecodeSpec) -> jax.Array | None:
    """Reshape a scale as DecodeCacheRefs documents."""
    if scale is None or scale.ndim == 1:
        return scale
    if scale.ndim == 3:
        return spec.cache_tiling.tile_scales(scale)
    if scale.ndim == 0:
        return scale.reshape(1)
    return spec.cache_tiling.tile_channel_scales(scale)


# Query rows: the queries of a KV head are the rows of its tiles, ordered by decode token, then by query head.
def to_rows(x: jax.Array, shape: DecodeShape) -> jax.Array:
    """Reshape [reqs * query_len, q_heads, ...] to [reqs, kv_heads * row_tiles, rows, ...].

    TMA pads a single tile of rows with zeros; several tiles, or one of an odd size, are padded here.
    """
    tail, rows = x.shape[2:], shape.group * shape.query_len
    x = x.reshape(-1, shape.query_len, shape.kv_heads, shape.group, *tail)
    if shape.query_len > 1:
        x = jnp.swapaxes(x, 1, 2)
    x = x.reshape(x.shape[0], shape.kv_heads, rows, *tail)
    padding = shape.row_tiles * shape.rows - rows
    if padding:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *[(0, 0)] * len(tail)))
    return x.reshape(x.shape[0], shape.kv_heads * shape.row_tiles, shape.rows, *tail)


def from_rows(x: jax.Array, shape: DecodeShape) -> jax.Array:
    """Invert `to_rows`; tiles may have tile_q rows, and the first axis may be rows of the schedule."""
    tail, rows = x.shape[3:], shape.group * shape.query_len
    reqs = x.shape[0] * x.shape[1] // (shape.kv_heads * shape.row_tiles)
    x = x.reshape(reqs, shape.kv_heads, -1, *tail)[:, :, :rows]
    x = x.reshape(reqs, shape.kv_heads, shape.query_len, shape.group, *tail)
    if shape.query_len > 1:
        x = jnp.swapaxes(x, 1, 2)
    return x.reshape(reqs * shape.query_len, shape.kv_heads * shape.group, *tail)


def heads_to_rows(x: jax.Array | None, shape: DecodeShape) -> jax.Array | None:
    """Broadcast one number per head to [kv_heads * row_tiles, tile_q] f32, times log2(e)."""
    if x is None:
        return None
    x = jnp.broadcast_to(x.astype(jnp.float32)[None] * LOG2E, (shape.query_len, x.shape[0]))
    x = to_rows(x, shape)[0]
    return jnp.pad(x, ((0, 0), (0, shape.tile_q - shape.rows)))
