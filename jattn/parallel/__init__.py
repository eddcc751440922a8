"""Device meshes for models and caches that are sharded over several devices."""

from jattn.parallel.mesh import (
    ALL_AXES,
    CP,
    TP,
    Axes,
    cache_partition_specs,
    check_mesh,
    has_sharded_logits,
    logits_sharding,
    make_mesh,
    num_local_mesh_devices,
    num_mesh_devices,
    num_ranks,
    replicated_sharding,
)

__all__ = [
    "ALL_AXES",
    "CP",
    "TP",
    "Axes",
    "cache_partition_specs",
    "check_mesh",
    "has_sharded_logits",
    "logits_sharding",
    "make_mesh",
    "num_local_mesh_devices",
    "num_mesh_devices",
    "num_ranks",
    "replicated_sharding",
]
