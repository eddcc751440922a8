"""Phi-3-small: block-sparse layers between dense ones, muP's scales, gegelu."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import LOCAL_STRIDED, ROPE
from jattn.models.families.reading import attention, local_strided, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import MLPSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    head_dim, scaling = keys["head_dim"], keys["rope_scaling"]
    if scaling is None and keys["rope_position_scale"] != 1:
        scaling = {"rope_type": "linear", "factor": keys["rope_position_scale"]}
    scale = keys["mup_attn_multiplier"] / head_dim if keys["mup_use_scaling"] else head_dim**-0.5
    size, act, limit = keys["intermediate_size"], keys["hidden_act"], keys["gegelu_limit"]
    gegelu = MLPSpec(intermediate_size=size, hidden_act=act, kind="gegelu", has_bias=True, limit=limit)
    return LayerSpec(
        attention=attention(keys, scale=scale, sparsity=local_strided(keys, layer)),
        rope=rope({**keys, "rope_scaling": scaling}),
        mlp=gegelu,
        qkv_bias=True,
        out_bias=True,
    )


def _model(keys: Keys) -> Mapping[str, Any]:
    width = keys["mup_width_multiplier"]
    return {
        "embedding_scale": keys["mup_embedding_multiplier"] or None,
        "logit_scale": 1 / width if width else None,
        "hidden_tokens": tuple(keys["dummy_token_indices"] or ()),
    }


PHI3SMALL = Family(
    model_type="phi3small",
    architecture="Phi3SmallForCausalLM",
    defaults={
        **ROPE,
        **LOCAL_STRIDED,
        "rope_theta": 1e6,
        "rope_position_scale": 1.0,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "hidden_act": "gegelu",
        "gegelu_limit": 20.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "mup_use_scaling": True,
        "mup_width_multiplier": 8.0,
        "mup_embedding_multiplier": 10.0,
        "mup_attn_multiplier": 1.0,
        "dummy_token_indices": None,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 100257),
    },
    layer=_layer,
    model=_model,
    norm="layer",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.qkv_proj": Stored(("model.layers.*.self_attn.query_key_value",)),
        "layers.*.self_attn.o_proj": Stored(("model.layers.*.self_attn.dense",)),
        "layers.*.mlp.gate_up_proj": Stored(("model.layers.*.mlp.up_proj",), "gates_in_turn"),
        "norm": Stored(("model.final_layernorm",)),
    },
    aliases={
        "ff_intermediate_size": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps",
        "rope_embedding_base": "rope_theta",
    },
    harmless=(  # projections have biases, whatever attention_bias says
        *("attention_bias", "gegelu_pad_to_256"),
        *("pad_sequence_to_multiple_of_64", "reorder_and_upcast_attn"),
    ),
)
