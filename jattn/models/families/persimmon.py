"""Persimmon: LayerNorm, also of queries and keys; MLPs without gates, half of each head rotated."""

from jattn.models.families.family import Family
from jattn.models.families.keys import ROPE
from jattn.models.families.phi import PHI
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored

_LAYER = "model.layers.*"
PERSIMMON = Family(
    model_type="persimmon",
    architecture="PersimmonForCausalLM",
    defaults={
        **ROPE,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 16384,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "qk_layernorm": True,
    },
    layer=PHI.layer,
    norm="layer",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.qkv_proj": Stored((f"{_LAYER}.self_attn.query_key_value",)),
        "layers.*.self_attn.o_proj": Stored((f"{_LAYER}.self_attn.dense",)),
        "layers.*.self_attn.q_norm": Stored((f"{_LAYER}.self_attn.q_layernorm",)),
        "layers.*.self_attn.k_norm": Stored((f"{_LAYER}.self_attn.k_layernorm",)),
        "layers.*.mlp.up_proj": Stored((f"{_LAYER}.mlp.dense_h_to_4h",)),
        "layers.*.mlp.down_proj": Stored((f"{_LAYER}.mlp.dense_4h_to_h",)),
        "norm": Stored(("model.final_layernorm",)),
    },
    aliases={"layer_norm_eps": "rms_norm_eps"},
)
