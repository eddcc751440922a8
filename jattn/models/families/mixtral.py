"""Mixtral: Mistral with experts for MLPs."""

from jattn.models.experts import Routing
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import experts, llama_layer
from jattn.models.families.tensors import FUSED_EXPERT_TENSORS, LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, window=keys["sliding_window"], mlp=experts(keys, Routing(normalizes=True)))


_MOE, _EXPERT = "model.layers.*.block_sparse_moe", "model.layers.*.block_sparse_moe.experts.#"
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        **ROPE,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    layer=_layer,
    tensors={
        **LLAMA_TENSORS,
        "layers.*.mlp.router": Stored((f"{_MOE}.gate",)),
        "layers.*.mlp.gate_up_proj.weight": Stored(
            (f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"), "experts_apart"
        ),
        "layers.*.mlp.down_proj.weight": Stored((f"{_EXPERT}.w2.weight",), "experts_down_apart"),
    },
    other_tensors=FUSED_EXPERT_TENSORS,
    aliases={"num_local_experts": "num_experts"},
    harmless=("layer_types", "attention_bias"),
)
