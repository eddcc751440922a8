"""DBRX: LayerNorm without biases, clipped projections, experts as fine as four of sixteen."""

from jattn.models.experts import Routing
from jattn.models.families.family import Family, Keys
from jattn.models.families.reading import attention, experts
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.rope import Rope


def _layer(keys: Keys, layer: int) -> LayerSpec:
    clip_qkv, norm = keys["attn_config.clip_qkv"], keys["ffn_config.moe_normalize_expert_weights"]
    routing = Routing(scores="softmax", normalizes=norm is not None)
    return LayerSpec(
        attention=attention(keys),
        rope=Rope(head_dim=keys["head_dim"], rope_theta=keys["rope_theta"]),
        clip_qkv=float(clip_qkv) if clip_qkv else None,
        mlp=experts(keys, routing),
    )


_BLOCK = "transformer.blocks.*"
_ATTENTION, _EXPERTS = f"{_BLOCK}.norm_attn_norm", f"{_BLOCK}.ffn.experts.mlp"
DBRX = Family(
    model_type="dbrx",
    architecture="DbrxForCausalLM",
    nested=("attn_config", "ffn_config"),
    defaults={
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "intermediate_size": 3584,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "attn_config.clip_qkv": None,
        "ffn_config.moe_normalize_expert_weights": 1.0,
    },
    layer=_layer,
    norm="layer_no_bias",
    tensors={
        "embed_tokens": Stored(("transformer.wte",)),
        "layers.*.input_layernorm": Stored((f"{_ATTENTION}.norm_1",)),
        "layers.*.self_attn.qkv_proj": Stored((f"{_ATTENTION}.attn.Wqkv",), "heads_stacked"),
        "layers.*.self_attn.o_proj": Stored((f"{_ATTENTION}.attn.out_proj",)),
        "layers.*.post_attention_layernorm": Stored((f"{_ATTENTION}.norm_2",)),
        "layers.*.mlp.router": Stored((f"{_BLOCK}.ffn.router.layer",)),
        "layers.*.mlp.gate_up_proj.weight": Stored((f"{_EXPERTS}.w1", f"{_EXPERTS}.v1"), "experts_below"),
        "layers.*.mlp.down_proj.weight": Stored((f"{_EXPERTS}.w2",), "experts_down_below"),
        "norm": Stored(("transformer.norm_f",)),
        "lm_head": Stored(("lm_head",)),
    },
    aliases={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "attn_config.kv_n_heads": "num_key_value_heads",
        "attn_config.rope_theta": "rope_theta",
        "ffn_config.ffn_hidden_size": "intermediate_size",
        "ffn_config.moe_num_experts": "num_experts",
        "ffn_config.moe_top_k": "num_experts_per_tok",
    },
    only={
        "tie_word_embeddings": ((False,), "logits have a matrix of their own"),
        "ffn_config.ffn_act_fn": (({"name": "silu"},), "its experts are gated by silu"),
        "ffn_config.moe_normalize_expert_weights": ((1, 1.0), "scores are divided by their sum"),
    },
    harmless=(
        *("rope_parameters", "ffn_config.hidden_size"),  # its own code reads attn_config's rope
        *("ffn_config.moe_jitter_eps", "ffn_config.moe_loss_weight"),
    ),
    prefix="transformer.",
)
