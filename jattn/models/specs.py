"""What the parts of a decoder layer are: hashable values that a family reads from a config.json."""

import dataclasses
from collections.abc import Sized

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from jattn.models.activations import ACTIVATIONS, ClampedSwiGLU
from jattn.models.rope import Rope
from jattn.models.routing import Routing
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_one_of, require_positive, unsupported

LEARNED_ACTIVATIONS = ("xielu",)  # those with parameters, of plain MLPs
NORMS = (
    *("rms", "rms_offset", "rms_f32", "rms_no_weight"),
    *("layer", "layer_no_bias", "layer_no_weight", "layer_offset"),
)
# Which norms a layer has, by where they stand.
NORM_PLACEMENTS: dict[str, tuple[str, ...]] = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "around": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "parallel": ("input_layernorm",),
    "parallel_apart": ("attention_layernorm", "mlp_layernorm"),
}
MLPS = ("gated", "plain", "gegelu")


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """A norm.

    Attributes:
        kind: "rms" (Llama's: the normalised input is rounded before it is multiplied), "rms_f32" (rounded
            once, behind the product), "rms_offset" (Gemma's: likewise, and the factor is 1 + weight),
            "rms_no_weight", "layer", "layer_no_bias", "layer_no_weight" (nor a bias), "layer_offset" (times
            1 + weight).
        eps: Added to the mean square, or to the variance.
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
        intermediate_size: Width inside.
        hidden_act: Its activation; "gegelu" for that kind.
        kind: "gated" (`down(act(gate(x)) * up(x))`), "plain" (`down(act(up(x)))`) or "gegelu" (Phi-3-small's:
            `down(quick_gelu(gate(x)) * (up(x) + 1))`, both cut off at the limit).
        has_bias: Its projections have one.
        limit: gegelu: gates are at most this, and the others at most this far from 0. None = no limit.
    """

    intermediate_size: int
    hidden_act: str
    kind: str = "gated"
    has_bias: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        require_one_of("mlp", self.kind, MLPS)
        require_positive(intermediate_size=self.intermediate_size)
        known: tuple[str, ...] = ("gegelu",) if self.kind == "gegelu" else tuple(ACTIVATIONS)
        known += LEARNED_ACTIVATIONS if self.kind == "plain" else ()
        if self.hidden_act not in known:
            supported = "Supported: " + ", ".join(known)
            raise unsupported(f"activation {self.hidden_act!r}", "not implemented", supported)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNorm:
    """How queries and keys are normalised.

    Attributes:
        norm: Its kind and epsilon.
        comes_after_rope: It stands behind the rotation, not before it.
        has_weight: It has a weight; Llama 4's, behind the rotation, has none.
        over: "head": each head by itself, all with the same weights; "own_head": likewise, each with its own,
            of a LayerNorm (Cohere's); "all_heads": all as one, with a weight a number, of an RMS norm (OLMo
            2's).
    """

    norm: NormSpec
    comes_after_rope: bool = False
    has_weight: bool = True
    over: str = "head"

    def __post_init__(self) -> None:
        require_one_of("over", self.over, ("head", "own_head", "all_heads"))
        if self.comes_after_rope or not self.has_weight:
            require_one_of("over of a norm behind the rope", self.over, ("head",))
            require(self.comes_after_rope, "has_weight", "be True before the rope", self.has_weight)
        if self.over == "own_head":
            require_one_of("a norm with weights by head", self.norm.kind, ("layer", "layer_no_bias"))
        if self.over == "all_heads":
            require_one_of("a norm of all heads as one", self.norm.kind, ("rms", "rms_f32"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
    """Llama 4's: queries times `1 + attn_scale * log(1 + floor((position + first) / floor_scale))`.

    Attributes:
        floor_scale: Positions from one step to the next.
        attn_scale: Height of the steps.
        first: What position 0 counts as; Ministral 3's is 0.
    """

    floor_scale: float
    attn_scale: float
    first: int = 1

    def __post_init__(self) -> None:
        require_positive(floor_scale=self.floor_scale)

    def __call__(self, positions: Int[Array, " tokens"]) -> Float32[Array, " tokens"]:
        """The factor of each token's queries."""
        floors = jnp.floor((positions.astype(jnp.float32) + self.first) / self.floor_scale)
        return jnp.log1p(floors) * self.attn_scale + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts, as `jattn.models.experts.Experts` takes it.

    Attributes:
        intermediate_size: Width inside an expert.
        num_experts: Experts to choose from.
        experts_per_token: How many of them each token runs through.
        routing: How they are chosen and weighed.
        activation: A name of an activation, or gpt-oss's.
        has_bias: The experts' products have a bias.
        shared: What all tokens run through besides; None = nothing.
        gates_shared: It is multiplied by the sigmoid of a learned product with the input.
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
        attention: Heads, scale, window, chunks, soft cap, sparsity.
        mlp: What follows it.
        rope: How queries and keys are rotated; None = they are not.
        qkv_bias: The query, key and value projections have a bias.
        out_bias: The attention's output projection has one.
        clip_qkv: Queries, keys and values are cut off at this magnitude when projected; None = not at all.
        qk_norm: How queries and keys are normalised; None = they are not.
        has_sinks: Each query head has a learned sink.
        alibi_slopes: One a query head; None = no ALiBi.
        temperature: What queries are scaled by, by position; None = nothing.
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
    temperature: Temperature | None = None

    def __post_init__(self) -> None:
        heads = self.attention.num_q_heads
        if self.alibi_slopes is not None:
            got = len(self.alibi_slopes)
            require(got == heads, "alibi_slopes", f"have one entry per query head ({heads})", got)
        if self.clip_qkv is not None:
            require_positive(clip_qkv=self.clip_qkv)


def require_one_a_layer(name: str, given: Sized, num_layers: int) -> None:
    """Refuses what is said layer by layer of fewer or more layers than there are."""
    is_list = isinstance(given, Sized)
    require(is_list, name, f"have one entry per layer ({num_layers})", f"one {type(given).__name__}")
    require(len(given) == num_layers, name, f"have one entry per layer ({num_layers})", len(given))
