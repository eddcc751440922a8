"""A call of varlen_prefill: whether it may be, its static sizes, and the kernel's inputs made of it."""

import dataclasses
import math
from typing import Any

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
from pallas_kernels.shared.head_dims import head_chunks
from pallas_kernels.shared.memory import copy_if_unaligned
from pallas_kernels.shared.paged_kv import CacheTiling, cache_dims
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.support import why_not_dequantize, why_not_prefill
from pallas_kernels.varlen_prefill.kernel_mask import KernelMask
from pallas_kernels.varlen_prefill.refs import KvRefs, PrefillInputs
from pallas_kernels.varlen_prefill.schedule import (
    ALIGN,
    TABLE_WIDTH,
    PrefillSchedule,
    heads_per_l2_group,
    make_schedule,
    max_tiles,
    schedule_key,
)
from pallas_kernels.varlen_prefill.sizes import (
    QUANTIZED_TABLE,
    SHARED_MEMORY,
    CallBounds,
    PrefillSizes,
    default_sizes,
)
from pallas_kernels.varlen_prefill.spec import PrefillShape, PrefillSpec, QuantizedKV
from pallas_kernels.varlen_prefill.tile_lists import PrefillTileLists, num_query_blocks, schedule_refs


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCall:
    """Arguments of varlen_prefill.

    Attributes:
        query: Tokens of all requests, one request after the other; behind the last there may be padding. The
            last token of a request stands at position `seq_len - 1`.
        key: With kv_start_loc: packed keys [kv_tokens, kv_heads, head_dim]. With block_table: a paged cache,
            NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim]. Keys
            and values that no query sees may be anything.
        value: As key.
        query_start_loc: First token of each request, and one past the last; starts with 0.
        seq_lens: Keys of each request, at most those that the table has room for.
        kv_start_loc: First key of each request in packed keys.
        block_table: `block_table[r, i]` holds keys `i * block_size` onward of request r. Entries of blocks
            that no query sees are never used.
        layout: "NHD" or "HND"; of a paged cache.
        k_scale: key = stored * k_scale, of keys in 8 bits: a scalar, [kv_heads], [kv_heads, head_dim], or
            per token and head [blocks, kv_heads, block_size]; None = 1.
        v_scale: The same for values.
        sinks: One more score of each head, without a value.
        alibi_slopes: Slope of each head.
        lists: make_lists' for the call's schedule: each head's tiles of keys. Of a listed tile, values must
            be finite from the first key that some query of the request sees by the score's numbers to the
            request's last, even where the mask hides them; the others may be anything.
        block_q: Queries of a block of queries, where the lists tell these apart: queries
            of one block see a tile's keys alike, but for what `score` and `mask` hide.
        mask: What queries see in tiles that are listed as seen in part; static but for its arrays. Only with
            lists.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    kv_start_loc: jax.Array | None
    block_table: jax.Array | None
    layout: str
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sinks: jax.Array | None
    alibi_slopes: jax.Array | None
    lists: PrefillTileLists | None
    block_q: int | None
    mask: KernelMask | None

    def check(self) -> None:
        """Raises what varlen_prefill raises, but for what tiles and schedules are given."""
        self._check_kv()
        (_, q_heads, head_dim), kv_heads = self.query.shape, self.kv_heads
        reqs, table = self.seq_lens.shape[0], self.block_table
        require_positive(kv_heads=kv_heads, q_heads=q_heads)
        require_shape("value", self.value.shape, self.key.shape, "as key")
        require_shape("key's head_dim", self.key.shape[-1:], (head_dim,), "as query")
        require_shape("query_start_loc", self.query_start_loc.shape, (reqs + 1,), "reqs + 1")
        if self.kv_start_loc is not None:
            require_shape("kv_start_loc", self.kv_start_loc.shape, (reqs,), "reqs")
        if table is not None:
            require_shape("block_table", table.shape, (reqs, table.shape[1]), "reqs, max_blocks")
        require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
        for name, per_head in (("sinks", self.sinks), ("alibi_slopes", self.alibi_slopes)):
            require_shape(name, (q_heads,) if per_head is None else per_head.shape, (q_heads,), "q_heads")
        how: dict[str, Any] = {
            "dtype": self.query.dtype,
            "head_dim": head_dim,
            "block_size": self.block_size,
        }
        reason = why_not_prefill(kv_dtype=self.query.dtype if self.is_narrow else self.key.dtype, **how)
        if self.is_narrow and reason is None:
            kv_dtypes = self.key.dtype, self.value.dtype
            reason = why_not_dequantize(kv_dtypes=kv_dtypes, head_dim=head_dim)
        if reason is not None:
            raise unsupported("varlen_prefill", reason, "Use another implementation")
        self._check_scales()
        require(self.lists is None or not self.is_narrow, "lists", "be None with keys of 8 bits", "some")

    def _check_scales(self) -> None:
        """Scales come with keys of 8 bits alone."""
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is None:
                continue
            require(self.is_narrow, name, f"be None with keys of {self.key.dtype.name}", jnp.shape(scale))
            blocks, block_size, kv_heads, head_dim = cache_dims(self.key, is_hnd=self.layout == "HND")
            shapes = ((), (kv_heads,), (kv_heads, head_dim), (blocks, kv_heads, block_size))
            require_one_of(f"{name}'s shape", tuple(jnp.shape(scale)), shapes)

    def _check_kv(self) -> None:
        """Where keys are, and how many axes arrays have."""
        require_arrays(kv_start_loc=self.kv_start_loc, k_scale=self.k_scale, v_scale=self.v_scale)
        require_arrays(sinks=self.sinks, alibi_slopes=self.alibi_slopes)
        require_one_of("layout", self.layout, ("NHD", "HND"))
        given = (self.kv_start_loc is not None) + (self.block_table is not None)
        require(given == 1, "kv_start_loc or block_table", "be given, and not both", given)
        num_axes = 3 if self.block_table is None else 4
        require_axes(num_axes, key=self.key, value=self.value)
        require_axes(3, query=self.query)
        require_axes(1, query_start_loc=self.query_start_loc, seq_lens=self.seq_lens)
        if self.block_table is not None:
            require_axes(2, block_table=self.block_table)

    def default_sizes(self, score: Score) -> PrefillSizes:
        """What is chosen where neither the caller nor a schedule of its own names any."""
        num_tokens, q_heads, head_dim = self.query.shape
        reqs = self.seq_lens.shape[0]
        bounds = CallBounds(num_tokens, reqs, q_heads, self.kv_heads, self.max_kv).limited_by(score)
        may_cut, has_lists = self.block_table is not None, self.lists is not None
        return default_sizes(
            head_dim, has_lists=has_lists, bounds=bounds if may_cut else None, widens=self.is_narrow
        )

    def check_lists(self, sizes: PrefillSizes) -> None:
        """Refuses what lists are needed for without them, and blocks of queries too small for their bits."""
        has_lists = self.lists is not None
        require(
            has_lists or (self.mask is None and self.block_q is None), "lists", "be given with a mask", None
        )
        if self.block_q is not None:
            touched = num_query_blocks(sizes.tile_q, self.block_q)
            rule = f"cut {sizes.tile_q} queries into {MAX_QUERY_BLOCKS} at most"
            require(touched <= MAX_QUERY_BLOCKS, "block_q", rule, self.block_q)

    def check_heads(self, sizes: PrefillSizes) -> None:
        """Refuses tiles that heads of different kv heads would share, and shared ones with lists."""
        group, together = self.query.shape[1] // self.kv_heads, sizes.pack_gqa
        require(group % together == 0, "pack_gqa", f"divide {group} query heads of a kv head", together)
        require(together == 1 or self.lists is None, "pack_gqa", "be 1 with lists", together)

    def check_widening(self, sizes: PrefillSizes) -> None:
        """Refuses sizes with which keys of 8 bits leave no warpgroups, or no memory, to widen them."""
        if self.is_narrow:
            max_visible_keys = QUANTIZED_TABLE[self.padded_dim].tile_kv
            for name, most in (("warpgroups", 2), ("teams", 1), ("tile_kv", max_visible_keys)):
                value = getattr(sizes, name)
                require(value <= most, name, f"be at most {most} with keys of 8 bits", value)
            fits = sizes.shared_memory(self.padded_dim, is_narrow=True) <= SHARED_MEMORY
            require(fits, "stages", "leave room for keys of 8 bits in shared memory", sizes.stages)

    def check_schedule(self, schedule: PrefillSchedule, score: Score, sizes: PrefillSizes) -> None:
        """Refuses a schedule made for other tokens, requests, masks, heads or tiles."""
        (num_tokens, q_heads, _), reqs, lists = self.query.shape, self.seq_lens.shape[0], self.lists
        require_shape("schedule.first_tiles", schedule.first_tiles.shape, (reqs + 1,), f"{reqs} requests")
        how = {"has_lists": lists is not None, "is_packed": self.kv_start_loc is not None}
        wanted = schedule_key(num_tokens, score, sizes, q_heads, **how)
        require_built_for("schedule", schedule.built_for, wanted)
        if lists is not None:
            require_built_for("lists", lists.built_for, wanted)
            rows = schedule.table.shape[0]
            what = f"{rows} tiles of queries, {q_heads} heads"
            require_shape("lists.table", lists.table.shape, (rows * q_heads, TABLE_WIDTH), what)
            require_shape("lists.entries", lists.entries.shape[:1], (rows * q_heads,), what)

    def make_schedule(self, score: Score, sizes: PrefillSizes) -> PrefillSchedule:
        """Its own."""
        seq_lens = self.seq_lens
        if self.block_table is not None:  # no table is read behind its end
            seq_lens = jnp.minimum(seq_lens.astype(jnp.int32), self.max_kv)
        return make_schedule(
            self.query_start_loc,
            seq_lens,
            self.kv_start_loc,
            num_tokens=self.query.shape[0],
            score=score,
            sizes=sizes,
            q_heads=self.query.shape[1],
            has_lists=self.lists is not None,
        )

    @property
    def is_empty(self) -> bool:
        """Nobody sees a key, as shapes tell."""
        rows = self.seq_lens if self.block_table is None else self.block_table
        return 0 in (self.query.shape[0], *self.key.shape, *rows.shape)

    @property
    def is_narrow(self) -> bool:
        """Keys or values of a paged cache have 8 bits."""
        is_narrow = 1 in (self.key.dtype.itemsize, self.value.dtype.itemsize)
        return is_narrow and self.block_table is not None

    @property
    def narrow(self) -> QuantizedKV | None:
        """How they are stored, if so."""
        if not self.is_narrow:
            return None
        kind = lambda scale: None if scale is None else ("head", "head", "channel", "token")[scale.ndim]
        return QuantizedKV((self.key.dtype, self.value.dtype), (kind(self.k_scale), kind(self.v_scale)))

    @property
    def block_size(self) -> int | None:
        """Of a paged cache, else None."""
        return None if self.block_table is None else cache_dims(self.key, is_hnd=self.layout == "HND")[1]

    @property
    def padded_dim(self) -> int:
        """Elements of a head in shared memory."""
        return head_chunks(self.query.shape[2]).padded_dim

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        if self.block_table is None:
            return self.key.shape[1]
        return cache_dims(self.key, is_hnd=self.layout == "HND")[2]

    @property
    def kv_bytes(self) -> int:
        """Of a kv head's keys and values in 16 bits, of all requests together, at most."""
        kv_tokens = self.key.shape[0]
        if self.block_table is not None and self.block_size is not None:
            kv_tokens = min(kv_tokens, math.prod(self.block_table.shape)) * self.block_size
        return 4 * kv_tokens * self.key.shape[-1]

    @property
    def max_kv(self) -> int:
        """Keys of a request, at most."""
        if self.block_table is None or self.block_size is None:
            return self.key.shape[0]
        return self.block_table.shape[1] * self.block_size

    def shape(self, sizes: PrefillSizes) -> PrefillShape:
        """Static sizes."""
        num_tokens, q_heads, head_dim = self.query.shape
        rows = max_tiles(num_tokens, self.seq_lens.shape[0], sizes.tile_tokens)
        cut, in_cache = head_chunks(head_dim), None
        if self.block_size is not None:
            is_hnd = self.layout == "HND"
            in_cache = CacheTiling(block_size=self.block_size, tile_kv=sizes.tile_kv, is_hnd=is_hnd, head=cut)
        return PrefillShape(
            q_heads=q_heads,
            group=q_heads // self.kv_heads,
            cut=cut,
            in_cache=in_cache,
            heads_at_once=heads_per_l2_group(
                q_heads, self.kv_heads, kv_bytes=self.kv_bytes, rows=rows, sizes=sizes
            ),
            block_q=self.block_q,
        )

    def inputs(self, schedule: PrefillSchedule, spec: PrefillSpec) -> PrefillInputs:
        """The kernel's."""
        in_cache, cut = spec.shape.in_cache, spec.shape.cut
        as_copied = lambda x: cut.split(_whole_rows(x)) if in_cache is None else in_cache.tile_cache(x)
        in_log2 = lambda x: None if x is None else x.astype(jnp.float32) * LOG2E
        return PrefillInputs(
            query=cut.split(_whole_rows(self.query)),
            cache=KvRefs(
                as_copied(self.key),
                as_copied(self.value),
                self.block_table,
                self._scales(self.k_scale, in_cache),
                self._scales(self.v_scale, in_cache),
            ),
            slopes=in_log2(self.alibi_slopes),
            sinks=in_log2(self.sinks),
            schedule=schedule_refs(schedule, self.lists),
            mask=() if self.mask is None else self.mask.arrays,
        )

    def _scales(self, scale: jax.Array | None, in_cache: CacheTiling | None) -> jax.Array | None:
        """As CacheRefs has them."""
        if scale is None or in_cache is None:
            return None
        scale = scale.astype(jnp.float32)
        if scale.ndim == 3:
            return in_cache.tile_scales(scale)
        if scale.ndim == 2:
            return in_cache.tile_channel_scales(scale)
        return jnp.broadcast_to(scale, (self.kv_heads,))


def _whole_rows(x: jax.Array) -> jax.Array:
    """Tokens padded to what TMA takes."""
    missing = -x.shape[0] % ALIGN
    return jnp.pad(x, ((0, missing), (0, 0), (0, 0))) if missing else copy_if_unaligned(x)
