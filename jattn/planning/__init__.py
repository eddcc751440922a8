"""The plan of a step: what serves each kind of layer (choosing), and what the layers share (works)."""

from jattn.implementations.choice import KernelFallbackWarning
from jattn.planning.cascading import can_cascade
from jattn.planning.choosing import choose_layers
from jattn.planning.layer_plans import COLUMNS, LayerPlan, aligned, table_lines
from jattn.planning.plans import Plan, check_batch_of, plan, planned

__all__ = [
    "COLUMNS",
    "KernelFallbackWarning",
    "LayerPlan",
    "Plan",
    "aligned",
    "can_cascade",
    "check_batch_of",
    "choose_layers",
    "plan",
    "planned",
    "table_lines",
]
