"""GPT-J: attention and MLP side by side behind one LayerNorm; a part of each head is rotated, neighbours."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.gpt2 import GPT2
from jattn.models.families.reading import llama_layer, plain_mlp
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.rope import Rope


def _layer(keys: Keys, layer: int) -> LayerSpec:
    part = (keys["rotary_dim"] or keys["head_dim"]) / keys["head_dim"]
    pairs = Rope(head_dim=keys["head_dim"], partial_rotary_factor=part, interleaved=True)
    return llama_layer(keys, rope=pairs, mlp=plain_mlp(keys, has_bias=True))


_BLOCK = "transformer.h.*"
GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    defaults={
        **{key: value for key, value in GPT2.defaults.items() if not key.startswith("scale_")},
        "vocab_size": 50400,
        "hidden_size": 4096,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rotary_dim": 64,
    },
    layer=_layer,
    model=lambda keys: {"has_head_bias": True},
    norm="layer",
    norm_placement="parallel",
    tensors={
        "embed_tokens": Stored(("transformer.wte",)),
        "layers.*.input_layernorm": Stored((f"{_BLOCK}.ln_1",)),
        "layers.*.self_attn.qkv_proj": Stored(
            tuple(f"{_BLOCK}.attn.{part}_proj" for part in "qkv"), "heads_apart"
        ),
        "layers.*.self_attn.o_proj": Stored((f"{_BLOCK}.attn.out_proj",)),
        "layers.*.mlp.up_proj": Stored((f"{_BLOCK}.mlp.fc_in",)),
        "layers.*.mlp.down_proj": Stored((f"{_BLOCK}.mlp.fc_out",)),
        "norm": Stored(("transformer.ln_f",)),
        "lm_head": Stored(("lm_head",)),
    },
    aliases=GPT2.aliases,
    only={
        "tie_word_embeddings": ((False,), "its output projection has a bias of its own"),
        "rotary": ((True,), "positions are told by a rope"),
        "scale_attn_weights": ((True,), "scores are scaled"),
    },
    harmless=GPT2.harmless,
    prefix="transformer.",
)
