"""The paged KV cache: blocks of keys and values in one of three layouts, written in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jattn.pytree import pytree, replace, static
from jattn.quantize import quantize_static, quantize_token_head
from jattn.spec import LAYOUTS, CacheSpec
from pallas_kernels import support
from pallas_kernels.cache_write import cache_write
from pallas_kernels.checks import require, require_one_of, require_shape

EIGHT_BIT = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)

type _Array = Shaped[Array, "..."] | np.ndarray
type _Scale = Float[Array, "..."] | np.ndarray


@pytree
class PagedCache:
    """Keys and values of one layer.

    Attributes:
        k: Keys: NHD [blocks, block_size, kv_heads, head_dim], HND [blocks, kv_heads, block_size, head_dim],
            or packed [blocks, kv_heads, head_dim / x, block_size, x].
        v: Values: as k, but packed [blocks, kv_heads, head_dim, block_size]. May be of another dtype.
        stored_k_scale: key = stored * scale: a scalar, [kv_heads], or [blocks, kv_heads, block_size], so that
            a head's scales of a block are one piece of memory for the kernels; None = 1.
        stored_v_scale: The same for values, or [kv_heads, head_dim].
        layout: "NHD", "HND" or "packed".
    """

    k: _Array
    v: _Array
    stored_k_scale: _Scale | None
    stored_v_scale: _Scale | None
    layout: str = static()

    def __init__(
        self,
        *,
        k: _Array,
        v: _Array,
        k_scale: _Scale | None = None,
        v_scale: _Scale | None = None,
        layout: str = "NHD",
    ) -> None:
        """A cache of arrays that exist.

        Args:
            k: As the attribute.
            v: As the attribute.
            k_scale: None, a scalar, [kv_heads], or per token and head [blocks, block_size, kv_heads] in every
                layout.
            v_scale: As k_scale, or per channel [kv_heads, head_dim].
            layout: As the attribute.

        Raises:
            ValueError: Shapes disagree.
        """
        for name, value in (("k", k), ("v", v), ("layout", layout)):
            object.__setattr__(self, name, value)
        require_one_of("layout", layout, LAYOUTS)
        rank = 5 if layout == "packed" else 4
        require(k.ndim == rank, "k", f"have {rank} axes in the {layout} layout", f"shape {k.shape}")
        require_shape("v", v.shape, self._value_shape(), f"as k {k.shape}, {layout}")
        heads = self.num_kv_heads
        shapes = ((), (heads,), (self.num_blocks, self.block_size, heads))
        for name, scale in (("k", k_scale), ("v", v_scale)):
            if scale is not None:
                allowed = (*shapes, (heads, self.head_dim)) if name == "v" else shapes
                require_one_of(f"{name}_scale's shape", tuple(jnp.shape(scale)), allowed)
            object.__setattr__(self, f"stored_{name}_scale", _swap_token_and_head(scale))

    def _value_shape(self) -> tuple[int, ...]:
        if self.layout != "packed":
            return self.k.shape
        blocks, heads, groups, size, x = self.k.shape
        return (blocks, heads, groups * x, size)

    @classmethod
    def create(
        cls, spec: CacheSpec, *, k_scale: _Scale | None = None, v_scale: _Scale | None = None
    ) -> "PagedCache":
        """A cache of zeros.

        Args:
            spec: Its sizes.
            k_scale: The static scale of a quantisation that has one; None = ones.
            v_scale: The same of values.

        Raises:
            ValueError: The quantisation has no static scale, or one of another shape.
        """
        scales = {}
        for name, stored, scale in zip(("k_scale", "v_scale"), spec.stored, (k_scale, v_scale), strict=True):
            shapes = stored.scale_shapes(spec)
            if scale is not None:
                kind = f"with quantization={spec.quantization!r}"
                require(stored.scale in ("static", "channel"), name, f"be None {kind}", "a static scale")
                require_one_of(f"{name}'s shape {kind}", tuple(jnp.shape(scale)), shapes)
                scale = jnp.asarray(scale, jnp.float32)
            elif shapes:
                scale = jnp.ones(shapes[0], jnp.float32)
            scales[name] = scale
        return cls(
            k=jnp.zeros(spec.key_shape, spec.key_dtype),
            v=jnp.zeros(spec.value_shape, spec.value_dtype),
            **scales,
            layout=spec.layout,
        )

    @classmethod
    def create_on_host(cls, spec: CacheSpec) -> "PagedCache":
        """The same in numpy: a place to swap blocks out to."""
        shapes = jax.eval_shape(lambda: cls.create(spec))
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.k.shape[{"NHD": 1, "HND": 2, "packed": 3}[self.layout]]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.k.shape[2 if self.layout == "NHD" else 1]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.v.shape[2] if self.layout == "packed" else self.v.shape[3]

    @property
    def k_scale(self) -> Any:
        """The keys' scale as the constructor takes it."""
        return _swap_token_and_head(self.stored_k_scale)

    @property
    def v_scale(self) -> Any:
        """The values' scale as the constructor takes it."""
        return _swap_token_and_head(self.stored_v_scale)


def _swap_token_and_head(scale: Any) -> Any:
    """Scales per token and head from the constructor's order to the stored one, or back."""
    if not has_token_axis(scale):
        return scale
    return np.swapaxes(scale, 1, 2) if isinstance(scale, np.ndarray) else jnp.swapaxes(scale, 1, 2)


def has_token_axis(scale: Any) -> bool:
    """Whether a stored scale is one per token and head, made when written; the others are static."""
    return scale is not None and jnp.ndim(scale) == 3


@pytree
class PackedKV:
    """Keys and values that are not in a cache: those of every request one after the other.

    For encoders, cross attention, and prompts attended to as they are. Stands in for a PagedCache in attend.

    Attributes:
        k: [kv_tokens, kv_heads, head_dim]
        v: [kv_tokens, kv_heads, head_dim]
        kv_start_loc: First key of each row of the metadata; row r has `seq_lens[r]` keys from there.
    """

    k: Float[Array, "kv_tokens kv_heads head_dim"]
    v: Float[Array, "kv_tokens kv_heads head_dim"]
    kv_start_loc: Int[Array, " reqs"]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.k.shape[2]


# ------------------------------------------------------------------------------------------ reading
def blocks_of(cache: PagedCache, ids: Int[Array, " *n"]) -> tuple[Array, Array]:
    """Keys and values of some blocks, whatever the layout: each [*n, block_size, kv_heads, head_dim]."""
    k, v = (jnp.take(array, ids, axis=0, mode="clip") for array in (cache.k, cache.v))
    if cache.layout == "HND":
        return jnp.moveaxis(k, -3, -2), jnp.moveaxis(v, -3, -2)
    if cache.layout == "packed":
        k = jnp.moveaxis(k, -2, -4)  # [..., block_size, kv_heads, head_dim / x, x]
        return k.reshape(*k.shape[:-2], cache.head_dim), jnp.moveaxis(v, -1, -3)
    return k, v


# ------------------------------------------------------------------------------------------ writing
def write_kv(
    cache: PagedCache,
    key: Float[Array, "kv_tokens kv_heads head_dim"],
    value: Float[Array, "kv_tokens kv_heads head_dim"],
    slot_mapping: Int[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> PagedCache:
    """Writes new keys and values into their slots. The given cache is donated: use the one returned.

    An 8-bit cache is quantised on the way: with its static scales, or, where it has scales per token and
    head, with new ones that are written too.

    Args:
        cache: What to write into.
        key: Keys of the step's tokens; may be padded longer than slot_mapping.
        value: Values, as key.
        slot_mapping: `block * block_size + offset` of each token; slots < 0 are not written.
        implementation: "mosaic_gpu" or "xla"; None = the best that this machine and this cache allow.

    Raises:
        ValueError: Shapes disagree.
        NotImplementedError: The implementation asked for cannot write here; the message says why.

    Source: vLLM `reshape_and_cache`, `reshape_and_cache_flash`.
    """
    tokens = slot_mapping.shape[0]
    require(key.shape[0] >= tokens, "key", f"have a token for each slot ({tokens})", f"shape {key.shape}")
    require_shape("key", key.shape[1:], (cache.num_kv_heads, cache.head_dim), "kv_heads, head_dim")
    require_shape("value", value.shape, key.shape, "as key")
    for name, array, scale in (("k", cache.k, cache.stored_k_scale), ("v", cache.v, cache.stored_v_scale)):
        is_writable = array.dtype in EIGHT_BIT or not has_token_axis(scale)
        require(is_writable, f"{name}_scale", f"have no axis of tokens to write {array.dtype}", "one")
    reason = support.why_not_on(cache.k) or _why_not_write(cache, key.dtype)
    use_kernel = support.takes_kernel("write_kv", implementation, reason)
    written = _write_kv(
        block_arrays(cache), _static_scales(cache), key, value, slot_mapping, cache.layout, use_kernel
    )
    return replace(cache, **written)


def _why_not_write(cache: PagedCache, dtype: np.dtype) -> str | None:
    """Why cache_write does not serve; what is no 8-bit cache gets its rows in its own dtype."""
    is_rounded = cache.k.dtype in EIGHT_BIT or cache.v.dtype in EIGHT_BIT
    ndim = lambda scale: None if scale is None or not is_rounded else jnp.ndim(scale)
    return support.why_not_write(
        dtype=dtype if is_rounded else cache.k.dtype,
        k_dtype=cache.k.dtype,
        v_dtype=cache.v.dtype,
        k_scale_ndim=ndim(cache.stored_k_scale),
        v_scale_ndim=ndim(cache.stored_v_scale),
        layout=cache.layout,
        kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
    )


def _static_scales(cache: PagedCache) -> tuple[Any, Any]:
    """Scales that writing reads and does not change; not donated, since both may be one array."""
    k_scale, v_scale = (
        None if has_token_axis(s) else s for s in (cache.stored_k_scale, cache.stored_v_scale)
    )
    return k_scale, v_scale


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(5, 6))
def _write_kv(
    arrays: dict[str, Array],
    static_scales: tuple[Any, Any],
    key: Array,
    value: Array,
    slots: Array,
    layout: str,
    use_kernel: bool,
) -> dict[str, Array]:
    """The arrays of block_arrays, written."""
    key, value = key[: slots.shape[0]], value[: slots.shape[0]]
    is_rounded = any(arrays[name].dtype in EIGHT_BIT for name in ("k", "v"))
    if use_kernel and is_rounded:
        return _write_rounded(arrays, static_scales, key, value, slots, layout)
    new, scales = {}, {}
    for name, rows, scale in zip(("k", "v"), (key, value), static_scales, strict=True):
        if f"stored_{name}_scale" in arrays:
            new[name], scales[f"stored_{name}_scale"] = quantize_token_head(rows, arrays[name].dtype)
        else:
            new[name] = quantize_static(rows, scale, arrays[name].dtype)
    if use_kernel:
        k, v, *_ = cache_write(new["k"], new["v"], arrays["k"], arrays["v"], slots, layout=layout)
        return {"k": k, "v": v}
    num_blocks, block_size = (
        arrays["v"].shape[0],
        arrays["v"].shape[{"NHD": 1, "HND": 2, "packed": 3}[layout]],
    )
    # A negative slot becomes the block past the end, which `mode="drop"` skips; a negative index would wrap.
    block, offset = jnp.where(slots < 0, num_blocks, slots // block_size), slots % block_size
    index: tuple[Any, ...] = {
        "NHD": (block, offset),
        "HND": (block, slice(None), offset),
        "packed": (block, slice(None), slice(None), offset),
    }[layout]
    if layout == "packed":
        new["k"] = new["k"].reshape(*key.shape[:2], -1, arrays["k"].shape[-1])
    put = lambda array, index, rows: array.at[index].set(rows, mode="drop")
    written = {name: put(arrays[name], index, rows) for name, rows in new.items()}
    by_head = (block, slice(None), offset)
    return written | {name: put(arrays[name], by_head, rows) for name, rows in scales.items()}


def _write_rounded(
    arrays: dict[str, Array],
    static_scales: tuple[Any, Any],
    key: Array,
    value: Array,
    slots: Array,
    layout: str,
) -> dict[str, Array]:
    """By the kernel that rounds on the way."""
    names = ("k", "v", "stored_k_scale", "stored_v_scale")
    scales = [
        arrays[name] if name in arrays else None if static is None else jnp.asarray(static, jnp.float32)
        for name, static in zip(names[2:], static_scales, strict=True)
    ]
    written = cache_write(
        key,
        value,
        arrays["k"],
        arrays["v"],
        slots,
        k_scale=scales[0],
        v_scale=scales[1],
        layout=layout,
    )
    return {name: _as_jax(array) for name, array in zip(names, written, strict=True) if name in arrays}


def _as_jax(array: Any) -> Array:
    """For the type checker: inside jit no array is numpy's."""
    return array


def reshape_and_cache(
    key: Float[Array, "kv_tokens kv_heads head_dim"],
    value: Float[Array, "kv_tokens kv_heads head_dim"],
    key_cache: Shaped[Array, "blocks kv_heads packs block_size x"],
    value_cache: Shaped[Array, "blocks kv_heads head_dim block_size"],
    slot_mapping: Int[Array, " tokens"],
    k_scale: Float[Array, ""] | float | None = None,
    v_scale: Float[Array, ""] | float | None = None,
) -> tuple[Array, Array]:
    """write_kv over vLLM's packed arrays: returns them written; those given are donated.

    Source: vLLM `reshape_and_cache`; the cache's dtype says what kv_cache_dtype said there.
    """
    as_scale = lambda scale: None if scale is None else jnp.asarray(scale, jnp.float32)
    cache = PagedCache(
        k=key_cache, v=value_cache, k_scale=as_scale(k_scale), v_scale=as_scale(v_scale), layout="packed"
    )
    cache = write_kv(cache, key, value, slot_mapping)
    return _as_jax(cache.k), _as_jax(cache.v)


# ------------------------------------------------------------------------------------------- moving
def copy_blocks[Caches](caches: Caches, block_mapping: Int[Array, "pairs 2"] | np.ndarray) -> Caches:
    """Copies block `src` onto block `dst` for every pair (src, dst), in every cache. The caches are donated.

    All sources are read before any destination is written, so chains see the old blocks. Pairs with a
    negative number are skipped: pad with them to keep the number of compiled shapes small.

    Args:
        caches: A PagedCache or any tree of them, e.g. one a layer.
        block_mapping: int [pairs, 2].

    Source: vLLM `copy_blocks`.
    """
    leaves, tree = jax.tree.flatten(caches, is_leaf=lambda node: isinstance(node, PagedCache))
    moved = _copy_blocks([block_arrays(cache) for cache in leaves], jnp.asarray(block_mapping, jnp.int32))
    return jax.tree.unflatten(tree, [replace(c, **arrays) for c, arrays in zip(leaves, moved, strict=True)])


@functools.partial(jax.jit, donate_argnums=0)
def _copy_blocks(arrays: list[dict[str, Array]], block_mapping: Array) -> list[dict[str, Array]]:
    source, target = block_mapping[:, 0], block_mapping[:, 1]
    return jax.tree.map(
        lambda a: _put_blocks(a, jnp.take(a, source, axis=0, mode="clip"), source, target), arrays
    )


def _put_blocks(array: Array, blocks: Array, source: Array, target: Array) -> Array:
    skipped = (source < 0) | (target < 0)
    return array.at[jnp.where(skipped, array.shape[0], target)].set(blocks, mode="drop")


def swap_blocks(
    source: PagedCache, target: PagedCache, block_mapping: Int[Array, "pairs 2"] | np.ndarray
) -> PagedCache:
    """Copies blocks from one cache to another: device to device, device to host, or host to device.

    A cache lives on the host if its arrays are numpy's (`PagedCache.create_on_host`). The target is donated:
    a device target is written in place by XLA, a host target by numpy. Not for use inside jit.

    Args:
        source: Where blocks come from; unchanged.
        target: Where they go.
        block_mapping: int [pairs, 2] of (source block, target block); pairs with a negative number are
            skipped.

    Returns:
        The target, written.

    Raises:
        ValueError: The caches differ in layout or in the shape of a block, or a number is past the end.

    Source: vLLM `swap_blocks`.
    """
    require(
        source.layout == target.layout, "target.layout", f"be the source's ({source.layout})", target.layout
    )
    theirs, ours = block_arrays(source), block_arrays(target)
    require(
        theirs.keys() == ours.keys(), "target", f"have the source's arrays ({sorted(theirs)})", sorted(ours)
    )
    for name in ours:
        require_shape(
            f"a block of target.{name}", ours[name].shape[1:], theirs[name].shape[1:], "as the source's"
        )
    pairs = np.asarray(block_mapping)
    pairs = pairs[(pairs >= 0).all(axis=1)]
    for column, cache in ((0, source), (1, target)):
        past = pairs[pairs[:, column] >= cache.num_blocks]
        require(
            past.size == 0,
            "block_mapping",
            f"stay below {cache.num_blocks} in column {column}",
            past.tolist(),
        )
    # A power of two of pairs, so that a serving loop compiles a handful of shapes.
    padded = np.full((1 << max(len(pairs) - 1, 0).bit_length(), 2), -1, np.int32)
    padded[: len(pairs)] = pairs
    if isinstance(target.k, np.ndarray):
        gathered = jax.device_get(
            {
                name: np.take(a, pairs[:, 0], axis=0)
                if isinstance(a, np.ndarray)
                else _gather(a, padded[:, 0])
                for name, a in theirs.items()
            }
        )
        for name, array in ours.items():
            array[pairs[:, 1]] = gathered[name][: len(pairs)]
        return target
    if isinstance(source.k, np.ndarray):
        blocks = {name: np.take(array, padded[:, 0], axis=0, mode="clip") for name, array in theirs.items()}
    else:
        blocks = {name: _gather(array, padded[:, 0]) for name, array in theirs.items()}
    return replace(target, **_scatter(ours, blocks, padded))


@jax.jit
def _gather(array: Array, ids: Array) -> Array:
    return jnp.take(array, ids, axis=0, mode="clip")


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(arrays: dict[str, Array], blocks: dict[str, Array], pairs: Array) -> dict[str, Array]:
    return {name: _put_blocks(a, blocks[name], pairs[:, 0], pairs[:, 1]) for name, a in arrays.items()}


def block_arrays(cache: PagedCache) -> dict[str, Any]:
    """The arrays whose first axis is the block, by their attribute's name: what moves when a block moves."""
    scales = {"stored_k_scale": cache.stored_k_scale, "stored_v_scale": cache.stored_v_scale}
    return {"k": cache.k, "v": cache.v} | {name: s for name, s in scales.items() if has_token_axis(s)}
