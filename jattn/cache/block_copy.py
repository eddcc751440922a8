"""Copies of blocks within a cache, between caches, and between device and host."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.cache.types import PagedCache, block_arrays, require_distinct_arrays
from jattn.pytree import replace
from pallas_kernels.checks import require, require_int32s, require_shape


def copy_blocks[Caches](caches: Caches, block_mapping: Int[Array, "pairs 2"] | np.ndarray) -> Caches:
    """Copy block `src` to block `dst` for every pair (src, dst), in every cache. The caches are donated.

    All sources are read before any destination is written, so chained copies read the old blocks. Pairs with
    a negative id are skipped: pad with them to keep the number of compiled shapes small.

    Args:
        caches: A PagedCache or any pytree of them, for example one per layer.
        block_mapping: Pairs (source block, destination block), int [pairs, 2]. Ids on the host are checked;
            on the device, ids past the end are skipped or read the last block.

    Raises:
        ValueError: If a leaf is not a PagedCache, block_mapping does not hold pairs of ints, an id on the
            host is out of range, or two pairs have the same destination.

    Source: vLLM `copy_blocks`.
    """
    leaves, tree = jax.tree.flatten(caches, is_leaf=lambda node: isinstance(node, PagedCache))
    for leaf in leaves:
        require(isinstance(leaf, PagedCache), "caches", "be a tree of PagedCache", type(leaf).__name__)
    require_distinct_arrays(*leaves)
    pairs = _as_pairs(block_mapping)
    if isinstance(pairs, np.ndarray):
        for cache in leaves:
            _check_pairs(pairs, cache, cache)
    updated = _copy_blocks([block_arrays(cache) for cache in leaves], jnp.asarray(pairs, jnp.int32))
    return jax.tree.unflatten(tree, [replace(c, **arrays) for c, arrays in zip(leaves, updated, strict=True)])


@functools.partial(jax.jit, donate_argnums=0)
def _copy_blocks(arrays: list[dict[str, Array]], block_mapping: Array) -> list[dict[str, Array]]:
    return jax.tree.map(lambda array: _copy_within(array, block_mapping), arrays)


@jax.jit  # traced and lowered once for all layers
def _copy_within(array: Array, block_mapping: Array) -> Array:
    source, target = block_mapping[:, 0], block_mapping[:, 1]
    return _put_blocks(array, jnp.take(array, source, axis=0, mode="clip"), source, target)


def _put_blocks(array: Array, blocks: Array, source: Array, target: Array) -> Array:
    skipped = (source < 0) | (target < 0)
    return array.at[jnp.where(skipped, array.shape[0], target)].set(blocks, mode="drop")


def swap_blocks(
    source: PagedCache, target: PagedCache, block_mapping: Int[Array, "pairs 2"] | np.ndarray
) -> PagedCache:
    """Copy blocks from one cache to another: device to device, device to host, or host to device.

    A cache is on the host if its arrays are numpy arrays (`PagedCache.create_on_host`). The target is
    donated: XLA writes a device target in place, numpy a host target. Not for use inside jit.

    Args:
        source: Cache to read from; unchanged.
        target: Cache to write to.
        block_mapping: Pairs (source block, target block), int [pairs, 2]; pairs with a negative id are
            skipped.

    Returns:
        The written target.

    Raises:
        ValueError: If the caches differ in layout, dtypes or block shape, block_mapping does not hold pairs
            of ints, an id is out of range, or two pairs have the same target.

    Source: vLLM `swap_blocks`.
    """
    for name, cache in (("source", source), ("target", target)):
        require(isinstance(cache, PagedCache), name, "be a PagedCache", type(cache).__name__)
    require(
        source.layout == target.layout, "target.layout", f"be the source's ({source.layout})", target.layout
    )
    source_arrays, target_arrays = block_arrays(source), block_arrays(target)
    require(
        source_arrays.keys() == target_arrays.keys(),
        "target",
        f"have the source's arrays ({sorted(source_arrays)})",
        sorted(target_arrays),
    )
    for name in target_arrays:
        require_shape(
            f"a block of target.{name}",
            target_arrays[name].shape[1:],
            source_arrays[name].shape[1:],
            "the shape of the source's blocks",
        )
        dtype = source_arrays[name].dtype  # quantized values cannot be cast
        require(
            target_arrays[name].dtype == dtype,
            f"target.{name}",
            f"be {dtype}, as the source's",
            target_arrays[name].dtype,
        )
    pairs = np.asarray(_as_pairs(block_mapping))
    _check_pairs(pairs, source, target)
    pairs = pairs[(pairs >= 0).all(axis=1)]
    padded = pad_block_pairs(pairs)
    if isinstance(target.k, np.ndarray):
        gathered = jax.device_get(
            {
                name: np.take(a, pairs[:, 0], axis=0)
                if isinstance(a, np.ndarray)
                else _gather(a, padded[:, 0])
                for name, a in source_arrays.items()
            }
        )
        for name, array in target_arrays.items():
            array[pairs[:, 1]] = gathered[name][: len(pairs)]
        return target
    if isinstance(source.k, np.ndarray):
        blocks = {
            name: np.take(array, padded[:, 0], axis=0, mode="clip") for name, array in source_arrays.items()
        }
    else:
        blocks = {name: _gather(array, padded[:, 0]) for name, array in source_arrays.items()}
    return replace(target, **_scatter(target_arrays, blocks, padded))


@jax.jit
def _gather(array: Array, ids: Array) -> Array:
    return jnp.take(array, ids, axis=0, mode="clip")


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(arrays: dict[str, Array], blocks: dict[str, Array], pairs: Array) -> dict[str, Array]:
    return {name: _put_blocks(a, blocks[name], pairs[:, 0], pairs[:, 1]) for name, a in arrays.items()}


def pad_block_pairs(pairs: Sequence[tuple[int, int]] | np.ndarray) -> np.ndarray:
    """Pad pairs of block ids with -1 to a power of two, so that serving compiles few shapes; int32."""
    padded = np.full((1 << max(len(pairs) - 1, 0).bit_length(), 2), -1, np.int32)
    padded[: len(pairs)] = pairs
    return padded


def _as_pairs(block_mapping: Any) -> Any:
    """Return the mapping as an array [pairs, 2], in numpy unless it is on the device."""
    pairs = block_mapping if isinstance(block_mapping, jax.Array) else np.asarray(block_mapping)
    if pairs.size == 0:
        return np.zeros((0, 2), np.int32)
    is_pairs = pairs.ndim == 2 and pairs.shape[1] == 2
    require(is_pairs, "block_mapping", "have shape [pairs, 2]", f"shape {pairs.shape}")
    require(np.issubdtype(pairs.dtype, np.integer), "block_mapping", "hold ints", pairs.dtype)
    require_int32s("block_mapping", pairs)
    return pairs


def _check_pairs(pairs: np.ndarray, source: PagedCache, target: PagedCache) -> None:
    """Check that host pairs are in range and have distinct targets."""
    pairs = pairs[(pairs >= 0).all(axis=1)]
    for column, cache in ((0, source), (1, target)):
        out_of_range = pairs[pairs[:, column] >= cache.num_blocks]
        rule = f"stay below {cache.num_blocks} in column {column}"
        require(out_of_range.size == 0, "block_mapping", rule, out_of_range.tolist())
    targets, counts = np.unique(pairs[:, 1], return_counts=True)
    duplicates = targets[counts > 1]
    require(duplicates.size == 0, "block_mapping", "have distinct targets", duplicates.tolist())
