"""Plans of steps: the implementation of each layer configuration and the kernel plans that layers share."""

from jattn.cascade import can_cascade
from jattn.implementations.selection import KernelFallbackWarning
from jattn.planning.context_parallel import plan_on_rank
from jattn.planning.layer_plans import COLUMNS, LayerPlan, format_table, plan_layers, table_rows
from jattn.planning.plans import ContextParallelRegion, Plan, build_plan, check_plan_matches, plan

__all__ = [
    "COLUMNS",
    "ContextParallelRegion",
    "KernelFallbackWarning",
    "LayerPlan",
    "Plan",
    "build_plan",
    "can_cascade",
    "check_plan_matches",
    "format_table",
    "plan",
    "plan_layers",
    "plan_on_rank",
    "table_rows",
]
