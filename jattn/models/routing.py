"""Routers of mixtures of experts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.checks import require_one_of

SCORES = ("softmax", "softmax_of_chosen", "sigmoid", "one_by_one")


SCALED = ("output", "input")


class Choices(NamedTuple):
    """What a router chose.

    Attributes:
        experts: Of each token, the best first, none twice.
        scores: Their weights.
        scales_input: A score multiplies its expert's input; else its output.
    """

    experts: Int32[Array, "tokens chosen"]
    scores: Float32[Array, "tokens chosen"]
    scales_input: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router's logits become weights of the chosen experts, in f32. Hashable: static for jit.

    The chosen are those of the highest logits, whatever the scores: both orders agree. Where a learned number
    an expert corrects the scores, those are chosen whose sum is highest, and weighed without it.

    | | scores | normalizes | scaled | has_bias |
    |---|---|---|---|---|
    | Mixtral | softmax | yes | output | no |
    | Qwen2-MoE, Qwen3-MoE | softmax | norm_topk_prob | output | no |
    | gpt-oss | softmax_of_chosen | no | output | yes |
    | Llama 4 | sigmoid | no | input | no |
    | GLM-4.5, dots1, MiniMax-M2 | sigmoid, corrected | yes | output | no |
    | Phi-3.5-MoE | one_by_one | no | output | no |
    | ERNIE 4.5 | softmax, corrected | yes | output | no |

    Attributes:
        scores: "softmax": over all experts, before the choice; "softmax_of_chosen": over the chosen;
            "sigmoid": of each logit alone; "one_by_one": the first among all that are near it, the next among
            the rest likewise.
        normalizes: The scores of the chosen are divided by their sum.
        scaled: What a score multiplies: an expert's "output", or its "input".
        has_bias: The router has a bias.
        is_corrected: There is a learned number an expert that counts for the choice alone.
        factor: What the scores are multiplied by in the end.
        margin: one_by_one: how far below the best, as a share of the larger magnitude, a logit is near it.

    Source: transformers' routers of these families.
    """

    scores: str = "softmax"
    normalizes: bool = False
    scaled: str = "output"
    has_bias: bool = False
    is_corrected: bool = False
    factor: float = 1.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        require_one_of("scores", self.scores, SCORES)
        require_one_of("scaled", self.scaled, SCALED)
        known = ("softmax", "sigmoid") if self.is_corrected else SCORES
        require_one_of("scores that are corrected", self.scores, known)

    def choose(
        self,
        logits: Float32[Array, "tokens experts"],
        experts_per_token: int,
        correction: Float32[Array, " experts"] | None = None,
    ) -> Choices:
        """The experts of each token, and what multiplies their inputs and outputs."""
        if correction is None:
            chosen, experts = jax.lax.top_k(logits, experts_per_token)
        else:
            of_all = jax.nn.sigmoid if self.scores == "sigmoid" else jax.nn.softmax
            _, experts = jax.lax.top_k(of_all(logits) + correction[None, :], experts_per_token)
            chosen = jnp.take_along_axis(logits, experts, axis=-1)
        if self.scores == "softmax":
            scores = jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        elif self.scores == "softmax_of_chosen":
            scores = jax.nn.softmax(chosen, axis=-1)
        elif self.scores == "one_by_one":
            scores = _one_by_one(logits, chosen, experts, self.margin)
        else:
            scores = jax.nn.sigmoid(chosen)
        if self.normalizes:
            scores = scores / jnp.sum(scores, axis=-1, keepdims=True)
        scores = scores if self.factor == 1.0 else scores * self.factor
        return Choices(experts=experts, scores=scores, scales_input=self.scaled == "input")


def _one_by_one(logits: Array, chosen: Array, experts: Array, margin: float) -> Float32[Array, "tokens k"]:
    """The share of each of the chosen among itself and what is near it, those before it left out.

    Source: transformers `phimoe.sparsemixer`, as it computes what is not trained.
    """
    ids, rest, scores = jnp.arange(logits.shape[1])[None, :], logits, []
    for n in range(chosen.shape[1]):
        best = chosen[:, n : n + 1]
        is_near = (best - logits) / jnp.maximum(jnp.abs(logits), best) <= margin
        scores.append(1.0 / jnp.sum(jnp.where(is_near, jnp.exp(rest - best), 0.0), axis=1))
        rest = jnp.where(ids == experts[:, n : n + 1], -jnp.inf, rest)
    return jnp.stack(scores, axis=1)
