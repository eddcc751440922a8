"""StarCoder2: LayerNorm, a plain MLP, biases, a window in every layer where there is one."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import llama_layer, plain_mlp
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["use_bias"])
    return llama_layer(
        keys,
        window=keys["sliding_window"],
        mlp=plain_mlp(keys, has_bias=has_bias),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


_MLP = "model.layers.*.mlp"
STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    defaults={
        **ROPE,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "sliding_window": None,
        "use_bias": True,
    },
    layer=_layer,
    norm="layer",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.mlp.up_proj": Stored((f"{_MLP}.c_fc",)),
        "layers.*.mlp.down_proj": Stored((f"{_MLP}.c_proj",)),
    },
    aliases={"norm_epsilon": "rms_norm_eps"},
    only={
        "mlp_type": (("default",), "its MLPs are plain"),
        "norm_type": (("layer_norm",), "its norms are LayerNorms"),
    },
    harmless=("layer_types",),
)
