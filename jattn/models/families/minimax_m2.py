"""MiniMax-M2: experts by corrected sigmoids, a part of each head rotated, all heads normalised as one."""

from jattn.models.experts import Routing
from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.mixtral import MIXTRAL
from jattn.models.families.reading import experts, llama_layer, rope
from jattn.models.families.tensors import ALL_HEADS_TENSORS, FUSED_EXPERT_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.specs import NormSpec, QKNorm


def _layer(keys: Keys, layer: int) -> LayerSpec:
    part = keys["partial_rotary_factor"]
    if part is None and keys["rotary_dim"]:
        part = keys["rotary_dim"] / keys["head_dim"]
    return llama_layer(
        keys,
        rope=rope({**keys, "partial_rotary_factor": part}, is_partial=True),
        mlp=experts(keys, Routing(scores="sigmoid", normalizes=True, is_corrected=True)),
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"]), over="all_heads"),
    )


_MLP = "model.layers.*.block_sparse_moe"
MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        **ROPE,
        "rope_theta": 5e6,
        "rotary_dim": None,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    layer=_layer,
    tensors={
        **MIXTRAL.tensors,
        **ALL_HEADS_TENSORS,
        "layers.*.mlp.router_correction": Stored((f"{_MLP}.e_score_correction_bias",), "array"),
    },
    other_tensors={
        **FUSED_EXPERT_TENSORS,
        "layers.*.mlp.router_correction": Stored(("model.layers.*.mlp.e_score_correction_bias",), "array"),
    },
    aliases={"num_local_experts": "num_experts"},
    only={
        "scoring_func": (("sigmoid",), "scores are sigmoids"),
        "use_qk_norm": ((True,), "queries and keys are normalised"),
        "qk_norm_type": (("per_layer",), "all heads are normalised as one"),
        "shared_intermediate_size": ((0,), "tokens share no expert"),
        "use_routing_bias": ((True,), "scores are corrected"),
    },
    harmless=(
        *("attn_type_list", "use_mtp", "mtp_transformer_layers"),
        "mlp_intermediate_size",  # of the dense layers that it has none of
        *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
    ),
)
