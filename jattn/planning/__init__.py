"""Plans of steps: the implementation of each layer configuration and the kernel plans that layers share."""

from jattn.implementations.selection import KernelFallbackWarning
from jattn.planning.context_parallel import plan_on_rank
from jattn.planning.layer_plans import (
    COLUMNS,
    LayerPlan,
    RegionPlan,
    format_table,
    plan_layers,
    table_rows,
)
from jattn.planning.plans import (
    CascadePlan,
    ContextParallelRegion,
    Plan,
    check_plan_matches,
    plan,
    plan_of_layer,
)

__all__ = [
    "COLUMNS",
    "CascadePlan",
    "ContextParallelRegion",
    "KernelFallbackWarning",
    "LayerPlan",
    "Plan",
    "RegionPlan",
    "check_plan_matches",
    "format_table",
    "plan",
    "plan_layers",
    "plan_of_layer",
    "plan_on_rank",
    "table_rows",
]
