"""Several devices as one mesh."""

from jattn.parallel.mesh import (
    ALL,
    CP,
    TP,
    Axes,
    by_vocabulary,
    cache_partitions,
    check_mesh,
    cuts_logits,
    make_mesh,
    num_local_parts,
    num_parts,
    num_ranks,
    on_all_parts,
)

__all__ = [
    "ALL",
    "CP",
    "TP",
    "Axes",
    "by_vocabulary",
    "cache_partitions",
    "check_mesh",
    "cuts_logits",
    "make_mesh",
    "num_local_parts",
    "num_parts",
    "num_ranks",
    "on_all_parts",
]
