"""Arrays on a mesh: which texts and heads a device has, and attention of these alone.

No text needs another one, no head another one's keys. Where axes are Explicit the arrays' types say how they
are cut, and attention runs by `jax.shard_map`. Axes that are Auto show nothing while tracing:
`automatic_arrays`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jattn.masks import Mask, per_request_array_ids, shard_mask
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, unsupported

type Axes = str | tuple[str, ...] | None  # of a mesh, that cut one axis of an array; None = it is whole


class Cut(NamedTuple):
    """How attention is cut.

    Attributes:
        mesh: The arrays' mesh.
        texts: What cuts each axis before the tokens.
        heads: What cuts the query heads.
        kv_heads: What cuts the kv heads: as many of the first of those axes as divide them.
    """

    mesh: Any
    texts: tuple[Axes, ...]
    heads: Axes
    kv_heads: Axes

    @property
    def of_queries(self) -> P:
        """Queries' and outputs' partition."""
        return P(*self.texts, None, self.heads, None)

    @property
    def of_keys(self) -> P:
        """That of keys and values."""
        return P(*self.texts, None, self.kv_heads, None)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The mesh's axes that cut anything."""
        return tuple(name for axes in (*self.texts, self.heads) for name in names_of(axes))

    def of_scores(self, array: Array) -> P:
        """The partition of what broadcasts to [*batch, q_heads, q_tokens, kv_tokens]."""
        every = (*self.texts, self.heads, None, None)[-array.ndim :] if array.ndim else ()
        return P(*(axes if size > 1 else None for axes, size in zip(every, array.shape, strict=True)))

    def of_mask(self, mask: Mask | None) -> Any:
        """The partitions of a mask's arrays: by texts where they have a row for each, else whole."""
        rows = set() if mask is None else per_request_array_ids(mask)
        return jax.tree.map(lambda x: P(*self.texts) if id(x) in rows and x.shape[0] > 1 else P(), mask)

    def part_of(self, spec: AttentionSpec) -> AttentionSpec:
        """The layer of one device's heads."""
        kv_heads = 1 if self._sharers > 1 else spec.num_kv_heads // size_of(self.mesh, self.kv_heads)
        heads: dict[str, Any] = {
            "num_q_heads": spec.num_q_heads // size_of(self.mesh, self.heads),
            "num_kv_heads": kv_heads,
        }
        return dataclasses.replace(spec, **heads, sparsity=self.mask_of_part(spec.sparsity, spec))

    def keys_of_part(self, keys: Array) -> Array:
        """The keys, or values, that a device's query heads see, of those that it has. Traced, on each device.

        Devices that cut query heads finer than kv heads have kv heads in common, of which each needs one.
        """
        kv_heads = keys.shape[-2]
        if self._sharers == 1 or kv_heads == 1:
            return keys
        sharing = names_of(self.heads)[len(names_of(self.kv_heads)) :]
        first = jax.lax.axis_index(sharing) * kv_heads // self._sharers
        return jax.lax.dynamic_slice_in_dim(keys, first, 1, axis=-2)

    @property
    def _sharers(self) -> int:
        """How many devices have the same kv heads, and different query heads."""
        return size_of(self.mesh, self.heads) // size_of(self.mesh, self.kv_heads)

    def mask_of_part(self, mask: Mask | None, spec: AttentionSpec) -> Mask | None:
        """A mask of all heads as each device sees it; `spec` is that of all heads."""
        if mask is None or self.heads is None:
            return mask
        num_heads = spec.num_q_heads, spec.num_kv_heads
        return shard_mask(mask, self.heads, size_of(self.mesh, self.heads), num_heads)


def cut_of(q: Array, k: Array, v: Array) -> Cut | None:
    """How Explicit axes of a mesh cut queries, keys and values; None where none does.

    Raises:
        ValueError: They are cut differently.
        NotImplementedError: Tokens or head_dim are cut, or a device would have parts of several kv heads.
    """
    arrays = {"q": q, "k": k, "v": v}
    shardings = {name: jax.typeof(array).sharding for name, array in arrays.items()}
    cut = {name: of for name, of in shardings.items() if any(of.spec)}
    meshes = [of.mesh for of in cut.values() if AxisType.Explicit in of.mesh.axis_types]
    if not meshes:
        return None
    for name, sharding in cut.items():
        if any(axes is not None for axes in (sharding.spec[-3], sharding.spec[-1])):
            reason = "attention is cut by texts and heads alone"
            way_out = "Give it whole tokens and heads (jax.sharding.reshard)"
            raise unsupported(f"{name} on a mesh as {sharding.spec}", reason, way_out)
    of_heads = cut["q"].spec[-2] if "q" in cut else None
    said = {name: (*of.spec[:-3], _as_of_queries(of.spec[-2], of_heads)) for name, of in cut.items()}
    *texts, heads = (_agreed(said, axis) for axis in range(q.ndim - 2))
    size, num_kv_heads = size_of(meshes[0], heads), k.shape[-2]
    if not are_apart(meshes[0], heads, num_kv_heads):
        what, reason = (
            f"q_heads on {size} devices",
            f"{num_kv_heads} kv heads are no multiple or part of them",
        )
        raise unsupported(what, reason, "Give fewer devices heads (jax.sharding.reshard)")
    found = Cut(meshes[0], tuple(texts), heads, first_that_divide(meshes[0], heads, num_kv_heads))
    names = found.axis_names
    require(len(set(names)) == len(names), "q, k and v", "have texts and heads on other axes", names)
    return found


def on_each_device(cut: Cut, run: Callable[..., Any], given: Sequence[Any], specs: Any, returns: Any) -> Any:
    """`run` of each device's part of what is given; traced.

    Args:
        cut: The arrays'.
        run: Takes a device's part.
        given: Trees of arrays; None where there is none.
        specs: A partition for each of the arrays, in the same trees.
        returns: As out_specs of `jax.shard_map`.
    """
    place = lambda spec, array: jax.sharding.reshard(array, NamedSharding(cut.mesh, spec))
    placed = jax.tree.map(place, specs, tuple(given))
    # Kernels do not say over which axes their results vary; axes that cut nothing stay out, so that no sum
    # over them is made of gradients.
    names = set(cut.axis_names)
    return jax.shard_map(
        run, mesh=cut.mesh, in_specs=specs, out_specs=returns, axis_names=names, check_vma=False
    )(*placed)


def _agreed(said: dict[str, tuple[Axes, ...]], axis: int) -> Axes:
    """What cuts an axis of all arrays: what those that are cut there agree on."""
    found = {name: axes[axis] for name, axes in said.items() if axes[axis] is not None}
    same = len(set(found.values())) <= 1
    require(same, "q, k and v", "be cut by the same axes of a mesh, or whole", found)
    return next(iter(found.values()), None)


def _as_of_queries(axes: Axes, of_queries: Axes) -> Axes:
    """What cuts query heads where kv heads, of which there may be fewer, are cut by the first of that."""
    names = names_of(axes)
    return of_queries if names == names_of(of_queries)[: len(names)] else axes


def names_of(axes: Axes) -> tuple[str, ...]:
    """Axes of a mesh as a tuple of them."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def size_of(mesh: Any, axes: Axes) -> int:
    """Into how many parts axes of a mesh cut."""
    return math.prod(mesh.shape[name] for name in names_of(axes))


def first_that_divide(mesh: Any, axes: Axes, size: int) -> Axes:
    """As many of the first axes of a mesh as cut so many into equal parts; None where none does."""
    names = names_of(axes)
    most = next(n for n in range(len(names), -1, -1) if size % size_of(mesh, names[:n]) == 0)
    return axes if most == len(names) else names[:most] or None


def are_apart(mesh: Any, heads: Axes, num_kv_heads: int) -> bool:
    """Whether axes that cut query heads give each device whole kv heads, or heads of one kv head alone."""
    cut_kv_heads = size_of(mesh, first_that_divide(mesh, heads, num_kv_heads))
    kept, sharers = num_kv_heads // cut_kv_heads, size_of(mesh, heads) // cut_kv_heads
    return sharers == 1 or sharers % kept == 0
