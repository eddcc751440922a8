"""nanochat: norms without weights, behind the embedding and the rope, too; a rope that turns back."""

import dataclasses

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, plain_mlp, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias, norm = bool(keys["attention_bias"]), NormSpec("rms_no_weight", keys["rms_norm_eps"])
    return llama_layer(
        keys,
        rope=dataclasses.replace(rope(keys), turns_back=True),
        mlp=plain_mlp(keys, has_bias=False),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=norm, comes_after_rope=True, has_weight=False),
    )


_ATTENTION = ("qkv_proj", "o_proj")
_MLP = "model.layers.*.mlp"
NANOCHAT = Family(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    defaults={
        **ROPE,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "final_logit_softcapping": 15.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attention_bias": False,
    },
    layer=_layer,
    model=lambda keys: {
        "has_embedding_norm": True,
        "final_logit_softcapping": keys["final_logit_softcapping"] and float(keys["final_logit_softcapping"]),
    },
    norm="rms_no_weight",
    tensors={
        **{name: LLAMA_TENSORS[name] for name in ("embed_tokens", "lm_head")},
        **{f"layers.*.self_attn.{name}": LLAMA_TENSORS[f"layers.*.self_attn.{name}"] for name in _ATTENTION},
        "layers.*.mlp.up_proj": Stored((f"{_MLP}.fc1",)),
        "layers.*.mlp.down_proj": Stored((f"{_MLP}.fc2",)),
    },
)
