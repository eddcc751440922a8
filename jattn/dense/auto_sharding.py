"""Arrays on a mesh whose axes are Auto: XLA's partitioner asks how to cut attention, and is told.

Nothing shows while tracing. The partitioner comes once all arrays have their places, by
`jax.experimental.custom_partitioning`, and what is cut is then traced anew, as one device sees it. On one
device JAX leaves the partitioner out, so nothing is added to what is compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jattn.dense.sharding import Axes, Cut, are_apart, first_that_divide, names_of

TEXTS, HEADS, KV_HEADS = "texts", "heads", "kv_heads"
type Run = Callable[[Cut | None, Any], Any]
type Sizes = dict[str, int]


def are_automatic(arrays: Sequence[Array]) -> bool:
    """Whether XLA may cut these arrays over several devices: all axes of all meshes around are Auto."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    known = [mesh for mesh in meshes if mesh.axis_names]
    sizes = [mesh.size for mesh in known] or [jax.device_count()]
    return max(sizes) > 1 and all(set(mesh.axis_types) == {AxisType.Auto} for mesh in known)


def labels(has_batch: bool) -> Cut:
    """A cut with what each axis holds in the place of what cuts it: partitions for `by_partitioner`."""
    return Cut(None, (TEXTS,) if has_batch else (), HEADS, KV_HEADS)


def by_partitioner(run: Run, given: Any, partitions: Any, returns: Any) -> Any:
    """`run` of all that is given, or on several devices of each one's part; traced.

    Args:
        run: Takes how a device's part is cut, or None = it is whole, and the part; holds no arrays itself.
            Results that are whole where others are cut it sums over the devices (`sum_of_parts`).
        given: A tree of arrays, queries, keys and values first.
        partitions: Of these, by labels.
        returns: Of the results, likewise.
    """
    leaves: list[Array] = jax.tree.leaves(given)
    specs = (jax.tree.leaves(partitions), jax.tree.leaves(returns))
    tree: Any = jax.tree.structure(given)
    results: Any = jax.tree.structure(returns)
    flat = lambda cut, *leaves: jax.tree.leaves(run(cut, tree.unflatten(leaves)))
    whole = lambda *leaves: flat(None, *leaves)
    sizes = _sizes(specs[0], leaves)

    @custom_vmap
    def attend(*leaves: Array) -> list[Array]:
        jaxpr = jax.make_jaxpr(whole)(*leaves)
        consts, num = jaxpr.consts, len(leaves)  # consts: what a mask's function closes over
        if any(isinstance(const, jax.core.Tracer) for const in consts):  # gone when the partitioner comes
            return whole(*leaves)
        function = lambda *every: jax.core.eval_jaxpr(jaxpr.jaxpr, every[num:], *every[:num])
        of_part = lambda cut, *every: flat(cut, *every[:num])
        places = ([*specs[0], *[P()] * len(consts)], specs[1])
        return list(_partitioned(function, of_part, places, sizes)(*leaves, *consts))

    @attend.def_vmap
    def _mapped(size: int, are_mapped: Sequence[bool], *leaves: Array) -> tuple[list[Array], list[bool]]:
        axes = [0 if is_mapped else None for is_mapped in are_mapped]
        outs = jax.vmap(whole, in_axes=axes, axis_size=size)(*leaves)
        return outs, [True] * len(outs)

    return results.unflatten(attend(*leaves))


def sum_of_parts(cut: Cut, partition: P, array: Array) -> Array:
    """The sum of what devices have over the axes that cut attention, but not this array. On each device."""
    kept = {name for axes in partition for name in names_of(axes)}
    names = tuple(name for name in cut.axis_names if name not in kept)
    return jax.lax.psum(array, names) if names else array


def _partitioned(
    function: Callable[..., Any],
    flat: Callable[..., list[Array]],
    specs: tuple[list[P], list[P]],
    sizes: Sizes,
) -> Callable[..., Any]:
    """The function, as XLA's partitioner is to cut it."""

    def places(mesh: Any, arguments: Sequence[Any]) -> tuple[Cut, list[NamedSharding], list[NamedSharding]]:
        cut = _cut_of(mesh, specs[0], arguments, sizes)
        axes = {TEXTS: cut.texts[0] if cut.texts else None, HEADS: cut.heads, KV_HEADS: cut.kv_heads}
        place = lambda spec: NamedSharding(mesh, P(*(axes.get(label) for label in spec)))
        operands, results = ([place(spec) for spec in some] for some in specs)
        return cut, operands, results

    def infer(mesh: Any, arguments: Sequence[Any], _: Any) -> list[NamedSharding]:
        return places(mesh, arguments)[2]

    def partition(mesh: Any, arguments: Sequence[Any], _: Any) -> Any:
        cut, operands, results = places(mesh, arguments)
        return mesh, lambda *leaves: flat(cut, *leaves), results, tuple(operands)

    wrapped = custom_partitioning(function)
    rule = lambda mesh, operands, results: _rule(mesh, specs, (operands, results), sizes)
    wrapped.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return wrapped


def _sizes(specs: Sequence[P], leaves: Sequence[Array]) -> Sizes:
    """How many there are of what each label stands for."""
    pairs = [pair for spec, x in zip(specs, leaves, strict=True) for pair in zip(spec, x.shape, strict=False)]
    return {label: size for label, size in pairs if label is not None}


def _cut_of(mesh: Any, specs: Sequence[P], arguments: Sequence[Any], sizes: Sizes) -> Cut:
    """How attention is cut where arrays lie so: as queries are, and where these are whole, as keys.

    Axes that do not cut evenly, or kv heads into parts that no device could do without, cut nothing.
    """
    found: dict[str, Axes] = {}
    for spec, argument in zip(specs[:3], arguments[:3], strict=True):
        for label, axes in zip(spec, argument.sharding.spec, strict=False):
            if label is not None and axes is not None:
                found.setdefault(label, axes)
    names = names_of(found.get(HEADS, found.get(KV_HEADS)))
    even = names_of(first_that_divide(mesh, names, sizes[HEADS]))
    most = next(n for n in range(len(even), -1, -1) if are_apart(mesh, even[:n], sizes[KV_HEADS]))
    heads = even[:most] or None
    free = tuple(name for name in names_of(found.get(TEXTS)) if name not in even[:most])
    texts = (first_that_divide(mesh, free, sizes[TEXTS]) or None,) if TEXTS in sizes else ()
    return Cut(mesh, texts, heads, first_that_divide(mesh, heads, sizes[KV_HEADS]))


def _rule(mesh: Any, specs: tuple[list[P], list[P]], types: tuple[Any, Any], sizes: Sizes) -> SdyShardingRule:
    """Which axes of arrays are cut alike, as Shardy wants to know it.

    Query heads are kv heads x group where each axis of the mesh divides the kv heads; elsewhere Shardy would
    cut kv heads by parts of an axis, which JAX has no name for, so there the two go their own ways.
    """
    heads, kv_heads = sizes[HEADS], sizes[KV_HEADS]
    group, is_even = heads // max(kv_heads, 1), all(kv_heads % size == 0 for size in mesh.shape.values())
    factor_of: dict[Any, Any] = {TEXTS: TEXTS, HEADS: HEADS, KV_HEADS: KV_HEADS}
    factor_sizes: dict[str, Any] = {}
    if is_even and group > 1:
        factor_of[HEADS], factor_sizes = CompoundFactor(KV_HEADS, "group"), {"group": group}
    elif is_even:
        factor_of[HEADS] = KV_HEADS
    whole: list[str] = []

    def factor(label: str | None) -> Any:
        if label is not None:
            return factor_of[label]
        whole.append(f"whole_{len(whole)}")
        return whole[-1]

    def mapping(spec: P, kind: Any) -> ArrayMapping:
        every = (*spec, *[None] * (len(kind.shape) - len(spec)))
        return ArrayMapping(*(factor(label) for label in every))

    operands, results = (tuple(map(mapping, *pair)) for pair in zip(specs, types, strict=True))
    return SdyShardingRule(operands, results, need_replication_factors=tuple(whole), **factor_sizes)
