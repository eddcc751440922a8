"""What one layer of a decoder is: a hashable value that a family reads from a config.json."""

import dataclasses
from collections.abc import Sized

from jattn.models.experts import ClampedSwiGLU, Routing
from jattn.models.rope import Rope
from jattn.models.specs import MLPSpec, QKNorm, Temperature
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_positive


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
