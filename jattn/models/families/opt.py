"""OPT: learned positions, LayerNorm, plain MLPs."""

from collections.abc import Mapping
from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.reading import attention, plain_mlp
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from pallas_kernels.checks import unsupported


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["enable_bias"])
    mlp = plain_mlp(keys, has_bias=has_bias)
    return LayerSpec(attention=attention(keys), mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


def _model(keys: Keys) -> Mapping[str, Any]:
    width, hidden_size = keys["word_embed_proj_dim"] or keys["hidden_size"], keys["hidden_size"]
    if width != hidden_size:
        reason, way_out = "embeddings are not projected", f"Supported: {hidden_size}, the hidden_size"
        raise unsupported(f"word_embed_proj_dim {width}", reason, way_out)
    return {"position_offset": 2}


_DECODER, _LAYER = "model.decoder", "model.decoder.layers.*"
_QKV = tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv")
OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    defaults={
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
        "hidden_act": "relu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "enable_bias": True,
        "word_embed_proj_dim": None,
    },
    layer=_layer,
    model=_model,
    norm="layer",
    tensors={
        "embed_tokens": Stored((f"{_DECODER}.embed_tokens",)),
        "embed_positions": Stored((f"{_DECODER}.embed_positions",)),
        "layers.*.input_layernorm": Stored((f"{_LAYER}.self_attn_layer_norm",)),
        "layers.*.self_attn.qkv_proj": Stored(_QKV, "heads_apart"),
        "layers.*.self_attn.o_proj": Stored((f"{_LAYER}.self_attn.out_proj",)),
        "layers.*.post_attention_layernorm": Stored((f"{_LAYER}.final_layer_norm",)),
        "layers.*.mlp.up_proj": Stored((f"{_LAYER}.fc1",)),
        "layers.*.mlp.down_proj": Stored((f"{_LAYER}.fc2",)),
        "norm": Stored((f"{_DECODER}.final_layer_norm",)),
        "lm_head": Stored(("lm_head",)),
    },
    aliases={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    only={
        "do_layer_norm_before": ((True,), "norms stand before attention and MLP"),
        "_remove_final_layer_norm": ((False,), "a norm stands behind the last layer"),
        "layer_norm_elementwise_affine": ((True,), "its norms have weights"),
    },
)
