"""Several devices as one mesh: who holds which heads of a cache, and what a model needs to be cut."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jattn.cache import PagedCache
from pallas_kernels.checks import require, require_int, require_positive, require_type

TP, CP = "tp", "cp"  # the axes of a mesh: heads are cut by one, keys by the other, widths of products by both
ALL_AXES = (TP, CP)
type Axes = str | tuple[str, ...]


def make_mesh(tp: int = 1, cp: int = 1) -> Mesh:
    """A mesh of the first `tp * cp` devices, with the axes "tp" and "cp".

    Args:
        tp: Devices that heads and the widths of products are spread over.
        cp: Devices that the keys of a request are spread over.

    Raises:
        ValueError: A size is no positive int, or there are fewer devices.
    """
    require_int(tp=tp, cp=cp)
    require_positive(tp=tp, cp=cp)
    devices = jax.devices()
    got = f"{tp} * {cp} = {tp * cp}"
    require(tp * cp <= len(devices), "tp * cp", f"be at most the number of devices ({len(devices)})", got)
    grid = np.array(devices[: tp * cp]).reshape(tp, cp)
    return Mesh(grid, (TP, CP), axis_types=(AxisType.Auto,) * 2)


def check_mesh(mesh: Any) -> None:
    """A mesh must be one that models run on.

    Axes that are Explicit, as `jax.make_mesh` makes them, follow arrays out of a model, where not all that is
    done with these says how the results are cut.

    Raises:
        ValueError: It is no mesh with the axes "tp" and "cp", or these are not Auto.
    """
    require_type("mesh", mesh, Mesh, "jattn.parallel.make_mesh makes one")
    require(mesh.axis_names == (TP, CP), "mesh's axes", f"be {(TP, CP)}", mesh.axis_names)
    kinds = tuple(kind.name for kind in mesh.axis_types)
    are_auto = set(mesh.axis_types) == {AxisType.Auto}
    require(are_auto, "mesh's axes", "be Auto (jattn.parallel.make_mesh makes such)", kinds)


def num_mesh_devices(model: Any) -> int:
    """Devices that a model, and its caches, are spread over; 1 where it has no mesh."""
    mesh = _mesh_of(model)
    return 1 if mesh is None else mesh.size


def num_local_mesh_devices(model: Any) -> int:
    """As `num_mesh_devices`, of this process's devices."""
    mesh = _mesh_of(model)
    if mesh is None:
        return 1
    return sum(device.process_index == jax.process_index() for device in mesh.devices.flat)


def num_ranks(model: Any) -> int:
    """Devices that the keys of a request are spread over; 1 where the model has no mesh."""
    mesh = _mesh_of(model)
    return 1 if mesh is None else mesh.shape[CP]


def replicated_sharding(model: Any) -> NamedSharding | None:
    """Where an array is whole on each of a model's devices; None where it has no mesh."""
    mesh = _mesh_of(model)
    return None if mesh is None else NamedSharding(mesh, P())


def has_sharded_logits(model: Any) -> bool:
    """Whether a device has the logits of its part of the vocabulary alone: all parts are equal."""
    mesh = _mesh_of(model)
    return mesh is not None and model.config.vocab_size % mesh.size == 0


def logits_sharding(model: Any) -> NamedSharding | None:
    """Where logits of a model lie; None where it has no mesh."""
    mesh = _mesh_of(model)
    return (
        None if mesh is None else NamedSharding(mesh, P(None, ALL_AXES) if has_sharded_logits(model) else P())
    )


def cache_partition_specs(cache: PagedCache) -> PagedCache:
    """A cache with PartitionSpecs in the place of its arrays: each device holds, of its kv heads, its keys.

    Args:
        cache: A cache, or its shapes.
    """

    def of(path: Any, array: Any) -> P:
        if path[-1].name not in ("k", "v"):  # scales: one, one a head, a head and channel, a token and head
            return (P(), P(TP), P(TP), P(None, TP, CP))[array.ndim]
        return {"NHD": P(None, CP, TP), "HND": P(None, TP, CP), "packed": P(None, TP, None, CP)}[cache.layout]

    partitions: PagedCache = jax.tree_util.tree_map_with_path(of, cache)
    return partitions


def _mesh_of(model: Any) -> Mesh | None:
    mesh: Mesh | None = getattr(model, "mesh", None)
    return mesh
