"""Sharding of dense attention over Auto mesh axes, through `jax.experimental.custom_partitioning`.

Auto shardings are not visible while tracing. XLA's partitioner calls back once it has sharded all arrays, and
attention is then traced again for the shard of one device. On a single device JAX skips the partitioner, so
nothing is added to the compiled program.
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

from jattn.dense.sharding import AttentionSharding, Axes, can_shard_heads, dividing_axes, mesh_axis_names

BATCH, HEADS, KV_HEADS = "batch", "heads", "kv_heads"
type ShardFunction = Callable[[AttentionSharding | None, Any], Any]
type LabelSizes = dict[str, int]


def has_auto_sharding(arrays: Sequence[Array]) -> bool:
    """Return whether XLA may shard these arrays over several devices: all mesh axes in use are Auto."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    meshes = [mesh for mesh in meshes if mesh.axis_names]
    sizes = [mesh.size for mesh in meshes] or [jax.device_count()]
    return max(sizes) > 1 and all(set(mesh.axis_types) == {AxisType.Auto} for mesh in meshes)


def symbolic_sharding(has_batch: bool) -> AttentionSharding:
    """Return a sharding with labels in place of mesh axes, which yields the specs of `call_partitioned`."""
    return AttentionSharding(None, (BATCH,) if has_batch else (), HEADS, KV_HEADS)


def call_partitioned(function: ShardFunction, args: Any, in_specs: Any, out_specs: Any) -> Any:
    """Call a function on all arguments or, on several devices, on each device's shard; traced.

    Args:
        function: Function of the sharding (None = not sharded) and the local arguments; captures no arrays.
            It must sum results that are replicated over the devices itself (`sum_over_shards`).
        args: Tree of arrays, starting with queries, keys and values.
        in_specs: Partition specs of the arguments, with labels in the place of mesh axes.
        out_specs: Partition specs of the results, with labels in the place of mesh axes.
    """
    leaves: list[Array] = jax.tree.leaves(args)
    specs = (jax.tree.leaves(in_specs), jax.tree.leaves(out_specs))
    args_tree: Any = jax.tree.structure(args)
    results_tree: Any = jax.tree.structure(out_specs)
    sizes = _label_sizes(specs[0], leaves)

    def call_flat(sharding: AttentionSharding | None, *leaves: Array) -> list[Array]:
        return jax.tree.leaves(function(sharding, args_tree.unflatten(leaves)))

    def call_unsharded(*leaves: Array) -> list[Array]:
        return call_flat(None, *leaves)

    @custom_vmap
    def attend(*leaves: Array) -> list[Array]:
        jaxpr = jax.make_jaxpr(call_unsharded)(*leaves)
        consts = jaxpr.consts  # arrays that mask functions capture
        num_leaves = len(leaves)
        if any(isinstance(const, jax.core.Tracer) for const in consts):
            # Tracers do not outlive this trace, but the partitioner is called later.
            return call_unsharded(*leaves)

        def evaluate(*args: Array) -> Any:
            return jax.core.eval_jaxpr(jaxpr.jaxpr, args[num_leaves:], *args[:num_leaves])

        def call_shard(sharding: AttentionSharding, *args: Array) -> list[Array]:
            return call_flat(sharding, *args[:num_leaves])

        specs_with_consts = ([*specs[0], *[P()] * len(consts)], specs[1])
        return list(_partition(evaluate, call_shard, specs_with_consts, sizes)(*leaves, *consts))

    @attend.def_vmap
    def _attend_vmap(size: int, are_mapped: Sequence[bool], *leaves: Array) -> tuple[list[Array], list[bool]]:
        axes = [0 if is_mapped else None for is_mapped in are_mapped]
        outs = jax.vmap(call_unsharded, in_axes=axes, axis_size=size)(*leaves)
        return outs, [True] * len(outs)

    return results_tree.unflatten(attend(*leaves))


def sum_over_shards(sharding: AttentionSharding, spec: P, array: Array) -> Array:
    """Sum an array over the mesh axes that shard attention but not the array. Called on each device."""
    array_axes = {name for axes in spec for name in mesh_axis_names(axes)}
    names = tuple(name for name in sharding.axis_names if name not in array_axes)
    return jax.lax.psum(array, names) if names else array


def _partition(
    function: Callable[..., Any],
    shard_function: Callable[..., list[Array]],
    specs: tuple[list[P], list[P]],
    sizes: LabelSizes,
) -> Callable[..., Any]:
    """Wrap a function so that XLA's partitioner replaces it by `shard_function` on each device."""

    def shardings(
        mesh: Any, arguments: Sequence[Any]
    ) -> tuple[AttentionSharding, list[NamedSharding], list[NamedSharding]]:
        sharding = _choose_sharding(mesh, specs[0], arguments, sizes)
        batch_axes = sharding.batch_axes[0] if sharding.batch_axes else None
        axes_by_label = {BATCH: batch_axes, HEADS: sharding.heads, KV_HEADS: sharding.kv_heads}
        operands, results = (
            [NamedSharding(mesh, P(*(axes_by_label.get(label) for label in spec))) for spec in side]
            for side in specs
        )
        return sharding, operands, results

    def infer(mesh: Any, arguments: Sequence[Any], _: Any) -> list[NamedSharding]:
        return shardings(mesh, arguments)[2]

    def partition(mesh: Any, arguments: Sequence[Any], _: Any) -> Any:
        sharding, operands, results = shardings(mesh, arguments)
        return mesh, lambda *leaves: shard_function(sharding, *leaves), results, tuple(operands)

    def sharding_rule(mesh: Any, operands: Any, results: Any) -> SdyShardingRule:
        return _shardy_rule(mesh, specs, (operands, results), sizes)

    wrapped = custom_partitioning(function)
    wrapped.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=sharding_rule)
    return wrapped


def _label_sizes(specs: Sequence[P], leaves: Sequence[Array]) -> LabelSizes:
    """Return the size of the array axes with each label."""
    pairs = [pair for spec, x in zip(specs, leaves, strict=True) for pair in zip(spec, x.shape, strict=False)]
    return {label: size for label, size in pairs if label is not None}


def _choose_sharding(
    mesh: Any, specs: Sequence[P], arguments: Sequence[Any], sizes: LabelSizes
) -> AttentionSharding:
    """Choose the sharding of attention: the queries' sharding, or the keys' where queries are replicated.

    Mesh axes that do not divide an axis evenly, or would leave a device with parts of several kv heads, are
    dropped.
    """
    axes_by_label: dict[str, Axes] = {}
    for spec, argument in zip(specs[:3], arguments[:3], strict=True):
        for label, axes in zip(spec, argument.sharding.spec, strict=False):
            if label is not None and axes is not None:
                axes_by_label.setdefault(label, axes)
    names = mesh_axis_names(axes_by_label.get(HEADS, axes_by_label.get(KV_HEADS)))
    names = mesh_axis_names(dividing_axes(mesh, names, sizes[HEADS]))
    count = next(n for n in range(len(names), -1, -1) if can_shard_heads(mesh, names[:n], sizes[KV_HEADS]))
    heads = names[:count] or None
    unused = tuple(name for name in mesh_axis_names(axes_by_label.get(BATCH)) if name not in names[:count])
    batch_axes = (dividing_axes(mesh, unused, sizes[BATCH]) or None,) if BATCH in sizes else ()
    return AttentionSharding(mesh, batch_axes, heads, dividing_axes(mesh, heads, sizes[KV_HEADS]))


def _shardy_rule(
    mesh: Any, specs: tuple[list[P], list[P]], types: tuple[Any, Any], sizes: LabelSizes
) -> SdyShardingRule:
    """Return the Shardy rule that tells which array axes are sharded alike.

    If every mesh axis divides the kv heads, query heads are the compound factor kv heads x group. Otherwise
    Shardy would shard kv heads by a part of a mesh axis, which JAX cannot express, so query heads and kv
    heads are independent factors.
    """
    heads, kv_heads = sizes[HEADS], sizes[KV_HEADS]
    group, is_even = heads // max(kv_heads, 1), all(kv_heads % size == 0 for size in mesh.shape.values())
    factor_by_label: dict[Any, Any] = {BATCH: BATCH, HEADS: HEADS, KV_HEADS: KV_HEADS}
    factor_sizes: dict[str, Any] = {}
    if is_even and group > 1:
        factor_by_label[HEADS], factor_sizes = CompoundFactor(KV_HEADS, "group"), {"group": group}
    elif is_even:
        factor_by_label[HEADS] = KV_HEADS
    replicated: list[str] = []

    def factor(label: str | None) -> Any:
        if label is not None:
            return factor_by_label[label]
        replicated.append(f"replicated_{len(replicated)}")
        return replicated[-1]

    def mapping(spec: P, array_type: Any) -> ArrayMapping:
        labels = (*spec, *[None] * (len(array_type.shape) - len(spec)))
        return ArrayMapping(*(factor(label) for label in labels))

    operands, results = (tuple(map(mapping, *pair)) for pair in zip(specs, types, strict=True))
    return SdyShardingRule(operands, results, need_replication_factors=tuple(replicated), **factor_sizes)
