"""Phi-3-small: block-sparse layers between dense ones, muP's scales, gegelu."""

from collections.abc import Mapping
from typing import Any

from jattn.masks import LocalStrided
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import LLAMA_TENSORS, attention, rope
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import MLPSpec
from pallas_kernels.checks import unsupported


def _sparsity(keys: Keys, layer: int) -> LocalStrided | None:
    """What a layer's heads see of a text; None = everything before."""
    size, kernel = keys["blocksparse_block_size"], keys["blocksparse_triton_kernel_block_size"]
    if size != kernel:
        what, way_out = (
            f"blocksparse_triton_kernel_block_size {kernel}",
            f"Supported: {size}, the blocksparse_block_size",
        )
        raise unsupported(what, "patterns have blocks of one size", way_out)
    every = keys["dense_attention_every_n_layers"]
    if every and (layer + 1) % every == 0:
        return None
    return LocalStrided(
        block_size=size,
        local_blocks=keys["blocksparse_num_local_blocks"],
        vert_stride=keys["blocksparse_vert_stride"],
        homo_head=bool(keys["blocksparse_homo_head_pattern"]),
    )


def _layer(keys: Keys, layer: int) -> LayerSpec:
    head_dim, scaling = keys["head_dim"], keys["rope_scaling"]
    if scaling is None and keys["rope_position_scale"] != 1:
        scaling = {"rope_type": "linear", "factor": keys["rope_position_scale"]}
    scale = keys["mup_attn_multiplier"] / head_dim if keys["mup_use_scaling"] else head_dim**-0.5
    size, limit = keys["intermediate_size"], keys["gegelu_limit"]
    return LayerSpec(
        attention=attention(keys, scale=scale, sparsity=_sparsity(keys, layer)),
        rope=rope({**keys, "rope_scaling": scaling}),
        mlp=MLPSpec(
            intermediate_size=size, hidden_act=keys["hidden_act"], kind="gegelu", has_bias=True, limit=limit
        ),
        qkv_bias=True,
        out_bias=True,
    )


def _model(keys: Keys) -> Mapping[str, Any]:
    width = keys["mup_width_multiplier"]
    return {
        "embedding_scale": keys["mup_embedding_multiplier"] or None,
        "logit_scale": 1 / width if width else None,
        "hidden_tokens": tuple(keys["dummy_token_indices"] or ()),
    }


PHI3SMALL = Family(
    model_type="phi3small",
    architecture="Phi3SmallForCausalLM",
    defaults={
        **ROPE,
        "rope_theta": 1e6,
        "rope_position_scale": 1.0,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "hidden_act": "gegelu",
        "gegelu_limit": 20.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "blocksparse_block_size": 64,
        "blocksparse_triton_kernel_block_size": 64,
        "blocksparse_homo_head_pattern": False,
        "blocksparse_num_local_blocks": 16,
        "blocksparse_vert_stride": 8,
        "dense_attention_every_n_layers": 2,
        "mup_use_scaling": True,
        "mup_width_multiplier": 8.0,
        "mup_embedding_multiplier": 10.0,
        "mup_attn_multiplier": 1.0,
        "dummy_token_indices": None,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
    },
    layer=_layer,
    model=_model,
    norm="layer",
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.qkv_proj": Stored(("model.layers.*.self_attn.query_key_value",)),
        "layers.*.self_attn.o_proj": Stored(("model.layers.*.self_attn.dense",)),
        "layers.*.mlp.gate_up_proj": Stored(("model.layers.*.mlp.up_proj",), "gates_in_turn"),
        "norm": Stored(("model.final_layernorm",)),
    },
    aliases={
        "ff_intermediate_size": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps",
        "rope_embedding_base": "rope_theta",
    },
    harmless=(
        "attention_bias",  # its projections have one, whatever this says
        "gegelu_pad_to_256",
        "embedding_dropout_prob",
        "pad_sequence_to_multiple_of_64",
        "reorder_and_upcast_attn",
    ),
)
