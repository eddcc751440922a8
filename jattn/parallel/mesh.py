"""Device meshes for tensor and context parallelism, and the sharding of caches and logits on them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jattn.cache import PagedCache
from pallas_kernels.checks import require, require_int, require_positive, require_type

# Mesh axes: TP shards heads, CP shards the keys of a request, and both shard the weights of linear layers.
TP, CP = "tp", "cp"
ALL_AXES = (TP, CP)
type Axes = str | tuple[str, ...]


def make_mesh(tp: int = 1, cp: int = 1) -> Mesh:
    """Return a mesh of the first `tp * cp` devices, with the axes "tp" and "cp".

    Args:
        tp: Number of devices over which heads and weights are sharded (tensor parallelism).
        cp: Number of devices over which the keys of a request are distributed (context parallelism).

    Raises:
        ValueError: If a size is not a positive int, or there are fewer than `tp * cp` devices.
    """
    require_int(tp=tp, cp=cp)
    require_positive(tp=tp, cp=cp)
    devices = jax.devices()
    product = f"{tp} * {cp} = {tp * cp}"
    require(tp * cp <= len(devices), "tp * cp", f"be at most the number of devices ({len(devices)})", product)
    grid = np.array(devices[: tp * cp]).reshape(tp, cp)
    return Mesh(grid, (TP, CP), axis_types=(AxisType.Auto,) * 2)


def check_mesh(mesh: Any) -> None:
    """Require `mesh` to be one that models support.

    Explicit axes, the default of `jax.make_mesh`, are rejected: arrays that leave a model would carry their
    sharding in their type, and not every operation on them specifies the sharding of its result.

    Raises:
        ValueError: If `mesh` is not a mesh with the axes "tp" and "cp", or an axis is not of type Auto.
    """
    require_type("mesh", mesh, Mesh, "build it with jattn.parallel.make_mesh")
    require(mesh.axis_names == (TP, CP), "mesh.axis_names", f"be {(TP, CP)}", mesh.axis_names)
    axis_types = tuple(axis_type.name for axis_type in mesh.axis_types)
    are_auto = set(mesh.axis_types) == {AxisType.Auto}
    rule = "be Auto for all axes (build the mesh with jattn.parallel.make_mesh)"
    require(are_auto, "mesh.axis_types", rule, axis_types)


def num_mesh_devices(model: Any) -> int:
    """Return the number of devices over which a model and its caches are sharded; 1 without a mesh."""
    mesh: Mesh | None = getattr(model, "mesh", None)
    return 1 if mesh is None else mesh.size


def num_local_mesh_devices(model: Any) -> int:
    """Return how many devices of a model's mesh belong to this process; 1 without a mesh."""
    mesh: Mesh | None = getattr(model, "mesh", None)
    if mesh is None:
        return 1
    return sum(device.process_index == jax.process_index() for device in mesh.devices.flat)


def num_ranks(model: Any) -> int:
    """Return the number of ranks over which the keys of a request are distributed; 1 without a mesh."""
    mesh: Mesh | None = getattr(model, "mesh", None)
    return 1 if mesh is None else mesh.shape[CP]


def replicated_sharding(model: Any) -> NamedSharding | None:
    """Return the sharding of an array that is replicated on a model's mesh; None without a mesh."""
    mesh: Mesh | None = getattr(model, "mesh", None)
    return None if mesh is None else NamedSharding(mesh, P())


def has_sharded_logits(model: Any) -> bool:
    """Return whether logits are sharded over the vocabulary, which requires shards of equal size."""
    mesh: Mesh | None = getattr(model, "mesh", None)
    return mesh is not None and model.config.vocab_size % mesh.size == 0


def logits_sharding(model: Any) -> NamedSharding | None:
    """Return the sharding of a model's logits [tokens, vocab]; None without a mesh."""
    mesh: Mesh | None = getattr(model, "mesh", None)
    if mesh is None:
        return None
    return NamedSharding(mesh, P(None, ALL_AXES) if has_sharded_logits(model) else P())


def cache_partition_specs(cache: PagedCache) -> PagedCache:
    """Return a cache whose arrays are replaced by their PartitionSpecs: heads over TP, keys over CP.

    Args:
        cache: A cache of arrays or of `jax.ShapeDtypeStruct`s.
    """

    def partition_spec(path: Any, array: Any) -> P:
        if path[-1].name not in ("k", "v"):
            # Scales are per cache [], per head, per head and channel, or per token and head.
            return (P(), P(TP), P(TP), P(None, TP, CP))[array.ndim]
        return {"NHD": P(None, CP, TP), "HND": P(None, TP, CP), "packed": P(None, TP, None, CP)}[cache.layout]

    partition_specs: PagedCache = jax.tree_util.tree_map_with_path(partition_spec, cache)
    return partition_specs
