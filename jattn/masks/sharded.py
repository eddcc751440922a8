"""Masks over several devices: heads sharded over a mesh axis, or keys interleaved over ranks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jattn.masks.base import Mask, factors, leaves, per_request_arrays
from jattn.masks.in_kernel import KernelTiling
from jattn.masks.local_strided import LocalStrided
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles, quotient, remainder
from jattn.pytree import pytree, static
from pallas_kernels.varlen_prefill import KernelMask, PairTile, Words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedMask(Mask):
    """A mask over the heads of all devices, for the heads of one device; used inside shard_map.

    Attributes:
        mask: Mask over the global heads.
        axis_name: Static: mesh axis, or axes, that the heads are sharded over.
        num_global_heads: Static: total number of query heads and kv heads, counting replicated kv heads once.
    """

    mask: Mask
    axis_name: str | tuple[str, ...] = dataclasses.field(metadata={"static": True})
    num_global_heads: tuple[int, int] = dataclasses.field(metadata={"static": True})

    row_axes: ClassVar[dict[str, int]] = {}

    @property
    @override
    def is_causal(self) -> bool:
        return self.mask.is_causal

    @property
    @override
    def allows_all_past_keys(self) -> bool:
        return self.mask.allows_all_past_keys

    @property
    @override
    def allows_future_keys(self) -> bool:
        return self.mask.allows_future_keys

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return None, None

    @override
    def check(self, sizes: BatchSizes) -> None:
        self.mask.check(sizes._replace(num_q_heads=self.num_global_heads[0]))

    @override
    def map_leaves(self, function: Callable[[Mask], Mask]) -> Mask:
        return dataclasses.replace(self, mask=self.mask.map_leaves(function))

    @override
    def map_rows(self, function: Callable[[Any], Any]) -> Mask:
        return dataclasses.replace(self, mask=self.mask.map_rows(function))

    @override
    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        return "there is no kernel for masks that differ between devices"

    @override
    def visible(self, pairs: Pairs) -> Any:
        return self.mask.visible(self._with_global_heads(pairs))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        return self.mask.coverage(self._with_global_heads(tiles))

    def _with_global_heads(self, pairs_or_tiles: Any) -> Any:
        """Return the pairs or tiles with global head indices."""
        first_head = jax.lax.axis_index(self.axis_name) * pairs_or_tiles.num_heads[0]
        return pairs_or_tiles._replace(head=pairs_or_tiles.head + first_head, num_heads=self.num_global_heads)


def shard_mask(
    mask: Mask, axis_name: str | tuple[str, ...], num_devices: int, num_global_heads: tuple[int, int]
) -> Mask:
    """Return the mask for one device's heads; `mask` itself if it is the same on all devices.

    Args:
        mask: Mask over the global heads.
        axis_name: Mesh axis, or axes, that the heads are sharded over.
        num_devices: Number of devices along `axis_name`.
        num_global_heads: Total number of query heads and kv heads, counting replicated kv heads once.
    """
    if num_devices == 1 or mask.num_heads == (1, 1):
        return mask
    if isinstance(mask, LocalStrided) and mask.tp_size == 1:
        # The pattern repeats after vert_stride blocks: Phi-3-small's 32 heads are the same on 2 or 4 devices.
        step = mask.head_sliding_step(*num_global_heads)
        heads = num_global_heads[0] if step > 0 else num_global_heads[1]
        is_even = heads % num_devices == 0 and not mask.vllm_prefill_heads
        if is_even and (heads // num_devices * step) % mask.vert_stride == 0:
            return dataclasses.replace(mask, tp_size=num_devices)
    return ShardedMask(mask=mask, axis_name=axis_name, num_global_heads=num_global_heads)


def per_request_array_ids(mask: Mask) -> set[int]:
    """Return the `id` of each array in a composed mask that has one row per request."""
    return {id(array) for leaf in leaves(mask) for array in per_request_arrays(leaf).values()}


@pytree
class InterleavedMask(Mask):
    """A mask of positions, applied to the keys that one context-parallel rank stores.

    Rank `(p // interleave) % num_ranks` stores the key of position p; a rank's keys are numbered
    contiguously. Query positions count from the end of the rank's keys; `shift` converts them to positions in
    the request.

    Attributes:
        mask: Mask of positions in the request; holds no arrays.
        rank: Rank that stores the keys.
        shift: Number of keys of each request that other ranks store: int32 [reqs].
        num_ranks: Static: number of context-parallel ranks.
        interleave: Static: number of consecutive positions that a rank stores together.
    """

    mask: Mask = static()
    rank: Int32[Array, ""]
    shift: Int32[Array, " reqs"]
    num_ranks: int = static()
    interleave: int = static()

    row_axes: ClassVar[dict[str, int]] = {"shift": 1}

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        return self.mask.num_heads

    @override
    def check(self, sizes: BatchSizes) -> None:
        super().check(sizes)
        self.mask.check(BatchSizes(num_q_heads=sizes.num_q_heads))

    @override
    def why_no_kernel(self, tiling: KernelTiling) -> str | None:
        if tiling.has_key_rows:
            return "there is no kernel for gradients over keys on several devices"
        for factor in factors(self.mask):
            if factor.key_range(0) is None:
                return f"there is no kernel for a {type(factor).__name__} over keys on several devices"
        return None

    @override
    def kernel_mask(self, tiling: KernelTiling) -> KernelMask:
        return RankRanges(
            shift=jnp.asarray(self.shift).astype(jnp.int32),
            rank=jnp.asarray(self.rank).astype(jnp.int32).reshape(1),
            mask=self.mask,
            num_ranks=self.num_ranks,
            interleave=self.interleave,
        )

    def position(self, key: Any) -> Any:
        """Return the position in the request of the rank's `key`-th key."""
        cycle, offset = quotient(key, self.interleave), remainder(key, self.interleave)
        return (cycle * self.num_ranks + self.rank) * self.interleave + offset

    @override
    def visible(self, pairs: Pairs) -> Any:
        query, key = pairs.query + self.shift[pairs.row], self.position(pairs.key)
        return self.mask.visible(pairs._replace(query=query, key=key))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        """Return the (conservative) coverage of tiles that also contain the keys between the rank's keys."""
        shift, (queries, keys) = self.shift[tiles.row], tiles.size
        global_tiles = tiles._replace(
            first_query=tiles.first_query + shift,
            last_query=tiles.last_query + shift,
            first_key=self.position(tiles.first_key),
            last_key=self.position(tiles.last_key),
            size=(queries, (keys + self.interleave) * self.num_ranks),
        )
        return self.mask.coverage(global_tiles)


@pytree
class RankRanges(KernelMask):
    """The range of a rank's keys that is visible to each query; the fields are those of InterleavedMask."""

    shift: Int32[Array, " reqs"]
    rank: Int32[Array, " 1"]
    mask: Mask = static()
    num_ranks: int = static()
    interleave: int = static()

    @override
    def load(self, tile: PairTile, req: Any) -> tuple[Any, Any]:
        return self.shift[jnp.minimum(req, self.shift.shape[0] - 1)], self.rank[0]

    @override
    def visible(self, tile: PairTile, loaded: tuple[Any, Any]) -> Words:
        shift, rank = loaded
        begin, end = visible_range(self.mask, jnp.maximum(tile.row_positions + shift, 0))
        all_columns = tile.fill_rows(jnp.int32(tile.shape[1]))
        return tile.words_in_range(
            None if begin is None else self._num_keys(rank, begin) - tile.first_key,
            all_columns if end is None else self._num_keys(rank, end) - tile.first_key,
        )

    def _num_keys(self, rank: Any, num_positions: Any) -> Any:
        """Return how many of the first `num_positions` positions the rank stores."""
        size = self.interleave * self.num_ranks
        rounds = quotient(num_positions, size)
        remaining = num_positions - rounds * size - rank * self.interleave
        return rounds * self.interleave + jnp.clip(remaining, 0, self.interleave)


def visible_range(mask: Mask, query: Any) -> tuple[Any | None, Any | None]:
    """Return the intersection of the key ranges of a mask's factors."""
    begins, ends = zip(*(factor.key_range(query) or (None, None) for factor in factors(mask)), strict=True)
    low, high = ([x for x in bounds if x is not None] for bounds in (begins, ends))
    return (functools.reduce(jnp.maximum, low) if low else None), (
        functools.reduce(jnp.minimum, high) if high else None
    )
