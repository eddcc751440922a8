"""GPT-2: learned positions, LayerNorm, matrices stored the other way round."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.reading import attention, plain_mlp
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    scale = keys["head_dim"] ** -0.5 if keys["scale_attn_weights"] else 1.0
    by_layer = layer + 1 if keys["scale_attn_by_inverse_layer_idx"] else 1
    return LayerSpec(
        attention=attention(keys, scale=scale / by_layer),
        mlp=plain_mlp(keys, has_bias=True),
        qkv_bias=True,
        out_bias=True,
    )


_BLOCK = "transformer.h.*"
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    defaults={
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": lambda keys: 4 * keys["hidden_size"],
        "max_position_embeddings": 1024,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    layer=_layer,
    model=lambda keys: {"position_offset": 0},
    norm="layer",
    tensors={
        "embed_tokens": Stored(("transformer.wte",)),
        "embed_positions": Stored(("transformer.wpe",)),
        "layers.*.input_layernorm": Stored((f"{_BLOCK}.ln_1",)),
        "layers.*.self_attn.qkv_proj": Stored((f"{_BLOCK}.attn.c_attn",), "heads_stacked", is_turned=True),
        "layers.*.self_attn.o_proj": Stored((f"{_BLOCK}.attn.c_proj",), is_turned=True),
        "layers.*.post_attention_layernorm": Stored((f"{_BLOCK}.ln_2",)),
        "layers.*.mlp.up_proj": Stored((f"{_BLOCK}.mlp.c_fc",), is_turned=True),
        "layers.*.mlp.down_proj": Stored((f"{_BLOCK}.mlp.c_proj",), is_turned=True),
        "norm": Stored(("transformer.ln_f",)),
        "lm_head": Stored(("lm_head",)),
    },
    aliases={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    harmless=(
        *("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
        *("summary_proj_to_labels", "n_special", "predict_special_tokens"),
    ),
    prefix="transformer.",
)
