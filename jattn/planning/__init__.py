"""The plan of a step: what serves each kind of layer (choosing), and what the layers share (works)."""

from jattn.cascade import can_cascade
from jattn.implementations.selection import KernelFallbackWarning
from jattn.planning.context_parallel import plan_on_rank
from jattn.planning.layer_plans import COLUMNS, LayerPlan, aligned, choose_layers, table_lines
from jattn.planning.plans import Plan, RankRegion, check_batch_of, plan, planned

__all__ = [
    "COLUMNS",
    "KernelFallbackWarning",
    "LayerPlan",
    "Plan",
    "RankRegion",
    "aligned",
    "can_cascade",
    "check_batch_of",
    "choose_layers",
    "plan",
    "plan_on_rank",
    "planned",
    "table_lines",
]
