"""What the parts of a decoder are: hashable values that a family reads from a config.json."""

import dataclasses

from jattn.models.rope import Rope
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_number, require_one_of, require_positive, unsupported

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
        require_number(rms_norm_eps=self.eps)
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
    mlp: MLPSpec
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
