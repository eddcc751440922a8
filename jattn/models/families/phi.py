"""Phi-1, Phi-1.5, Phi-2: attention and MLP side by side, LayerNorm, partial rotation, biases everywhere."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, plain_mlp, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm


def _layer(keys: Keys, layer: int) -> LayerSpec:
    norm = QKNorm(norm=NormSpec("layer", keys["rms_norm_eps"]))
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        mlp=plain_mlp(keys, has_bias=True),
        qkv_bias=True,
        out_bias=True,
        qk_norm=norm if keys["qk_layernorm"] else None,
    )


_LAYER = "model.layers.*"
PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    defaults={
        **ROPE,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "qk_layernorm": False,
    },
    layer=_layer,
    model=lambda keys: {"has_head_bias": True},
    norm="layer",
    norm_placement="parallel",
    tensors={
        "embed_tokens": LLAMA_TENSORS["embed_tokens"],
        "layers.*.input_layernorm": LLAMA_TENSORS["layers.*.input_layernorm"],
        "layers.*.self_attn.qkv_proj": LLAMA_TENSORS["layers.*.self_attn.qkv_proj"],
        "layers.*.self_attn.q_norm": Stored((f"{_LAYER}.self_attn.q_layernorm",)),
        "layers.*.self_attn.k_norm": Stored((f"{_LAYER}.self_attn.k_layernorm",)),
        "layers.*.self_attn.o_proj": Stored((f"{_LAYER}.self_attn.dense",)),
        "layers.*.mlp.up_proj": Stored((f"{_LAYER}.mlp.fc1",)),
        "layers.*.mlp.down_proj": Stored((f"{_LAYER}.mlp.fc2",)),
        "norm": Stored(("model.final_layernorm",)),
        "lm_head": LLAMA_TENSORS["lm_head"],
    },
    aliases={"layer_norm_eps": "rms_norm_eps"},
    only={"tie_word_embeddings": ((False,), "its output projection has a bias of its own")},
)
