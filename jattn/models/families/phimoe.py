"""Phi-3.5-MoE: two experts a token, weighed one after the other; LayerNorm, longrope, biases."""

from jattn.models.experts import Routing
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.mixtral import MIXTRAL
from jattn.models.families.reading import experts, llama_layer, rope
from jattn.models.families.tensors import FUSED_EXPERT_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    routing = Routing(scores="one_by_one", margin=2 * keys["router_jitter_noise"])
    return llama_layer(
        keys,
        window=keys["sliding_window"],
        rope=rope(keys),
        mlp=experts(keys, routing),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


PHIMOE = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    other_architectures=("PhiMoEForCausalLM",),
    defaults={
        **ROPE,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": None,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "attention_bias": False,
        "lm_head_bias": False,
    },
    layer=_layer,
    model=lambda keys: {"has_head_bias": bool(keys["lm_head_bias"])},
    norm="layer",
    tensors=MIXTRAL.tensors,
    other_tensors={
        **FUSED_EXPERT_TENSORS,
        "layers.*.mlp.router": Stored(("model.layers.*.mlp.router",)),
    },
    aliases={"num_local_experts": "num_experts"},
    only={"num_experts_per_tok": ((2,), "its scores are made for two experts")},
    harmless=("input_jitter_noise",),
)
