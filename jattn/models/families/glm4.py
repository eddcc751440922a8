"""GLM-4: rope of neighbours in half of each head; GLM-4-0414: with norms around."""

import dataclasses

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    turned = rope(keys, interleaved=True, is_partial=True)
    return llama_layer(keys, rope=turned, qkv_bias=bool(keys["attention_bias"]))


_LAYER = "model.layers.*"
GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    defaults={
        **ROPE,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "eos_token_id": [151329, 151336, 151338],
        "attention_bias": True,
    },
    layer=_layer,
    tensors={**LLAMA_TENSORS, "layers.*.mlp.gate_up_proj": Stored((f"{_LAYER}.mlp.gate_up_proj",))},
)
GLM4 = dataclasses.replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    norm_placement="around",
    tensors={
        **GLM.tensors,
        "layers.*.post_attention_layernorm": Stored((f"{_LAYER}.post_self_attn_layernorm",)),
        "layers.*.pre_feedforward_layernorm": Stored((f"{_LAYER}.post_attention_layernorm",)),
        "layers.*.post_feedforward_layernorm": Stored((f"{_LAYER}.post_mlp_layernorm",)),
    },
)
