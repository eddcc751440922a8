"""What the parts of a decoder layer are: hashable values that a family reads from a config.json."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from pallas_kernels.checks import require_one_of, require_positive, unsupported

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
NORMS = ("rms", "rms_offset", "rms_f32", "layer", "layer_no_bias")
MLPS = ("gated", "plain", "gegelu")


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """A norm.

    Attributes:
        kind: "rms" (Llama's: the normalised input is rounded before it is multiplied), "rms_f32" (rounded
            once, behind the product), "rms_offset" (Gemma's: likewise, and the factor is 1 + weight), "layer"
            or "layer_no_bias".
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
        known = ("gegelu",) if self.kind == "gegelu" else ACTIVATIONS
        if self.hidden_act not in known:
            supported = "Supported: " + ", ".join(known)
            raise unsupported(f"activation {self.hidden_act!r}", "not implemented", supported)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNorm:
    """How queries and keys are normalised, head by head.

    Attributes:
        norm: Its kind and epsilon.
        comes_after_rope: Llama 4's: behind the rotation, without weights. Else before it, with weights.
    """

    norm: NormSpec
    comes_after_rope: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
    """Llama 4's: queries times `1 + attn_scale * log(1 + floor((position + 1) / floor_scale))`."""

    floor_scale: float
    attn_scale: float

    def __post_init__(self) -> None:
        require_positive(floor_scale=self.floor_scale)

    def __call__(self, positions: Int[Array, " tokens"]) -> Float32[Array, " tokens"]:
        """The factor of each token's queries."""
        floors = jnp.floor((positions.astype(jnp.float32) + 1.0) / self.floor_scale)
        return jnp.log1p(floors) * self.attn_scale + 1.0
