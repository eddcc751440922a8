"""Arrays of keys and values: a paged cache in one of three layouts, or packed outside a cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jattn.cache.spec import LAYOUTS, CacheSpec, StorageFormat
from jattn.pytree import pytree, static
from pallas_kernels.architectures import is_concrete
from pallas_kernels.checks import require, require_int, require_one_of, require_shape
from pallas_kernels.varlen_prefill import ALIGN

type _Array = Shaped[Array, "..."] | np.ndarray
type _Scale = Float[Array, "..."] | np.ndarray


@pytree
class PagedCache:
    """Paged keys and values of one layer.

    Attributes:
        k: Keys: NHD [blocks, block_size, kv_heads, head_dim], HND [blocks, kv_heads, block_size, head_dim],
            or packed [blocks, kv_heads, head_dim / x, block_size, x].
        v: Values: same layout as k, except packed [blocks, kv_heads, head_dim, block_size]. May have another
            dtype.
        stored_k_scale: Scale of the keys, such that key = stored * scale: a scalar, [kv_heads], or [blocks,
            kv_heads, block_size], so that a head's scales of a block are contiguous for the kernels; None is
            1.
        stored_v_scale: Scale of the values, in the same shapes or [kv_heads, head_dim]; None is 1.
        layout: "NHD", "HND" or "packed".
    """

    k: _Array
    v: _Array
    stored_k_scale: _Scale | None = dataclasses.field(init=False)
    stored_v_scale: _Scale | None = dataclasses.field(init=False)
    layout: str = static()
    # Constructor arguments, which dataclasses.replace passes; the properties of the same names read them.
    k_scale: dataclasses.InitVar[_Scale | None] = None
    v_scale: dataclasses.InitVar[_Scale | None] = None

    def __init__(
        self,
        *,
        k: _Array,
        v: _Array,
        k_scale: _Scale | float | None = None,
        v_scale: _Scale | float | None = None,
        layout: str = "NHD",
    ) -> None:
        """Construct a cache from existing arrays.

        Args:
            k: Keys in the given layout.
            v: Values in the given layout.
            k_scale: Scale of the keys: None, a scalar, [kv_heads], or per token and head [blocks, block_size,
                kv_heads] in every layout.
            v_scale: Scale of the values: as k_scale, or per channel [kv_heads, head_dim].
            layout: "NHD", "HND" or "packed".

        Raises:
            ValueError: If shapes do not match, a scale is not real, or k or v are integers other than int8
                with a scale.
        """
        for name, value in (("k", k), ("v", v), ("layout", layout)):
            object.__setattr__(self, name, value)
        require_one_of("layout", layout, LAYOUTS)
        for name, value, scale in (("k", k, k_scale), ("v", v, v_scale)):
            _check_stored(name, value, scale)
        rank = 5 if layout == "packed" else 4
        require(k.ndim == rank, "k", f"have {rank} axes in the {layout} layout", f"shape {k.shape}")
        value_shape = k.shape
        if layout == "packed":
            blocks, heads, groups, size, x = k.shape
            value_shape = (blocks, heads, groups * x, size)
        require_shape("v", v.shape, value_shape, f"as k {k.shape}, {layout}")
        for name, scale in (("k", k_scale), ("v", v_scale)):
            if scale is not None:
                heads = self.num_kv_heads
                shapes = ((), (heads,), (self.num_blocks, self.block_size, heads))
                scale = _as_scale(f"{name}_scale", scale)
                allowed = (*shapes, (heads, self.head_dim)) if name == "v" else shapes
                require_one_of(f"{name}_scale's shape", tuple(jnp.shape(scale)), allowed)
                scale = _swap_token_and_head(scale)
            object.__setattr__(self, f"stored_{name}_scale", scale)

    @classmethod
    def create(
        cls, spec: CacheSpec, *, k_scale: _Scale | float | None = None, v_scale: _Scale | float | None = None
    ) -> "PagedCache":
        """Construct a cache of zeros.

        Args:
            spec: Sizes, layout and quantization of the cache.
            k_scale: Static scale of the keys, if the quantization has one; None is 1, vLLM's default for fp8.
            v_scale: Static scale of the values, if the quantization has one; None is 1, except for
                per-channel scales, which have no default (`jattn.calibrate` computes them).

        Raises:
            ValueError: If a scale is passed that the quantization does not have, has the wrong shape, or is
                not positive and finite, or if a required scale is missing.
        """
        require(isinstance(spec, CacheSpec), "spec", "be a CacheSpec", type(spec).__name__)
        scales = {
            name: _initial_scale(name, spec, storage, scale)
            for name, storage, scale in zip(
                ("k_scale", "v_scale"), spec.storage_formats, (k_scale, v_scale), strict=True
            )
        }
        return cls(
            k=jnp.zeros(spec.key_shape, spec.key_dtype),
            v=jnp.zeros(spec.value_shape, spec.value_dtype),
            **scales,
            layout=spec.layout,
        )

    @classmethod
    def create_on_host(cls, spec: CacheSpec) -> "PagedCache":
        """Construct a cache of zeros in numpy, to swap blocks out to; its static scales are unused."""
        k_scale, v_scale = (
            jnp.ones(storage.scale_shapes(spec)[0]) if storage.scale in ("static", "channel") else None
            for storage in spec.storage_formats
        )
        shapes = jax.eval_shape(lambda: cls.create(spec, k_scale=k_scale, v_scale=v_scale))
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        return self.k.shape[{"NHD": 1, "HND": 2, "packed": 3}[self.layout]]

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.k.shape[2 if self.layout == "NHD" else 1]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.v.shape[2] if self.layout == "packed" else self.v.shape[3]

    @property  # type: ignore[misc]
    def k_scale(self) -> Any:  # noqa: F811
        """Scale of the keys in the constructor's shape."""
        return _swap_token_and_head(self.stored_k_scale)

    @property  # type: ignore[misc]
    def v_scale(self) -> Any:  # noqa: F811
        """Scale of the values in the constructor's shape."""
        return _swap_token_and_head(self.stored_v_scale)


def _check_stored(name: str, array: Any, scale: Any) -> None:
    """Check that keys or values are floats, or int8 with a scale."""
    require(hasattr(array, "dtype") and hasattr(array, "ndim"), name, "be an array", type(array).__name__)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return
    rule = "hold floats or int8 (view vLLM's uint8 arrays as the fp8 dtype that they hold)"
    require(array.dtype == jnp.int8, name, rule, array.dtype)
    if scale is None:
        raise ValueError(f"{name} has dtype int8, which requires a scale. Pass {name}_scale.")


def _as_scale(name: str, scale: Any) -> Any:
    """Return a scale, converting lists to arrays; raise ValueError for bools and complex numbers."""
    scale = np.asarray(scale) if isinstance(scale, list | tuple) else scale
    dtype = getattr(scale, "dtype", None)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    is_array = dtype is not None and any(jnp.issubdtype(dtype, real) for real in (jnp.floating, jnp.integer))
    got = type(scale).__name__ if dtype is None else dtype
    require(is_number or is_array, name, "be an array of real numbers or one such number", got)
    return scale


def _initial_scale(
    name: str, spec: CacheSpec, storage: StorageFormat, scale: _Scale | float | None
) -> _Scale | None:
    """Return the initial `k_scale` or `v_scale` of a new cache."""
    shapes, context = storage.scale_shapes(spec), f"with quantization={spec.quantization!r}"
    if scale is None:
        if storage.scale == "channel":
            raise ValueError(
                f"quantization={spec.quantization!r} requires {name}. Compute it with "
                f"jattn.calibrate(model, prompts, quantization={spec.quantization!r}), or use 'int8_k_only' "
                "or 'int8_token_head', which need no scale."
            )
        return jnp.ones(shapes[0], jnp.float32) if shapes else None
    if storage.scale not in ("static", "channel"):
        raise ValueError(f"A cache {context} takes no static {name}. Omit {name}.")
    scale = _as_scale(name, scale)
    require_one_of(f"{name}'s shape {context}", tuple(jnp.shape(scale)), shapes)
    if not isinstance(scale, jax.core.Tracer):
        values = np.asarray(scale, np.float32)
        is_positive = bool((np.isfinite(values) & (values > 0)).all())
        require(is_positive, name, "be positive and finite", scale)
    return jnp.array(scale, jnp.float32)  # a copy, since donating the cache donates its scales


def _swap_token_and_head(scale: Any) -> Any:
    """Convert scales per token and head between the constructor's axis order and the stored one."""
    if not has_token_axis(scale):
        return scale
    return np.swapaxes(scale, 1, 2) if isinstance(scale, np.ndarray) else jnp.swapaxes(scale, 1, 2)


def has_token_axis(scale: Any) -> bool:
    """Return whether a scale has a token axis: one scale per token and head, computed when written."""
    return scale is not None and jnp.ndim(scale) == 3


@pytree
class PackedKV:
    """Keys and values outside a cache; the tokens of all requests are concatenated.

    For encoders, cross attention and training. Takes the place of a PagedCache in `attend`.

    Attributes:
        k: Keys, [kv_tokens, kv_heads, head_dim].
        v: Values, [kv_tokens, kv_heads, head_dim].
        kv_start_loc: Index of the first key of each row of the metadata, int [reqs]; row r has `seq_lens[r]`
            keys from there. `attend` refuses rows whose keys are out of range; inside jit this is not
            checked.
        is_in_order: Whether kv_start_loc begins with 0 and ascends, also for padding rows, and no two rows
            share a key (static). Required by the kernels that compute gradients. `attend` checks it, but not
            inside jit.
        is_aligned: Whether the queries and the keys of each row start at multiples of 8, and each row has as
            many queries as keys, as in a batch whose sequence length is a multiple of 8 (static). Masks of
            blocks then cost the kernels less. `attend` checks it, but not inside jit.
        max_seq_len: Maximum number of keys per row (static); None allows all keys in one row. With a mask the
            kernels build tile lists of this length for each row.
    """

    k: Float[Array, "kv_tokens kv_heads head_dim"]
    v: Float[Array, "kv_tokens kv_heads head_dim"]
    kv_start_loc: Int[Array, " reqs"]
    is_in_order: bool = static(default=False)
    is_aligned: bool = static(default=False)
    max_seq_len: int | None = static(default=None)

    def __post_init__(self) -> None:
        if self.max_seq_len is not None:
            require_int(max_seq_len=self.max_seq_len)
            require(self.max_seq_len >= 0, "max_seq_len", "be >= 0", self.max_seq_len)
        for name, axes in (("k", 3), ("v", 3), ("kv_start_loc", 1)):
            array: Any = getattr(self, name)
            require(hasattr(array, "dtype") and hasattr(array, "ndim"), name, "be an array", repr(array))
            require(array.ndim == axes, name, f"have {axes} axes", f"shape {array.shape}")
            dtype, numbers = (jnp.integer, "ints") if name == "kv_start_loc" else (jnp.floating, "floats")
            require(jnp.issubdtype(array.dtype, dtype), name, f"hold {numbers}", array.dtype)
        require_shape("v", self.v.shape, self.k.shape, "the shape of k")

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.k.shape[2]

    @property
    def max_keys_per_row(self) -> int:
        """Static bound of the number of keys per row."""
        num_keys = self.k.shape[0]
        return num_keys if self.max_seq_len is None else min(self.max_seq_len, num_keys)

    def check_rows(self, seq_lens: Any, query_lens: Any = None) -> None:
        """Check that each row's keys are in range and agree with the static fields; not if traced.

        Args:
            seq_lens: Number of keys per row.
            query_lens: Number of queries per row; rows without queries read no key. None: all rows have some.

        Raises:
            ValueError: If a row has more keys than max_seq_len, keys out of range, or is out of order.
        """
        if not is_concrete(seq_lens):
            return
        lens, num_keys = np.asarray(seq_lens, np.int64), self.k.shape[0]
        longest = int(np.max(lens, initial=0))
        if self.max_seq_len is not None:
            rule = f"be at least the longest row ({longest} keys)"
            require(longest <= self.max_seq_len, "cache.max_seq_len", rule, self.max_seq_len)
        if not is_concrete(self.kv_start_loc, query_lens):
            return
        firsts = np.asarray(self.kv_start_loc, np.int64)
        is_read = (lens > 0) if query_lens is None else (lens > 0) & (np.asarray(query_lens) > 0)
        for r in np.flatnonzero(is_read & ((firsts < 0) | (firsts + lens > num_keys)))[:1]:
            raise ValueError(
                f"cache.kv_start_loc[{r}]={firsts[r]} with seq_lens[{r}]={lens[r]} selects keys "
                f"[{firsts[r]}, {firsts[r] + lens[r]}), but cache.k has {num_keys} keys. Correct "
                "kv_start_loc or seq_lens."
            )
        if self.is_in_order and len(firsts):
            require(int(firsts[0]) == 0, "cache.kv_start_loc[0]", "be 0 with is_in_order", firsts[0])
            for r in np.flatnonzero(firsts[1:] < (firsts + lens)[:-1])[:1] + 1:
                rule = f"be at least {firsts[r - 1] + lens[r - 1]}, where row {r - 1} ends, with is_in_order"
                require(False, f"cache.kv_start_loc[{r}]", rule, firsts[r])

    def check_is_aligned(self, row_starts: Any, query_lens: Any, seq_lens: Any) -> None:
        """Check that rows are aligned if `is_aligned` says so; not if traced.

        Args:
            row_starts: Index of the first query of each row.
            query_lens: Number of queries per row.
            seq_lens: Number of keys per row.

        Raises:
            ValueError: If a row with queries is not aligned.
        """
        arrays = self.kv_start_loc, row_starts, query_lens, seq_lens
        if not self.is_aligned or not is_concrete(*arrays):
            return
        kv_starts, starts, counts, lens = map(np.asarray, arrays)
        rule = f"be a multiple of {ALIGN} with is_aligned"
        for r in np.flatnonzero(counts):
            require(bool(kv_starts[r] % ALIGN == 0), f"cache.kv_start_loc[{r}]", rule, kv_starts[r])
            require(bool(starts[r] % ALIGN == 0), f"the first query of row {r}", rule, starts[r])
            same = f"equal its number of keys ({lens[r]}) with is_aligned"
            require(bool(counts[r] == lens[r]), f"the number of queries of row {r}", same, counts[r])


def require_not_deleted(cache: PagedCache) -> None:
    """Check that no array of a cache was donated to an earlier call.

    Raises:
        ValueError: If one was.
    """
    for array in (cache.k, cache.v):
        if isinstance(array, jax.Array) and is_concrete(array) and array.is_deleted():
            raise ValueError(
                "The cache was donated to an earlier call, so that its arrays no longer exist. Use the cache "
                "that write_kv, or the jitted function to which it was donated, returned."
            )


def require_distinct_arrays(*caches: PagedCache) -> None:
    """Check that no array occurs twice in caches to be donated, since it cannot be donated twice; not in jit.

    Raises:
        ValueError: If an array occurs twice or was donated before.
    """
    for cache in caches:
        require_not_deleted(cache)
    all_arrays = (array for cache in caches for array in block_arrays(cache).values())
    arrays = [array for array in all_arrays if isinstance(array, jax.Array) and is_concrete(array)]
    if len({id(array) for array in arrays}) < len(arrays):
        raise ValueError(
            "The same array is used twice in the caches, but it can be donated only once. Copy it with "
            "jnp.copy."
        )


def block_arrays(cache: PagedCache) -> dict[str, Any]:
    """Return the arrays whose first axis is the block, by attribute name."""
    scales = {"stored_k_scale": cache.stored_k_scale, "stored_v_scale": cache.stored_v_scale}
    return {"k": cache.k, "v": cache.v} | {name: s for name, s in scales.items() if has_token_axis(s)}


def take_blocks(cache: PagedCache, ids: Int[Array, " *n"] | np.ndarray) -> tuple[Array, Array]:
    """Return keys and values of blocks as `blocks_of` does, without checking the arguments."""
    k, v = jnp.take(cache.k, ids, axis=0, mode="clip"), jnp.take(cache.v, ids, axis=0, mode="clip")
    if cache.layout == "HND":
        return jnp.moveaxis(k, -3, -2), jnp.moveaxis(v, -3, -2)
    if cache.layout == "packed":
        k = jnp.moveaxis(k, -2, -4)  # [..., block_size, kv_heads, head_dim / x, x]
        return k.reshape(*k.shape[:-2], cache.head_dim), jnp.moveaxis(v, -1, -3)
    return k, v


def take_tokens(
    cache: PagedCache, blocks: Int[Array, " n"], offsets: Int[Array, " n"]
) -> tuple[Shaped[Array, "n kv_heads head_dim"], Shaped[Array, "n kv_heads head_dim"]]:
    """Return the keys and values of single tokens, given by their blocks and their offsets in them."""
    k, v = jnp.asarray(cache.k), jnp.asarray(cache.v)
    if cache.layout == "HND":
        return k[blocks, :, offsets], v[blocks, :, offsets]
    if cache.layout == "packed":
        k = k[blocks, :, :, offsets]  # [n, kv_heads, head_dim / x, x]
        return k.reshape(*k.shape[:2], cache.head_dim), v[blocks, :, :, offsets]
    return k[blocks, offsets], v[blocks, offsets]
