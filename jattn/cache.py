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
from pallas_kernels.checks import require, require_one_of, require_shape, unsupported

EIGHT_BIT = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


@pytree
class PagedCache:
    """Keys and values of one layer.

    Attributes:
        k: Keys: NHD [blocks, block_size, kv_heads, head_dim], HND [blocks, kv_heads, block_size, head_dim],
            or packed [blocks, kv_heads, head_dim / x, block_size, x].
        v: Values: as k, but packed [blocks, kv_heads, head_dim, block_size].
        k_scale: key = stored * k_scale: a scalar, [kv_heads], or [blocks, block_size, kv_heads] whatever the
            layout. None = 1.
        v_scale: The same for values.
        layout: "NHD", "HND" or "packed".
    """

    k: Shaped[Array, "..."] | np.ndarray
    v: Shaped[Array, "..."] | np.ndarray
    k_scale: Float[Array, "..."] | np.ndarray | None = None
    v_scale: Float[Array, "..."] | np.ndarray | None = None
    layout: str = static(default="NHD")

    def __post_init__(self) -> None:
        require_one_of("layout", self.layout, LAYOUTS)
        rank = 5 if self.layout == "packed" else 4
        require(
            self.k.ndim == rank, "k", f"have {rank} axes in the {self.layout} layout", f"shape {self.k.shape}"
        )
        require_shape("v", self.v.shape, self._value_shape(), f"as k {self.k.shape}, {self.layout}")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scale is not None:
                allowed = ((), (self.num_kv_heads,), (self.num_blocks, self.block_size, self.num_kv_heads))
                require_one_of(f"{name}'s shape", tuple(jnp.shape(scale)), allowed)

    def _value_shape(self) -> tuple[int, ...]:
        if self.layout != "packed":
            return self.k.shape
        blocks, heads, groups, size, x = self.k.shape
        return (blocks, heads, groups * x, size)

    @classmethod
    def create(cls, spec: CacheSpec) -> "PagedCache":
        """A cache of zeros; scales are ones."""
        scale = lambda: None if spec.scale_shape is None else jnp.ones(spec.scale_shape, jnp.float32)
        return cls(
            k=jnp.zeros(spec.key_shape, spec.storage_dtype),
            v=jnp.zeros(spec.value_shape, spec.storage_dtype),
            k_scale=scale(),
            v_scale=scale(),
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
    def dtype(self) -> np.dtype:
        """What keys and values are stored as."""
        return jnp.dtype(self.k.dtype)


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
    reason = support.why_not(platform=jax.default_backend()) or support.why_not_write(
        cache_dtype=cache.dtype,
        layout=cache.layout,
        kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        is_quantized=cache.dtype in EIGHT_BIT,
    )
    if implementation is not None:
        require_one_of("implementation", implementation, ("mosaic_gpu", "xla"))
        if implementation == "mosaic_gpu" and reason is not None:
            raise unsupported("write_kv", f"mosaic_gpu: {reason}", "Leave implementation=None")
    # HND rows are strided; their kernel is compiled and interpreted, but has not run on a GPU yet.
    is_proven = cache.layout == "NHD"
    use_kernel = reason is None and (implementation == "mosaic_gpu" or (implementation is None and is_proven))
    static_scales: tuple[Any, Any] = (None, None)
    if not _has_token_scales(cache):
        static_scales = (cache.k_scale, cache.v_scale)
        cache = replace(cache, k_scale=None, v_scale=None)
    written = _write_kv(cache, static_scales, key, value, slot_mapping, use_kernel=use_kernel)
    if static_scales != (None, None):
        written = replace(written, k_scale=static_scales[0], v_scale=static_scales[1])
    return written


def _has_token_scales(cache: PagedCache) -> bool:
    return cache.k_scale is not None and jnp.ndim(cache.k_scale) == 3


@functools.partial(jax.jit, donate_argnums=0, static_argnames="use_kernel")
def _write_kv(
    cache: PagedCache,
    static_scales: tuple[Any, Any],
    key: Array,
    value: Array,
    slot_mapping: Array,
    *,
    use_kernel: bool,
) -> PagedCache:
    block, offset = _block_and_offset(cache, slot_mapping)
    key, value = key[: block.shape[0]], value[: block.shape[0]]
    scales: dict[str, Array] = {}
    if _has_token_scales(cache):
        key, key_scale = quantize_token_head(key, cache.dtype)
        value, value_scale = quantize_token_head(value, cache.dtype)
        put = lambda array, new: _as_jax(array).at[block, offset].set(new.astype(array.dtype), mode="drop")
        scales = {"k_scale": put(cache.k_scale, key_scale), "v_scale": put(cache.v_scale, value_scale)}
    else:
        key, value = (_stored(x, s, cache.dtype) for x, s in zip((key, value), static_scales, strict=True))
    if use_kernel:
        k, v = (_as_jax(array) for array in (cache.k, cache.v))
        k, v = cache_write(key, value, k, v, slot_mapping, layout=cache.layout)
        return replace(cache, k=k, v=v)
    index: tuple[Any, ...] = {
        "NHD": (block, offset),
        "HND": (block, slice(None), offset),
        "packed": (block, slice(None), slice(None), offset),
    }[cache.layout]
    if cache.layout == "packed":
        key = key.reshape(*key.shape[:2], -1, cache.k.shape[-1])
    k = _as_jax(cache.k).at[index].set(key, mode="drop")
    v = _as_jax(cache.v).at[index].set(value, mode="drop")
    return replace(cache, k=k, v=v, **scales)


def _as_jax(array: Any) -> Array:
    """For the type checker: inside jit no array is numpy's."""
    return array


def _stored(values: Array, scale: Array | None, dtype: np.dtype) -> Array:
    if dtype in EIGHT_BIT:
        return quantize_static(
            values, jnp.ones((), jnp.float32) if scale is None else jnp.asarray(scale), dtype
        )
    if scale is not None:
        values = values.astype(jnp.float32) / jnp.asarray(scale, jnp.float32).reshape(1, -1, 1)
    return values.astype(dtype)


def _block_and_offset(cache: PagedCache, slots: Array) -> tuple[Array, Array]:
    """Slots < 0 become the block past the end, which `mode="drop"` skips; a negative index would wrap."""
    block = jnp.where(slots < 0, cache.num_blocks, slots // cache.block_size)
    return block, slots % cache.block_size


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
    moved = _copy_blocks([_block_arrays(cache) for cache in leaves], jnp.asarray(block_mapping, jnp.int32))
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
    theirs, ours = _block_arrays(source), _block_arrays(target)
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


def _block_arrays(cache: PagedCache) -> dict[str, Any]:
    """The arrays whose first axis is the block: what moves when a block moves."""
    arrays: dict[str, Any] = {"k": cache.k, "v": cache.v}
    if _has_token_scales(cache):
        arrays |= {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    return arrays
