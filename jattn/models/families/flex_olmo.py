"""FlexOlmo: OLMo 2 with experts in every layer."""

from jattn.models.families.family import Family
from jattn.models.families.olmo2 import OLMO2
from jattn.models.families.olmoe import OLMOE
from jattn.models.families.tensors import (
    ALL_HEADS_TENSORS,
    EXPERT_TENSORS,
    FUSED_EXPERT_TENSORS,
    NORMS_AFTER_TENSORS,
)

FLEX_OLMO = Family(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    defaults={
        **OLMOE.defaults,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 100257,
        "num_experts": 7,
        "num_experts_per_tok": 5,
    },
    layer=OLMOE.layer,
    norm=OLMO2.norm,
    norm_placement=OLMO2.norm_placement,
    tensors={**NORMS_AFTER_TENSORS, **ALL_HEADS_TENSORS, **EXPERT_TENSORS},
    aliases=OLMOE.aliases,
    other_tensors=FUSED_EXPERT_TENSORS,
)
