"""ERNIE 4.5: a Llama that rotates neighbours."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import gated_mlp, llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["use_bias"])
    mlp, pairs = gated_mlp(keys, has_bias=has_bias), rope(keys, interleaved=True)
    return llama_layer(keys, rope=pairs, mlp=mlp, qkv_bias=has_bias, out_bias=has_bias)


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    other_architectures=("Ernie4_5_ForCausalLM",),
    defaults={
        **ROPE,
        "rope_theta": 500000.0,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_bias": False,
    },
    layer=_layer,
    tensors=LLAMA_TENSORS,
    harmless=("compression_ratio", "fuse_rope", "use_rmsnorm", "micro_batch_size"),
)
