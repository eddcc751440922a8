"""Jais 2: a Llama with LayerNorm and MLPs without gates."""

import dataclasses

from jattn.models.families.arcee import ARCEE

JAIS2 = dataclasses.replace(
    ARCEE,
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    defaults={
        **ARCEE.defaults,
        "max_position_embeddings": 8192,
        "bos_token_id": 0,
        "eos_token_id": 150024,
        "attention_bias": True,
        "mlp_bias": True,
    },
    norm="layer",
    aliases={"layer_norm_eps": "rms_norm_eps"},
)
