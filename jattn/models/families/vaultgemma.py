"""VaultGemma: a Gemma 2 without the norms behind attention and MLP."""

import dataclasses

from jattn.models.families.gemma2 import GEMMA2
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored

VAULTGEMMA = dataclasses.replace(
    GEMMA2,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    norm_placement="before",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.post_attention_layernorm": Stored(("model.layers.*.pre_feedforward_layernorm",)),
    },
)
