"""Masks whose heads, or rows, are spread over the devices of a mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, override

import jax
from jaxtyping import Array, Int32

from jattn.masks.base import Mask, leaves, row_arrays
from jattn.masks.local_strided import LocalStrided
from jattn.masks.pairs import BatchSizes, Coverage, Pairs, Tiles, quotient, remainder
from jattn.pytree import pytree, static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedMask(Mask):
    """A mask of all heads, as those of one device see it; inside shard_map, where heads lie along an axis.

    Attributes:
        mask: Whose heads are counted over all devices.
        axis_name: Static: the axis, or several as one.
        num_heads_of_all: Static: query heads and kv heads of all devices, no kv head counted twice.
    """

    mask: Mask
    axis_name: str | tuple[str, ...] = dataclasses.field(metadata={"static": True})
    num_heads_of_all: tuple[int, int] = dataclasses.field(metadata={"static": True})

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
        self.mask.check(sizes._replace(num_q_heads=self.num_heads_of_all[0]))

    @override
    def map_rows(self, of: Callable[[Any], Any]) -> Mask:
        return dataclasses.replace(self, mask=self.mask.map_rows(of))

    @override
    def visible(self, pairs: Pairs) -> Any:
        return self.mask.visible(self._of_all(pairs))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        return self.mask.coverage(self._of_all(tiles))

    def _of_all(self, places: Any) -> Any:
        """The same pairs or tiles, with their heads counted over all devices."""
        first = jax.lax.axis_index(self.axis_name) * places.num_heads[0]
        return places._replace(head=places.head + first, num_heads=self.num_heads_of_all)


def shard_mask(
    mask: Mask, axis_name: str | tuple[str, ...], num_devices: int, num_heads_of_all: tuple[int, int]
) -> Mask:
    """A mask of all heads as each of some devices sees it; the mask itself where that is the same for all.

    Args:
        mask: Of all heads.
        axis_name: Along which the devices lie.
        num_devices: How many of them.
        num_heads_of_all: As in `ShardedMask`.
    """
    if num_devices == 1 or mask.num_heads == (1, 1):
        return mask
    if isinstance(mask, LocalStrided) and mask.tp_size == 1:
        # Patterns repeat after vert_stride blocks: Phi-3-small's 32 heads are alike on 2 and on 4 devices.
        step = mask.head_sliding_step(*num_heads_of_all)
        heads = num_heads_of_all[0] if step > 0 else num_heads_of_all[1]
        is_even = heads % num_devices == 0 and not mask.vllm_prefill_heads
        if is_even and (heads // num_devices * step) % mask.vert_stride == 0:
            return dataclasses.replace(mask, tp_size=num_devices)
    return ShardedMask(mask=mask, axis_name=axis_name, num_heads_of_all=num_heads_of_all)


def per_request_array_ids(mask: Mask) -> set[int]:
    """`id` of each array, of a mask or of those it is composed of, that has a row for each request."""
    return {id(array) for leaf in leaves(mask) for array in row_arrays(leaf).values()}


@pytree
class InterleavedMask(Mask):
    """What `mask` says of the positions that a rank's own keys, and the queries, have in their request.

    A rank stores position p where `(p // interleave) % num_ranks` is its number, close together. A query is
    said to stand before so many keys as follow it among the rank's own, whoever stores these.

    Attributes:
        mask: Of positions; holds no arrays.
        rank: The rank whose keys they are.
        shift: Of each row [reqs]: its keys that other ranks store, by which its queries stand further behind.
        num_ranks: Static.
        interleave: Static: neighbouring positions that stay together.
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

    def position(self, key: Any) -> Any:
        """Where a key of the rank stands in its request."""
        turn, offset = quotient(key, self.interleave), remainder(key, self.interleave)
        return (turn * self.num_ranks + self.rank) * self.interleave + offset

    @override
    def visible(self, pairs: Pairs) -> Any:
        moved = {"query": pairs.query + self.shift[pairs.row], "key": self.position(pairs.key)}
        return self.mask.visible(pairs._replace(**moved))

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        """Of tiles that have the keys between, too: they are seen in part where the rank's own are."""
        shift, (queries, keys) = self.shift[tiles.row], tiles.size
        between = tiles._replace(
            first_query=tiles.first_query + shift,
            last_query=tiles.last_query + shift,
            first_key=self.position(tiles.first_key),
            last_key=self.position(tiles.last_key),
            size=(queries, (keys + self.interleave) * self.num_ranks),
        )
        return self.mask.coverage(between)
