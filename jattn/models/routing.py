"""Routers of mixtures of experts: how a router's logits select and weight experts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.checks import require_one_of

SCORES = ("softmax", "softmax_of_top_k", "sigmoid", "sparsemixer")
SCALE_TARGETS = ("output", "input")


class TopKExperts(NamedTuple):
    """The experts that a router selects for each token.

    Attributes:
        experts: Expert ids per token, the best first, without duplicates.
        scores: Weights of these experts.
        scales_input: Whether a score multiplies its expert's input instead of its output.
    """

    experts: Int32[Array, "tokens top_k"]
    scores: Float32[Array, "tokens top_k"]
    scales_input: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """A router's selection and weighting of experts, computed in f32. Hashable: static for jit.

    The experts with the highest logits are selected. With a correction bias, those with the highest sum of
    score and bias are selected, and weighted by the score without the bias.

    | | scores | renormalize | scale_target | has_bias |
    |---|---|---|---|---|
    | Mixtral | softmax | yes | output | no |
    | Qwen2-MoE, Qwen3-MoE | softmax | norm_topk_prob | output | no |
    | gpt-oss | softmax_of_top_k | no | output | yes |
    | Llama 4 | sigmoid | no | input | no |
    | GLM-4.5, dots1, MiniMax-M2 | sigmoid, correction bias | yes | output | no |
    | Phi-3.5-MoE | sparsemixer | no | output | no |
    | ERNIE 4.5 | softmax, correction bias | yes | output | no |

    Attributes:
        scores: Function from logits to scores. "softmax": over all experts; "softmax_of_top_k": over the
            selected experts; "sigmoid": of each logit; "sparsemixer": Phi-3.5-MoE's, each selected expert's
            softmax among the experts whose logits are within `margin` of it, without those selected before.
        renormalize: Whether the scores of the selected experts are divided by their sum.
        scale_target: Tensor that a score multiplies: an expert's "output" or its "input".
        has_bias: Whether the router's projection has a bias.
        has_correction_bias: Whether a learned bias per expert is added to the scores for the selection only
            (DeepSeek-V3's `e_score_correction_bias`).
        factor: Final multiplier of the scores (`routed_scaling_factor`).
        margin: Maximum relative distance of logits that "sparsemixer" compares.

    Source: transformers' routers of these families.
    """

    scores: str = "softmax"
    renormalize: bool = False
    scale_target: str = "output"
    has_bias: bool = False
    has_correction_bias: bool = False
    factor: float = 1.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        require_one_of("scores", self.scores, SCORES)
        require_one_of("scale_target", self.scale_target, SCALE_TARGETS)
        supported = ("softmax", "sigmoid") if self.has_correction_bias else SCORES
        require_one_of("scores with a correction bias", self.scores, supported)

    def route(
        self,
        logits: Float32[Array, "tokens experts"],
        experts_per_token: int,
        correction: Float32[Array, " experts"] | None = None,
    ) -> TopKExperts:
        """Select the experts of each token and compute their scores.

        Args:
            logits: The router's logits.
            experts_per_token: Number of experts per token.
            correction: Correction bias, where `has_correction_bias`.
        """
        if correction is None:
            top_logits, experts = jax.lax.top_k(logits, experts_per_token)
        else:
            score_all = jax.nn.sigmoid if self.scores == "sigmoid" else jax.nn.softmax
            _, experts = jax.lax.top_k(score_all(logits) + correction[None, :], experts_per_token)
            top_logits = jnp.take_along_axis(logits, experts, axis=-1)
        if self.scores == "softmax":
            scores = jnp.exp(top_logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        elif self.scores == "softmax_of_top_k":
            scores = jax.nn.softmax(top_logits, axis=-1)
        elif self.scores == "sparsemixer":
            scores = _sparsemixer_scores(logits, top_logits, experts, self.margin)
        else:
            scores = jax.nn.sigmoid(top_logits)
        if self.renormalize:
            scores = scores / jnp.sum(scores, axis=-1, keepdims=True)
        scores = scores if self.factor == 1.0 else scores * self.factor
        return TopKExperts(experts=experts, scores=scores, scales_input=self.scale_target == "input")


def _sparsemixer_scores(
    logits: Array, top_logits: Array, experts: Array, margin: float
) -> Float32[Array, "tokens top_k"]:
    """Return each selected expert's softmax among the experts close to it, without those selected before.

    Source: transformers `phimoe.sparsemixer`, as it computes at inference.
    """
    ids, remaining, scores = jnp.arange(logits.shape[1])[None, :], logits, []
    for i in range(top_logits.shape[1]):
        best = top_logits[:, i : i + 1]
        is_close = (best - logits) / jnp.maximum(jnp.abs(logits), best) <= margin
        scores.append(1.0 / jnp.sum(jnp.where(is_close, jnp.exp(remaining - best), 0.0), axis=1))
        remaining = jnp.where(ids == experts[:, i : i + 1], -jnp.inf, remaining)
    return jnp.stack(scores, axis=1)
