"""MPT: ALiBi, LayerNorm without biases, a plain MLP."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.reading import alibi_slopes, attention
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import MLPSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    clip_qkv, scale = keys["attn_config.clip_qkv"], keys["attn_config.softmax_scale"]
    return LayerSpec(
        attention=attention(keys, scale=float(scale or keys["head_dim"] ** -0.5)),
        alibi_slopes=alibi_slopes(keys["num_attention_heads"], keys["attn_config.alibi_bias_max"]),
        clip_qkv=float(clip_qkv) if clip_qkv else None,
        mlp=MLPSpec(intermediate_size=keys["intermediate_size"], hidden_act="gelu", kind="plain"),
    )


_BLOCK = "transformer.blocks.*"
MPT = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    other_architectures=("MPTForCausalLM",),
    nested=("attn_config",),
    defaults={
        "vocab_size": 50368,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": lambda keys: int(keys["expansion_ratio"] * keys["hidden_size"]),
        "expansion_ratio": 4.0,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attn_config.clip_qkv": None,
        "attn_config.softmax_scale": None,
        "attn_config.alibi_bias_max": 8.0,
    },
    layer=_layer,
    norm="layer_no_bias",
    tensors={
        "embed_tokens": Stored(("transformer.wte",)),
        "layers.*.input_layernorm": Stored((f"{_BLOCK}.norm_1",)),
        "layers.*.self_attn.qkv_proj": Stored((f"{_BLOCK}.attn.Wqkv",), "heads_stacked"),
        "layers.*.self_attn.o_proj": Stored((f"{_BLOCK}.attn.out_proj",)),
        "layers.*.post_attention_layernorm": Stored((f"{_BLOCK}.norm_2",)),
        "layers.*.mlp.up_proj": Stored((f"{_BLOCK}.ffn.up_proj",)),
        "layers.*.mlp.down_proj": Stored((f"{_BLOCK}.ffn.down_proj",)),
        "norm": Stored(("transformer.norm_f",)),
        "lm_head": Stored(("lm_head",)),
    },
    aliases={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    only={
        "no_bias": ((True,), "its layers have no biases"),
        "norm_type": (("low_precision_layernorm", "layernorm"), "its norms are LayerNorms"),
        "logit_scale": ((), "logits are not scaled"),
        "attn_config.alibi": ((True,), "positions are told by ALiBi alone"),
        "attn_config.attn_type": (("multihead_attention",), "each query head has its own keys"),
        "attn_config.prefix_lm": ((False,), "decoders are causal"),
        "attn_config.qk_ln": ((False,), "queries and keys are not normalised"),
    },
    harmless=(
        "embedding_fraction",
        "learned_pos_emb",  # with ALiBi there are none
        "verbose",
        "init_config",
        "tokenizer_name",
        "attn_config.attn_uses_sequence_id",  # of packed training
    ),
    prefix="transformer.",
)
