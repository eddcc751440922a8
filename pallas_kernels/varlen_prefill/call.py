"""Arguments of a varlen_prefill call: their validation, and their conversion to inputs of the kernel."""

import dataclasses
import math

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
        query: Tokens of all requests one after the other, [tokens, q_heads, head_dim], optionally followed by
            padding. The last token of a request is at position `seq_len - 1`.
        key: With kv_start_loc packed keys [kv_tokens, kv_heads, head_dim]. With block_table a paged cache,
            NHD [blocks, block_size, kv_heads, head_dim] or HND [blocks, kv_heads, block_size, head_dim]. Keys
            and values that no query attends to may have any value, including NaN.
        value: Values, like `key`.
        query_start_loc: First token of each request and one past the last, [reqs + 1]; starts with 0.
        seq_lens: Number of keys of each request, [reqs]; at most max_blocks * block_size.
        kv_start_loc: Index of the first key of each request if keys are packed, [reqs]; else None.
        block_table: `block_table[r, i]` is the block of keys `i * block_size` onward of request r,
            [reqs, max_blocks]; None if keys are packed. Entries of blocks without visible keys are never
            used.
        layout: Layout of a paged cache: "NHD" or "HND".
        k_scale: Scale of an 8-bit cache, key = stored * k_scale: a scalar, [kv_heads], [kv_heads, head_dim],
            or per token and head [blocks, kv_heads, block_size]; None for 1.
        v_scale: Scale of the values, like `k_scale`.
        sinks: Attention sinks, f32 [q_heads]: an extra score per head without a value; or None.
        alibi_slopes: ALiBi slope of each head, f32 [q_heads], or None.
        lists: Tile lists for the call's schedule, or None for all KV tiles. Values in the tiles of the lists
            must be finite, even if the mask hides them. This does not apply to values after the request's
            last key, or outside of the window of all its queries.
        block_q: Queries per query block, if the tile lists distinguish query blocks. The queries of a block
            attend to the same keys of a tile, except for what `score` and `mask` hide.
        mask: Mask that applies to the partial tiles of the lists, or None. Static except for its arrays.
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
        """Validate shapes, dtypes and kernel support; schedules and sizes are checked separately.

        Raises:
            ValueError: If the arguments do not fit together.
            NotImplementedError: If there is no kernel for the dtypes, head_dim or block size.
        """
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
        reason = why_not_prefill(
            dtype=self.query.dtype,
            kv_dtype=self.query.dtype if self.is_quantized else self.key.dtype,
            head_dim=head_dim,
            block_size=self.block_size,
        )
        if self.is_quantized and reason is None:
            kv_dtypes = self.key.dtype, self.value.dtype
            reason = why_not_dequantize(kv_dtypes=kv_dtypes, head_dim=head_dim)
        if reason is not None:
            raise unsupported("varlen_prefill", reason, "Call jattn.attend with implementation='xla'")
        self._check_scales()
        if self.is_quantized and self.lists is not None:
            raise ValueError(
                f"lists (tile lists of a mask) require a 16-bit KV cache, but the cache has dtype "
                f"{self.key.dtype.name}. Dequantize the cache first."
            )

    def _check_scales(self) -> None:
        """Raise ValueError if scales are given for a 16-bit cache or have the wrong shape."""
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is None:
                continue
            require(self.is_quantized, name, f"be None with keys of {self.key.dtype.name}", jnp.shape(scale))
            blocks, block_size, kv_heads, head_dim = cache_dims(self.key, is_hnd=self.layout == "HND")
            shapes = ((), (kv_heads,), (kv_heads, head_dim), (blocks, kv_heads, block_size))
            require_one_of(f"{name}'s shape", tuple(jnp.shape(scale)), shapes)

    def _check_kv(self) -> None:
        """Raise ValueError unless keys are either packed or paged and all arrays have the right axes."""
        require_arrays(kv_start_loc=self.kv_start_loc, k_scale=self.k_scale, v_scale=self.v_scale)
        require_arrays(sinks=self.sinks, alibi_slopes=self.alibi_slopes)
        require_one_of("layout", self.layout, ("NHD", "HND"))
        num_locations = (self.kv_start_loc is not None) + (self.block_table is not None)
        if num_locations != 1:
            raise ValueError(
                "Pass either kv_start_loc (packed keys) or block_table (a paged cache), "
                f"got {num_locations} of them."
            )
        num_axes = 3 if self.block_table is None else 4
        require_axes(num_axes, key=self.key, value=self.value)
        require_axes(3, query=self.query)
        require_axes(1, query_start_loc=self.query_start_loc, seq_lens=self.seq_lens)
        if self.block_table is not None:
            require_axes(2, block_table=self.block_table)

    def default_sizes(self, score: Score) -> PrefillSizes:
        """Return the default tile sizes of the call."""
        num_tokens, q_heads, head_dim = self.query.shape
        reqs = self.seq_lens.shape[0]
        bounds = CallBounds(num_tokens, reqs, q_heads, self.kv_heads, self.max_kv).limited_by(score)
        may_split, has_lists = self.block_table is not None, self.lists is not None
        return default_sizes(
            head_dim,
            has_lists=has_lists,
            bounds=bounds if may_split else None,
            is_quantized=self.is_quantized,
        )

    def check_lists(self, sizes: PrefillSizes) -> None:
        """Raise ValueError if there is a mask without lists, or block_q is too small for the tile size."""
        has_lists = self.lists is not None
        if not has_lists and not (self.mask is None and self.block_q is None):
            raise ValueError(
                "mask and block_q require tile lists. Build them with make_tile_lists and pass them as lists."
            )
        if self.block_q is not None:
            num_blocks = num_query_blocks(sizes.tile_q, self.block_q)
            if num_blocks > MAX_QUERY_BLOCKS:
                raise ValueError(
                    f"block_q={self.block_q} splits a query tile of {sizes.tile_q} rows into {num_blocks} "
                    f"blocks, but at most {MAX_QUERY_BLOCKS} are supported. Use larger blocks."
                )

    def check_heads(self, sizes: PrefillSizes) -> None:
        """Raise ValueError if sizes.pack_gqa does not divide the group, or is combined with tile lists."""
        group, pack_gqa = self.query.shape[1] // self.kv_heads, sizes.pack_gqa
        require(group % pack_gqa == 0, "pack_gqa", f"divide the {group} query heads per KV head", pack_gqa)
        require(pack_gqa == 1 or self.lists is None, "pack_gqa", "be 1 with tile lists", pack_gqa)

    def check_quantized(self, sizes: PrefillSizes) -> None:
        """Raise ValueError if the sizes leave no warpgroups or shared memory to dequantize an 8-bit cache."""
        if self.is_quantized:
            max_tile_kv = QUANTIZED_TABLE[self.padded_dim].tile_kv
            for name, limit in (("warpgroups", 2), ("teams", 1), ("tile_kv", max_tile_kv)):
                value = getattr(sizes, name)
                require(value <= limit, name, f"be at most {limit} with an 8-bit KV cache", value)
            if sizes.shared_memory(self.padded_dim, is_quantized=True) > SHARED_MEMORY:
                raise ValueError(
                    f"stages={sizes.stages} leaves no shared memory for the tiles of an 8-bit KV cache. "
                    "Reduce stages or tile_kv."
                )

    def check_schedule(self, schedule: PrefillSchedule, score: Score, sizes: PrefillSizes) -> None:
        """Raise ValueError if a schedule or lists were built for other static arguments or shapes."""
        (num_tokens, q_heads, _), reqs, lists = self.query.shape, self.seq_lens.shape[0], self.lists
        require_shape("schedule.first_tiles", schedule.first_tiles.shape, (reqs + 1,), f"{reqs} requests")
        expected = schedule_key(
            num_tokens,
            score,
            sizes,
            q_heads,
            has_lists=lists is not None,
            is_packed=self.kv_start_loc is not None,
        )
        require_built_for("schedule", schedule.built_for, expected)
        if lists is not None:
            require_built_for("lists", lists.built_for, expected)
            rows = schedule.table.shape[0]
            meaning = f"{rows} query tiles, {q_heads} heads"
            require_shape("lists.table", lists.table.shape, (rows * q_heads, TABLE_WIDTH), meaning)
            require_shape("lists.entries", lists.entries.shape[:1], (rows * q_heads,), meaning)

    def make_schedule(self, score: Score, sizes: PrefillSizes) -> PrefillSchedule:
        """Build the schedule of the call."""
        seq_lens = self.seq_lens
        if self.block_table is not None:  # never read past the end of the table
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
        """Whether no query attends to any key, according to the shapes alone."""
        rows = self.seq_lens if self.block_table is None else self.block_table
        return 0 in (self.query.shape[0], *self.key.shape, *rows.shape)

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are in an 8-bit paged cache."""
        is_8_bit = 1 in (self.key.dtype.itemsize, self.value.dtype.itemsize)
        return is_8_bit and self.block_table is not None

    @property
    def quantized(self) -> QuantizedKV | None:
        """Storage of an 8-bit cache, or None for a 16-bit one."""
        if not self.is_quantized:
            return None

        def granularity(scale: jax.Array | None) -> str | None:
            return None if scale is None else ("head", "head", "channel", "token")[scale.ndim]

        dtypes = self.key.dtype, self.value.dtype
        return QuantizedKV(dtypes, (granularity(self.k_scale), granularity(self.v_scale)))

    @property
    def block_size(self) -> int | None:
        """Number of tokens per block of a paged cache, or None."""
        return None if self.block_table is None else cache_dims(self.key, is_hnd=self.layout == "HND")[1]

    @property
    def padded_dim(self) -> int:
        """Number of elements per head in shared memory."""
        return head_chunks(self.query.shape[2]).padded_dim

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        if self.block_table is None:
            return self.key.shape[1]
        return cache_dims(self.key, is_hnd=self.layout == "HND")[2]

    @property
    def kv_bytes(self) -> int:
        """Maximum bytes of one KV head's 16-bit keys and values, of all requests together."""
        kv_tokens = self.key.shape[0]
        if self.block_table is not None and self.block_size is not None:
            kv_tokens = min(kv_tokens, math.prod(self.block_table.shape)) * self.block_size
        return 4 * kv_tokens * self.key.shape[-1]

    @property
    def max_kv(self) -> int:
        """Maximum number of keys per request."""
        if self.block_table is None or self.block_size is None:
            return self.key.shape[0]
        return self.block_table.shape[1] * self.block_size

    def shape(self, sizes: PrefillSizes) -> PrefillShape:
        """Return the static dimensions of the call."""
        num_tokens, q_heads, head_dim = self.query.shape
        rows = max_tiles(num_tokens, self.seq_lens.shape[0], sizes.tile_tokens)
        head, cache_tiling = head_chunks(head_dim), None
        if self.block_size is not None:
            is_hnd = self.layout == "HND"
            cache_tiling = CacheTiling(
                block_size=self.block_size, tile_kv=sizes.tile_kv, is_hnd=is_hnd, head=head
            )
        return PrefillShape(
            q_heads=q_heads,
            group=q_heads // self.kv_heads,
            head=head,
            cache_tiling=cache_tiling,
            heads_per_l2_group=heads_per_l2_group(
                q_heads, self.kv_heads, kv_bytes=self.kv_bytes, rows=rows, sizes=sizes
            ),
            block_q=self.block_q,
        )

    def inputs(self, schedule: PrefillSchedule, spec: PrefillSpec) -> PrefillInputs:
        """Return the kernel's inputs."""
        cache_tiling, head = spec.shape.cache_tiling, spec.shape.head

        def kv_array(x: jax.Array) -> jax.Array:
            return head.split(_pad_tokens(x)) if cache_tiling is None else cache_tiling.tile_cache(x)

        def to_log2(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else x.astype(jnp.float32) * LOG2E

        return PrefillInputs(
            query=head.split(_pad_tokens(self.query)),
            kv=KvRefs(
                kv_array(self.key),
                kv_array(self.value),
                self.block_table,
                self._scales(self.k_scale, cache_tiling),
                self._scales(self.v_scale, cache_tiling),
            ),
            slopes=to_log2(self.alibi_slopes),
            sinks=to_log2(self.sinks),
            schedule=schedule_refs(schedule, self.lists),
            mask=() if self.mask is None else self.mask.arrays,
        )

    def _scales(self, scale: jax.Array | None, cache_tiling: CacheTiling | None) -> jax.Array | None:
        """Return the scales as f32: [kv_heads], per channel, or tiled per token (see KvRefs)."""
        if scale is None or cache_tiling is None:
            return None
        scale = scale.astype(jnp.float32)
        if scale.ndim == 3:
            return cache_tiling.tile_scales(scale)
        if scale.ndim == 2:
            return cache_tiling.tile_channel_scales(scale)
        return jnp.broadcast_to(scale, (self.kv_heads,))


def _pad_tokens(x: jax.Array) -> jax.Array:
    """Pad tokens to a multiple of 8, which TMA needs."""
    missing = -x.shape[0] % ALIGN
    return jnp.pad(x, ((0, missing), (0, 0), (0, 0))) if missing else copy_if_unaligned(x)
