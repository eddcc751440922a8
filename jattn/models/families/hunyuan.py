"""HunYuan, its dense models: queries and keys normalised behind the rope, whose base is stretched."""

import dataclasses
from typing import Any

from jattn.models.families.config_keys import ROPE
from jattn.models.families.family import Family, Keys
from jattn.models.families.layer_builders import experts, gated_mlp, llama_layer, rope
from jattn.models.families.tensor_mappings import (
    EXPERT_TENSORS,
    FUSED_EXPERT_TENSORS,
    LLAMA_TENSORS,
    gated_tensors,
)
from jattn.models.loading.tensor_layouts import Stored
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.models.specs import LayerSpec, NormSpec, QKNorm, require_one_a_layer
from pallas_kernels.checks import require_int, require_number, require_positive


# HunYuan, its dense models: queries and keys normalised behind the rope, whose base is stretched.
def _hunyuan_rope(keys: Keys) -> Rope:
    """Frequencies of a base that alpha stretches once for all, whatever the lengths."""
    given = {**(keys["rope_parameters"] or {}), **(keys["rope_scaling"] or {})}
    dim, alpha = keys["head_dim"], given.pop("alpha", None)
    if not alpha or (given.get("rope_type") or given.get("type")) != "dynamic":
        return rope({**keys, "rope_parameters": given, "rope_scaling": None})
    theta = given.get("rope_theta") or keys["rope_theta"]
    require_number(alpha=alpha, rope_theta=theta)
    require_positive(alpha=alpha, rope_theta=theta)
    return Rope(head_dim=dim, rope_theta=float(theta * alpha ** (dim / (dim - 2))))


def _hunyuan_layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        rope=_hunyuan_rope(keys),
        mlp=gated_mlp(keys),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"]), comes_after_rope=True),
    )


_HUNYUAN_ATTENTION = "model.layers.*.self_attn"
HUNYUAN_V1_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    defaults={
        **ROPE,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
    },
    layer=_hunyuan_layer,
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.q_norm.norm": Stored((f"{_HUNYUAN_ATTENTION}.query_layernorm",)),
        "layers.*.self_attn.k_norm.norm": Stored((f"{_HUNYUAN_ATTENTION}.key_layernorm",)),
    },
    aliases={"attention_head_dim": "head_dim"},
    only={
        "use_qk_norm": ((True,), "queries and keys are normalised"),
        "use_cla": ((False,), "layers have keys and values of their own"),
        "norm_type": (("rms",), "its norms are RMS norms"),
        "num_experts": ((1,), "its layers are dense"),
    },
    harmless=("eod_token_id", "org_vocab_size", "im_start_id", "im_end_id", "cla_share_factor", "dense_list"),
)


# HunYuan's mixtures (A13B): its dense layers with experts, and an MLP that all tokens share.
_HUNYUAN_MOE_LISTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert")


def _hunyuan_moe_of_layer(keys: Keys, name: str, layer: int) -> Any:
    """A number for all layers, or one a layer.

    Raises:
        ValueError: It is none, or there is not one a layer.
    """
    value = keys[name]
    if isinstance(value, list):
        require_one_a_layer(name, value, keys["num_hidden_layers"])
        value = value[layer]
    if value is not None or name != "moe_intermediate_size":
        require_int(**{name: value})
    return value


def _hunyuan_moe_layer(keys: Keys, layer: int) -> LayerSpec:
    of = {name: _hunyuan_moe_of_layer(keys, name, layer) for name in _HUNYUAN_MOE_LISTS}
    size = of["moe_intermediate_size"] or keys["intermediate_size"]
    shared = gated_mlp({**keys, "intermediate_size": size * of["num_shared_expert"]})
    routing = Routing(scores="softmax", normalizes=True)
    mlp = experts({**keys, **of}, routing, intermediate_size=size, shared=shared)
    return dataclasses.replace(HUNYUAN_V1_DENSE.layer(keys, layer), mlp=mlp)


_HUNYUAN_MOE_MLP = "model.layers.*.mlp"
HUNYUAN_V1_MOE = dataclasses.replace(
    HUNYUAN_V1_DENSE,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    defaults={
        **HUNYUAN_V1_DENSE.defaults,
        "moe_intermediate_size": None,
        # Functions of the keys: what is said may be an int or a list of them.
        **dict.fromkeys(("num_experts", "num_experts_per_tok", "num_shared_expert"), lambda keys: 1),
    },
    layer=_hunyuan_moe_layer,
    tensors={
        **HUNYUAN_V1_DENSE.tensors,
        **EXPERT_TENSORS,
        **gated_tensors("layers.*.mlp.shared_expert", f"{_HUNYUAN_MOE_MLP}.shared_mlp"),
        "layers.*.mlp.router": Stored((f"{_HUNYUAN_MOE_MLP}.gate.wg",)),
    },
    other_tensors={**FUSED_EXPERT_TENSORS, "layers.*.mlp.router": Stored((f"{_HUNYUAN_MOE_MLP}.gate.wg",))},
    aliases={
        **HUNYUAN_V1_DENSE.aliases,
        "moe_topk": "num_experts_per_tok",
        "num_local_experts": "num_experts",
    },
    only={
        **{name: values for name, values in HUNYUAN_V1_DENSE.only.items() if name != "num_experts"},
        "use_mixed_mlp_moe": ((True,), "all tokens share an MLP beside the experts"),
        "norm_topk_prob": ((True,), "scores of the chosen experts are divided by their sum"),
        "moe_layer_num_skipped": ((0,), "all layers have experts"),
        "group_limited_greedy": ((False,), "experts are chosen among all"),
        "routed_scaling_factor": ((1, 1.0), "experts are not scaled"),
    },
    harmless=(
        *HUNYUAN_V1_DENSE.harmless,
        *("sep_token_id", "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"),
    ),
)
