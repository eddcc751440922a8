"""InternLM2 and 2.5: a Llama under other names, its queries, keys and values in one matrix."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["bias"])
    return llama_layer(keys, qkv_bias=has_bias, out_bias=has_bias)


_LAYER = "model.layers.*"
_MLP = f"{_LAYER}.feed_forward"
INTERNLM2 = Family(
    model_type="internlm2",
    architecture="InternLM2ForCausalLM",
    defaults={
        **ROPE,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "bias": True,
    },
    layer=_layer,
    tensors={
        "embed_tokens": Stored(("model.tok_embeddings",)),
        "layers.*.input_layernorm": Stored((f"{_LAYER}.attention_norm",)),
        "layers.*.self_attn.qkv_proj": Stored((f"{_LAYER}.attention.wqkv",)),
        "layers.*.self_attn.o_proj": Stored((f"{_LAYER}.attention.wo",)),
        "layers.*.post_attention_layernorm": Stored((f"{_LAYER}.ffn_norm",)),
        "layers.*.mlp.gate_up_proj": Stored((f"{_MLP}.w1", f"{_MLP}.w3"), "gates_apart"),
        "layers.*.mlp.down_proj": Stored((f"{_MLP}.w2",)),
        "norm": Stored(("model.norm",)),
        "lm_head": Stored(("output",)),
    },
    harmless=("attn_implementation",),
)
