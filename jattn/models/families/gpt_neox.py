"""GPT-NeoX, Pythia: attention and MLP side by side, each behind its own LayerNorm; partial rotation."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, plain_mlp, rope
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        rope=rope(keys, is_partial=True),
        mlp=plain_mlp(keys, has_bias=True),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


_LAYER = "gpt_neox.layers.*"
GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    defaults={
        **ROPE,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    layer=_layer,
    model=lambda keys: {"norm_placement": "parallel_apart" if keys["use_parallel_residual"] else "before"},
    norm="layer",
    tensors={
        "embed_tokens": Stored(("gpt_neox.embed_in",)),
        "layers.*.input_layernorm": Stored((f"{_LAYER}.input_layernorm",)),
        "layers.*.attention_layernorm": Stored((f"{_LAYER}.input_layernorm",)),
        "layers.*.mlp_layernorm": Stored((f"{_LAYER}.post_attention_layernorm",)),
        "layers.*.self_attn.qkv_proj": Stored((f"{_LAYER}.attention.query_key_value",)),
        "layers.*.self_attn.o_proj": Stored((f"{_LAYER}.attention.dense",)),
        "layers.*.post_attention_layernorm": Stored((f"{_LAYER}.post_attention_layernorm",)),
        "layers.*.mlp.up_proj": Stored((f"{_LAYER}.mlp.dense_h_to_4h",)),
        "layers.*.mlp.down_proj": Stored((f"{_LAYER}.mlp.dense_4h_to_h",)),
        "norm": Stored(("gpt_neox.final_layer_norm",)),
        "lm_head": Stored(("embed_out",)),
    },
    aliases={
        "layer_norm_eps": "rms_norm_eps",
        "rotary_pct": "partial_rotary_factor",
        "rotary_emb_base": "rope_theta",
    },
    prefix="gpt_neox.",
)
