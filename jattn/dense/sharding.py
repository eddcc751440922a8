"""Sharded dense attention: which batch elements and heads each device has, and how to run on them.

Batch elements are independent, and so are heads with different kv heads. If the mesh axes are Explicit, the
arrays' types carry their sharding, and attention runs under `jax.shard_map`. Auto axes are not visible while
tracing; see `auto_sharding`.
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

type Axes = str | tuple[str, ...] | None  # Mesh axes that shard one array axis; None = not sharded.


class AttentionSharding(NamedTuple):
    """How attention is sharded over a mesh.

    Attributes:
        mesh: Mesh of the arrays.
        batch_axes: Mesh axes that shard each array axis before the tokens.
        heads: Mesh axes that shard the query heads.
        kv_heads: Mesh axes that shard the kv heads: the longest prefix of `heads` that divides them.
    """

    mesh: Any
    batch_axes: tuple[Axes, ...]
    heads: Axes
    kv_heads: Axes

    @property
    def query_spec(self) -> P:
        """Partition spec of queries and outputs."""
        return P(*self.batch_axes, None, self.heads, None)

    @property
    def kv_spec(self) -> P:
        """Partition spec of keys and values."""
        return P(*self.batch_axes, None, self.kv_heads, None)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Mesh axes that shard attention."""
        return tuple(name for axes in (*self.batch_axes, self.heads) for name in mesh_axis_names(axes))

    def scores_spec(self, array: Array) -> P:
        """Return the partition spec of an array that broadcasts to [*batch, q_heads, q_tokens, kv_tokens]."""
        axes_of_scores = (*self.batch_axes, self.heads, None, None)[-array.ndim :] if array.ndim else ()
        pairs = zip(axes_of_scores, array.shape, strict=True)
        return P(*(axes if size > 1 else None for axes, size in pairs))

    def mask_specs(self, mask: Mask | None) -> Any:
        """Return the partition specs of a mask's arrays: sharded by batch if per request, else replicated."""
        ids = set() if mask is None else per_request_array_ids(mask)
        return jax.tree.map(lambda x: P(*self.batch_axes) if id(x) in ids and x.shape[0] > 1 else P(), mask)

    def local_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the attention spec of one device's heads."""
        is_replicated = self._num_replicas > 1
        num_kv_heads = 1 if is_replicated else spec.num_kv_heads // num_shards(self.mesh, self.kv_heads)
        return dataclasses.replace(
            spec,
            num_q_heads=spec.num_q_heads // num_shards(self.mesh, self.heads),
            num_kv_heads=num_kv_heads,
            sparsity=self.local_mask(spec.sparsity, spec),
        )

    def local_kv_heads(self, keys: Array) -> Array:
        """Return the keys or values of the kv heads that a device's query heads need.

        Runs inside shard_map, on each device. If the query heads are sharded more finely than the kv heads,
        devices share kv heads and each needs one.
        """
        kv_heads = keys.shape[-2]
        if self._num_replicas == 1 or kv_heads == 1:
            return keys
        replica_axes = mesh_axis_names(self.heads)[len(mesh_axis_names(self.kv_heads)) :]
        first = jax.lax.axis_index(replica_axes) * kv_heads // self._num_replicas
        return jax.lax.dynamic_slice_in_dim(keys, first, 1, axis=-2)

    @property
    def _num_replicas(self) -> int:
        """Number of devices that have the same kv heads but different query heads."""
        return num_shards(self.mesh, self.heads) // num_shards(self.mesh, self.kv_heads)

    def local_mask(self, mask: Mask | None, spec: AttentionSpec) -> Mask | None:
        """Return the mask for one device's heads; `spec` has the global heads."""
        if mask is None or self.heads is None:
            return mask
        num_heads = spec.num_q_heads, spec.num_kv_heads
        return shard_mask(mask, self.heads, num_shards(self.mesh, self.heads), num_heads)


def explicit_sharding(q: Array, k: Array, v: Array) -> AttentionSharding | None:
    """Return how Explicit mesh axes shard queries, keys and values; None if they do not.

    Raises:
        ValueError: If the arrays are sharded differently.
        NotImplementedError: If tokens or head_dim are sharded, or a device would have parts of several kv
            heads.
    """
    arrays = {"q": q, "k": k, "v": v}
    shardings = {name: jax.typeof(array).sharding for name, array in arrays.items()}
    sharded = {name: sharding for name, sharding in shardings.items() if any(sharding.spec)}
    meshes = [x.mesh for x in sharded.values() if AxisType.Explicit in x.mesh.axis_types]
    if not meshes:
        return None
    mesh = meshes[0]
    for name, sharding in sharded.items():
        if any(axes is not None for axes in (sharding.spec[-3], sharding.spec[-1])):
            reason = "attention can be sharded by batch and heads only"
            fix = "Replicate tokens and head_dim with jax.sharding.reshard"
            raise unsupported(f"{name} with sharding {sharding.spec}", reason, fix)
    q_head_axes = sharded["q"].spec[-2] if "q" in sharded else None
    axes_by_name = {
        name: (*sharding.spec[:-3], _query_head_axes(sharding.spec[-2], q_head_axes))
        for name, sharding in sharded.items()
    }
    *batch_axes, heads = (_common_axes(axes_by_name, axis) for axis in range(q.ndim - 2))
    num_kv_heads = k.shape[-2]
    if not can_shard_heads(mesh, heads, num_kv_heads):
        num_devices = num_shards(mesh, heads)
        reason = f"{num_kv_heads} kv heads are neither a multiple nor a divisor of {num_devices}"
        fix = "Shard the heads over fewer devices with jax.sharding.reshard"
        raise unsupported(f"Sharding query heads over {num_devices} devices", reason, fix)
    result = AttentionSharding(mesh, tuple(batch_axes), heads, dividing_axes(mesh, heads, num_kv_heads))
    names = result.axis_names
    if len(set(names)) < len(names):
        raise ValueError(
            f"Batch and heads of q, k and v must be sharded over different mesh axes, got {names}."
        )
    return result


def run_sharded(
    sharding: AttentionSharding,
    function: Callable[..., Any],
    args: Sequence[Any],
    in_specs: Any,
    out_specs: Any,
) -> Any:
    """Run a function on each device's shard of the arguments; traced.

    Args:
        sharding: How attention is sharded.
        function: Function of the local shards.
        args: Trees of arrays, or None.
        in_specs: Partition spec of each array, in the same trees.
        out_specs: Partition specs of the results; see `jax.shard_map`.
    """
    placed = jax.tree.map(
        lambda spec, array: jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec)),
        in_specs,
        tuple(args),
    )
    # Kernels do not declare over which axes their results vary, so check_vma is off. Axes that do not shard
    # attention are left out, so that gradients are not summed over them.
    return jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(sharding.axis_names),
        check_vma=False,
    )(*placed)


def _common_axes(axes_by_name: dict[str, tuple[Axes, ...]], axis: int) -> Axes:
    """Return the mesh axes that shard an axis of the arrays; replicated arrays follow the sharded ones."""
    sharded = {name: axes[axis] for name, axes in axes_by_name.items() if axes[axis] is not None}
    is_same = len(set(sharded.values())) <= 1
    require(is_same, "q, k and v", "be sharded over the same mesh axes or replicated", sharded)
    return next(iter(sharded.values()), None)


def _query_head_axes(axes: Axes, q_head_axes: Axes) -> Axes:
    """Return the query heads' axes if an array's heads are sharded over a prefix of them, else `axes`."""
    names = mesh_axis_names(axes)
    return q_head_axes if names == mesh_axis_names(q_head_axes)[: len(names)] else axes


def mesh_axis_names(axes: Axes) -> tuple[str, ...]:
    """Return mesh axes as a tuple of names."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def num_shards(mesh: Any, axes: Axes) -> int:
    """Return the number of shards that mesh axes produce."""
    return math.prod(mesh.shape[name] for name in mesh_axis_names(axes))


def dividing_axes(mesh: Any, axes: Axes, size: int) -> Axes:
    """Return the longest prefix of mesh axes whose number of shards divides `size`; None if it is empty."""
    names = mesh_axis_names(axes)
    count = next(n for n in range(len(names), -1, -1) if size % num_shards(mesh, names[:n]) == 0)
    return axes if count == len(names) else names[:count] or None


def can_shard_heads(mesh: Any, heads: Axes, num_kv_heads: int) -> bool:
    """Return whether each device has complete kv heads, or query heads of a single kv head."""
    kv_shards = num_shards(mesh, dividing_axes(mesh, heads, num_kv_heads))
    local_kv_heads, num_replicas = num_kv_heads // kv_shards, num_shards(mesh, heads) // kv_shards
    return num_replicas == 1 or num_replicas % local_kv_heads == 0
