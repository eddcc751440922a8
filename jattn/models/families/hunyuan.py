"""HunYuan, its dense models: queries and keys normalised behind the rope, whose base is stretched."""

from jattn.models.families.family import Family, Keys
from jattn.models.families.keys import ROPE
from jattn.models.families.reading import gated_mlp, llama_layer, rope
from jattn.models.families.tensors import LLAMA_TENSORS
from jattn.models.hf_tensors import Stored
from jattn.models.layer_spec import LayerSpec
from jattn.models.rope import Rope
from jattn.models.specs import NormSpec, QKNorm
from pallas_kernels.checks import require_number, require_positive


def _rope(keys: Keys) -> Rope:
    """Frequencies of a base that alpha stretches once for all, whatever the lengths."""
    given = {**(keys["rope_parameters"] or {}), **(keys["rope_scaling"] or {})}
    dim, alpha = keys["head_dim"], given.pop("alpha", None)
    if not alpha or (given.get("rope_type") or given.get("type")) != "dynamic":
        return rope({**keys, "rope_parameters": given, "rope_scaling": None})
    theta = given.get("rope_theta") or keys["rope_theta"]
    require_number(alpha=alpha, rope_theta=theta)
    require_positive(alpha=alpha, rope_theta=theta)
    return Rope(head_dim=dim, rope_theta=float(theta * alpha ** (dim / (dim - 2))))


def _layer(keys: Keys, layer: int) -> LayerSpec:
    has_bias = bool(keys["attention_bias"])
    return llama_layer(
        keys,
        rope=_rope(keys),
        mlp=gated_mlp(keys),
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm=QKNorm(norm=NormSpec("rms", keys["rms_norm_eps"]), comes_after_rope=True),
    )


_ATTENTION = "model.layers.*.self_attn"
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
    layer=_layer,
    tensors={
        **LLAMA_TENSORS,
        "layers.*.self_attn.q_norm.norm": Stored((f"{_ATTENTION}.query_layernorm",)),
        "layers.*.self_attn.k_norm.norm": Stored((f"{_ATTENTION}.key_layernorm",)),
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
