"""Specifications of a decoder layer and its parts: hashable values that a family reads from config.json."""

import dataclasses
from collections.abc import Sized

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from jattn.models.activations import ACTIVATIONS, ClampedSwiGLU
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_one_of, require_positive, unsupported

LEARNED_ACTIVATIONS = ("xielu",)  # activations with parameters, for plain MLPs
NORMS = (
    *("rms", "rms_offset", "rms_f32", "rms_no_weight"),
    *("layer", "layer_no_bias", "layer_no_weight", "layer_offset"),
)
# Norms of a layer by norm_placement.
NORM_PLACEMENTS: dict[str, tuple[str, ...]] = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "around": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "parallel": ("input_layernorm",),
    "parallel_separate_norms": ("attention_layernorm", "mlp_layernorm"),
}
MLPS = ("gated", "plain", "gegelu")


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """The kind and epsilon of a norm.

    Attributes:
        kind: "rms" (Llama: the normalized input is rounded before the multiplication by the weight),
            "rms_f32" (rounded once, after the multiplication), "rms_offset" (Gemma: as "rms_f32", with the
            factor 1 + weight), "rms_no_weight", "layer", "layer_no_bias", "layer_no_weight" (neither weight
            nor bias), "layer_offset" (factor 1 + weight).
        eps: Number added to the mean square, or to the variance.
    """

    kind: str
    eps: float

    def __post_init__(self) -> None:
        require_one_of("norm", self.kind, NORMS)
        require_positive(rms_norm_eps=self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """A dense MLP.

    Attributes:
        intermediate_size: Width of the hidden layer.
        hidden_act: Name of the activation; "gegelu" for the kind "gegelu".
        kind: "gated" (`down(act(gate(x)) * up(x))`), "plain" (`down(act(up(x)))`) or "gegelu" (Phi-3-small:
            `down(quick_gelu(gate(x)) * (up(x) + 1))`, with gate and up clipped).
        has_bias: Whether the projections have biases.
        limit: For "gegelu": gate is clipped to at most `limit`, up to [-limit, limit]. None = no clipping.
    """

    intermediate_size: int
    hidden_act: str
    kind: str = "gated"
    has_bias: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        require_one_of("mlp", self.kind, MLPS)
        require_positive(intermediate_size=self.intermediate_size)
        supported: tuple[str, ...] = ("gegelu",) if self.kind == "gegelu" else tuple(ACTIVATIONS)
        supported += LEARNED_ACTIVATIONS if self.kind == "plain" else ()
        if self.hidden_act not in supported:
            fix = "Supported: " + ", ".join(supported)
            raise unsupported(f"activation {self.hidden_act!r}", "not implemented", fix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNorm:
    """The norm of queries and keys.

    Attributes:
        norm: Kind and epsilon of the norm.
        comes_after_rope: Whether the norm comes after the rotary embedding instead of before it.
        has_weight: Whether the norm has a weight; Llama 4's, which comes after the rotary embedding, has
            none.
        over: "head": normalizes each head, with the same weights for all; "own_head": normalizes each head,
            with weights per head (LayerNorm only; Cohere); "all_heads": normalizes all heads together, with
            one weight per element (RMS norm only; OLMo 2).
    """

    norm: NormSpec
    comes_after_rope: bool = False
    has_weight: bool = True
    over: str = "head"

    def __post_init__(self) -> None:
        require_one_of("over", self.over, ("head", "own_head", "all_heads"))
        if self.comes_after_rope or not self.has_weight:
            require_one_of("over of a norm after the rope", self.over, ("head",))
            if not self.comes_after_rope:
                raise ValueError(
                    "has_weight=False is supported only for a norm after the rope. Pass has_weight=True."
                )
        if self.over == "own_head":
            require_one_of("the norm for over='own_head'", self.norm.kind, ("layer", "layer_no_bias"))
        if self.over == "all_heads":
            require_one_of("the norm for over='all_heads'", self.norm.kind, ("rms", "rms_f32"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionTemperature:
    """Llama 4's attention temperature: a scale of the queries that grows with the position.

    The scale is `1 + attn_scale * log(1 + floor((position + first) / floor_scale))`.

    Attributes:
        floor_scale: Number of positions with the same scale.
        attn_scale: Coefficient of the logarithm.
        first: Number added to positions: 1 for Llama 4, 0 for Ministral 3.
    """

    floor_scale: float
    attn_scale: float
    first: int = 1

    def __post_init__(self) -> None:
        require_positive(floor_scale=self.floor_scale)

    def __call__(self, positions: Int[Array, " tokens"]) -> Float32[Array, " tokens"]:
        """Return the scale of each token's queries."""
        floors = jnp.floor((positions.astype(jnp.float32) + self.first) / self.floor_scale)
        return jnp.log1p(floors) * self.attn_scale + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts; see `jattn.models.experts.Experts`.

    Attributes:
        intermediate_size: Width of an expert's hidden layer.
        num_experts: Number of experts.
        experts_per_token: Number of experts that each token is routed to.
        routing: Selection and weighting of the experts.
        activation: Name of an activation, or gpt-oss's clamped SwiGLU.
        has_bias: Whether the experts' projections have biases.
        shared: MLP that all tokens run through in addition; None = no shared expert.
        gates_shared: Whether the shared expert's output is multiplied by the sigmoid of a learned projection
            of the input (Qwen2-MoE).
    """

    intermediate_size: int
    num_experts: int
    experts_per_token: int
    routing: Routing
    activation: str | ClampedSwiGLU
    has_bias: bool = False
    shared: MLPSpec | None = None
    gates_shared: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of a decoder.

    Attributes:
        attention: Heads, scale, window, chunks, soft cap and sparsity.
        mlp: Dense MLP or mixture of experts.
        rope: Rotary embedding of queries and keys; None = no rotary embedding.
        qkv_bias: Whether the query, key and value projections have biases.
        out_bias: Whether the attention's output projection has a bias.
        clip_qkv: Magnitude that projected queries, keys and values are clipped to; None = no clipping.
        qk_norm: Norm of queries and keys; None = no norm.
        has_sinks: Whether each query head has a learned attention sink.
        alibi_slopes: ALiBi slope per query head; None = no ALiBi.
        temperature: Scale of the queries by position; None = no scale.
    """

    attention: AttentionSpec
    mlp: MLPSpec | ExpertsSpec
    rope: Rope | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    clip_qkv: float | None = None
    qk_norm: QKNorm | None = None
    has_sinks: bool = False
    alibi_slopes: tuple[float, ...] | None = None
    temperature: AttentionTemperature | None = None

    def __post_init__(self) -> None:
        heads = self.attention.num_q_heads
        if self.alibi_slopes is not None:
            got = len(self.alibi_slopes)
            require(got == heads, "alibi_slopes", f"have one entry per query head ({heads})", got)
        if self.clip_qkv is not None:
            require_positive(clip_qkv=self.clip_qkv)


def require_one_per_layer(name: str, values: Sized, num_layers: int) -> None:
    """Require a value with one entry per layer.

    Raises:
        ValueError: If `values` has no length, or its length is not `num_layers`.
    """
    is_list = isinstance(values, Sized)
    require(is_list, name, f"have one entry per layer ({num_layers})", f"one {type(values).__name__}")
    require(len(values) == num_layers, name, f"have one entry per layer ({num_layers})", len(values))
