"""GPT-Neo: learned positions, LayerNorm, a window in every other layer, scores that are not scaled."""

from typing import Any

from jattn.models.families.family import Family, Keys
from jattn.models.families.gpt2 import GPT2
from jattn.models.families.reading import attention, plain_mlp, window_of
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec, require_one_a_layer
from pallas_kernels.checks import require, require_one_of

_KINDS = ("global", "local")


def _is_pair(said: Any) -> bool:
    is_pair = isinstance(said, list | tuple) and len(said) == 2
    return is_pair and isinstance(said[0], list | tuple) and isinstance(said[1], int)


def _layer(keys: Keys, layer: int) -> LayerSpec:
    said = keys["attention_types"] or [[_KINDS, keys["num_hidden_layers"] // 2]]
    are_pairs = isinstance(said, list | tuple) and all(map(_is_pair, said))
    rule = "be a list of pairs, kinds and how often they come"
    require(are_pairs, "attention_types", rule, repr(said)[:60])
    kinds = [kind for of, times in said for kind in list(of) * times]
    require_one_a_layer("attention_types", kinds, keys["num_hidden_layers"])
    require_one_of("attention_types", kinds[layer], _KINDS)
    window = window_of(keys["window_size"]) if kinds[layer] == "local" else None
    mlp = plain_mlp(keys, has_bias=True)
    return LayerSpec(attention=attention(keys, window=window, scale=1.0), mlp=mlp, out_bias=True)


_BLOCK = "transformer.h.*"
GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    defaults={
        **{key: value for key, value in GPT2.defaults.items() if not key.startswith("scale_")},
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "attention_types": None,
        "window_size": 256,
    },
    layer=_layer,
    model=GPT2.model,
    norm="layer",
    tensors={
        **{name: Stored(stored.names) for name, stored in GPT2.tensors.items()},
        "layers.*.self_attn.qkv_proj": Stored(
            tuple(f"{_BLOCK}.attn.attention.{part}_proj" for part in "qkv"), "heads_apart"
        ),
        "layers.*.self_attn.o_proj": Stored((f"{_BLOCK}.attn.attention.out_proj",)),
    },
    aliases={
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    harmless=(*GPT2.harmless, "attention_layers"),
    prefix="transformer.",
)
