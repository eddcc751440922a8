"""InternLM2, InternLM3 and IQuest-Coder."""

import dataclasses

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import gated_mlp, llama_layer
from jattn.models.families.llama import LLAMA
from jattn.models.loading.tensor_layouts import HFTensors
from jattn.models.specs import LayerSpec


# InternLM2 and 2.5: a Llama with other tensor names; queries, keys and values in one matrix.
def _internlm2_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["bias"])
    return llama_layer(keys, qkv_bias=has_bias, out_bias=has_bias)


_INTERNLM2_LAYER = "model.layers.*"
_INTERNLM2_MLP = f"{_INTERNLM2_LAYER}.feed_forward"
INTERNLM2 = Family(
    model_type="internlm2",
    architecture="InternLM2ForCausalLM",
    config_class="llama",
    keys=f"{ROPE}",
    defaults={"bias": True},
    build_layer=_internlm2_layer,
    tensors={
        "embed_tokens": HFTensors(("model.tok_embeddings",)),
        "layers.*.input_layernorm": HFTensors((f"{_INTERNLM2_LAYER}.attention_norm",)),
        "layers.*.self_attn.qkv_proj": HFTensors((f"{_INTERNLM2_LAYER}.attention.wqkv",)),
        "layers.*.self_attn.o_proj": HFTensors((f"{_INTERNLM2_LAYER}.attention.wo",)),
        "layers.*.post_attention_layernorm": HFTensors((f"{_INTERNLM2_LAYER}.ffn_norm",)),
        "layers.*.mlp.gate_up_proj": HFTensors(
            (f"{_INTERNLM2_MLP}.w1", f"{_INTERNLM2_MLP}.w3"), "gates_separate"
        ),
        "layers.*.mlp.down_proj": HFTensors((f"{_INTERNLM2_MLP}.w2",)),
        "norm": HFTensors(("model.norm",)),
        "lm_head": HFTensors(("output",)),
    },
)


# InternLM3 and IQuest-Coder: a Llama with other defaults.
def _internlm3_layer(keys: Keys, layer: int) -> LayerSpec:
    """Build a layer; its key `bias` is for all projections except Q, K and V."""
    has_bias = bool(keys["mlp_bias"])
    mlp = gated_mlp(keys, has_bias=has_bias)
    return llama_layer(keys, mlp=mlp, qkv_bias=bool(keys["attention_bias"]), out_bias=has_bias)


INTERNLM3 = dataclasses.replace(
    LLAMA,
    model_type="internlm3",
    architecture="InternLM3ForCausalLM",
    other_architectures=("LlamaForCausalLM",),
    config_class="llama",
    keys=ROPE,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    build_layer=_internlm3_layer,
)
IQUESTCODER = dataclasses.replace(
    LLAMA,
    model_type="iquestcoder",
    architecture="IQuestCoderForCausalLM",
    other_architectures=("LlamaForCausalLM",),
    config_class="llama",
    keys=f"{ROPE} attention_bias mlp_bias",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    supported_values={**LLAMA.supported_values, "clip_qkv": ((), "no checkpoint has it")},
)
