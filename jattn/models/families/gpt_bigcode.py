"""StarCoder, SantaCoder: GPT-2 with one kv head."""

import dataclasses

from jattn.models.families.family import Keys
from jattn.models.families.gpt2 import GPT2
from jattn.models.families.reading import attention, plain_mlp
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    scale = keys["head_dim"] ** -0.5 if keys["scale_attn_weights"] else 1.0
    of_one = attention(keys, num_kv_heads=1, scale=scale)
    return LayerSpec(attention=of_one, mlp=plain_mlp(keys, has_bias=True), qkv_bias=True, out_bias=True)


GPT_BIGCODE = dataclasses.replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    defaults={
        **{key: value for key, value in GPT2.defaults.items() if key != "scale_attn_by_inverse_layer_idx"},
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 1,
    },
    layer=_layer,
    tensors={name: Stored(stored.names, stored.layout) for name, stored in GPT2.tensors.items()},
    only={
        "multi_query": ((True,), "all query heads have the same keys"),
        "scale_attn_by_inverse_layer_idx": ((False,), "all layers scale scores alike"),
    },
    harmless=(
        *GPT2.harmless,
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner"),
        *("max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache"),
        *("validate_runner_input", "runner_max_sequence_length"),
    ),
)
