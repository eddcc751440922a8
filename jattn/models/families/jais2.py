"""Jais 2: a Llama with LayerNorm and MLPs without gates."""

from jattn.models.families.arcee import ARCEE
from jattn.models.families.family import Family
from jattn.models.families.llama import LLAMA

JAIS2 = Family(
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 150024,
        "attention_bias": True,
        "mlp_bias": True,
    },
    layer=ARCEE.layer,
    norm="layer",
    tensors=ARCEE.tensors,
    aliases={"layer_norm_eps": "rms_norm_eps"},
)
