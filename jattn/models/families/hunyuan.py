"""HunYuan, dense and with experts."""

import dataclasses

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import experts, gated_mlp, llama_layer, qk_norm, rope
from jattn.models.families.tensor_mappings import (
    EXPERT_TENSORS,
    FUSED_EXPERT_TENSORS,
    LLAMA_BLOCK,
    gated_mlp_tensors,
    llama_tensors,
    map_tensors,
)
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec


# HunYuan, dense: norms of queries and keys after RoPE, whose base is scaled.
def _hunyuan_rope(keys: Keys) -> Rope:
    """Return the rotary embedding, whose base alpha scales for all lengths."""
    parameters = {**(keys["rope_parameters"] or {}), **(keys["rope_scaling"] or {})}
    dim, alpha = keys["head_dim"], parameters.pop("alpha", None)
    if not alpha or (parameters.get("rope_type") or parameters.get("type")) != "dynamic":
        return rope({**keys, "rope_parameters": parameters, "rope_scaling": None})
    theta = parameters.get("rope_theta") or keys["rope_theta"]
    return Rope(head_dim=dim, rope_theta=float(theta * alpha ** (dim / (dim - 2))))


def _hunyuan_layer(keys: Keys, layer: int) -> LayerSpec:
    return llama_layer(keys, rope=_hunyuan_rope(keys), qk_norm=qk_norm(keys, comes_after_rope=True))


_DENSE_VALUES = {
    "use_qk_norm": ((True,), "queries and keys are normalized"),
    "use_cla": ((False,), "layers do not share keys and values"),
    "norm_type": (("rms",), "its norms are RMS norms"),
}
HUNYUAN_V1_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    keys=f"{ROPE} attention_bias",
    build_layer=_hunyuan_layer,
    tensors=llama_tensors(
        {
            ".self_attn.q_norm.norm": ".self_attn.query_layernorm",
            ".self_attn.k_norm.norm": ".self_attn.key_layernorm",
        }
    ),
    aliases={"attention_head_dim": "head_dim"},
    supported_values={**_DENSE_VALUES, "num_experts": ((1,), "its layers are dense")},
    ignored_keys="eod_token_id",
)


# HunYuan A13B: experts and a shared expert.
# Keys that hold one number for all layers, or one per layer.
_HUNYUAN_MOE_LISTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert")


def _hunyuan_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    values = {name: keys[name] for name in _HUNYUAN_MOE_LISTS}
    layer_keys = {name: value[layer] if isinstance(value, list) else value for name, value in values.items()}
    size = layer_keys["moe_intermediate_size"] or keys["intermediate_size"]
    shared = gated_mlp(keys, size * layer_keys["num_shared_expert"])
    routing = Routing(scores="softmax", renormalize=True)
    mlp = experts({**keys, **layer_keys}, routing, intermediate_size=size, shared=shared)
    return dataclasses.replace(_hunyuan_layer(keys, layer), mlp=mlp)


HUNYUAN_V1_MOE = dataclasses.replace(
    HUNYUAN_V1_DENSE,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    keys=f"{ROPE} attention_bias moe_intermediate_size",
    defaults={name: lambda keys: 1 for name in ("num_experts", "num_experts_per_tok", "num_shared_expert")},
    build_layer=_hunyuan_moe_layer,
    tensors={
        **HUNYUAN_V1_DENSE.tensors,
        **map_tensors(
            LLAMA_BLOCK,
            {
                **EXPERT_TENSORS,
                **gated_mlp_tensors(".mlp.shared_expert", ".mlp.shared_mlp"),
                ".mlp.router": ".mlp.gate.wg",
            },
        ),
    },
    alternative_tensors={**FUSED_EXPERT_TENSORS, **map_tensors(LLAMA_BLOCK, {".mlp.router": ".mlp.gate.wg"})},
    supported_values={
        **_DENSE_VALUES,
        "use_mixed_mlp_moe": ((True,), "all tokens share an MLP beside the experts"),
        "norm_topk_prob": ((True,), "scores of the selected experts are divided by their sum"),
        "moe_layer_num_skipped": ((0,), "all layers have experts"),
        "group_limited_greedy": ((False,), "experts are selected among all"),
        "routed_scaling_factor": ((1, 1.0), "experts are not scaled"),
    },
    ignored_keys="eod_token_id sep_token_id",
)
