"""Verification of draft tokens: a draft is accepted if the model samples the same token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jattn.pytree import replace
from jattn.serving.engine.logits_processors import LogitsAdjustments, adjust_logits
from jattn.serving.engine.logprobs import TokenLogprobs, compute_logprobs
from jattn.serving.engine.sampler import SamplingMetadata, sample


class VerifiedTokens(NamedTuple):
    """The tokens of a step with drafts.

    Attributes:
        tokens: Token that the model samples after each of a row's tokens. The first `num_accepted + 1` are
            the row's new tokens: the accepted drafts and one more. The rest follow a rejected draft and are
            invalid.
        num_accepted: Number of leading drafts that are accepted.
        logprobs: Log-probabilities at the positions `row * (1 + drafts) + i`, if requested.
    """

    tokens: Int32[Array, "reqs query_len"]
    num_accepted: Int32[Array, " reqs"]
    logprobs: TokenLogprobs | None


@functools.partial(jax.jit, static_argnames="num_logprobs")
def rejection_sample(
    logits: Float[Array, "positions vocab"],
    token_ids: Int[Array, " positions"],
    num_drafts: Int[Array, " reqs"],
    sampling: SamplingMetadata,
    num_generated: Int[Array, " reqs"],
    adjustments: LogitsAdjustments | None = None,
    *,
    num_logprobs: int | None = None,
) -> VerifiedTokens:
    """Sample a token after each token of the rows, and accept the drafts that match.

    A position is one of the `1 + drafts` tokens of a row. Each position samples with the noise that a step
    without drafts would use, which depends on the request's seed and its number of tokens. Drafts therefore
    change when tokens arrive but never which tokens: the result equals decoding token by token, greedy
    or not. A draft is accepted with the probability that the model samples it, p(draft), as in rejection
    sampling with a draft of probability one. A draft model that samples with the same noise agrees with
    probability >= (1 - d) / (1 + d), where d is the total-variation distance of the two distributions;
    rejection sampling by probabilities reaches 1 - d. In return, no draft probabilities [reqs, drafts, vocab]
    are stored, and a seed has the same meaning as without drafts.

    Args:
        logits: Logits of each position.
        token_ids: The step's tokens by position: a row's last token and its drafts, then any padding.
        num_drafts: Number of drafts of each row.
        sampling: Sampling parameters of the rows.
        num_generated: Number of tokens that each row's request has generated before this step.
        adjustments: Adjustments of the logits; earlier drafts count as generated.
        num_logprobs: Number of most likely tokens to report; None: no log-probabilities. Static.

    Source: vLLM V1 `RejectionSampler`, except for the noise, which follows Daliri et al., "Coupling without
    communication and drafter-invariant speculative decoding" (2024).
    """
    num_rows = num_generated.shape[0]
    query_len = logits.shape[0] // num_rows
    drafts = token_ids.reshape(num_rows, query_len)[:, 1:]

    def repeat_rows(rows: Array) -> Array:
        return jnp.repeat(rows, query_len, axis=0)

    offsets = jnp.tile(jnp.arange(query_len, dtype=jnp.int32), num_rows)
    counts = repeat_rows(num_generated) + offsets
    logits = logits.astype(jnp.float32)
    adjusted_logits = logits
    if adjustments is not None:
        adjusted_logits = adjust_logits(
            logits, _adjustments_per_position(adjustments, drafts, offsets), counts
        )
    columns = {name: repeat_rows(getattr(sampling, name)) for name in _COLUMNS}
    picked = sample(adjusted_logits, replace(sampling, **columns), counts)
    tokens = picked.reshape(num_rows, query_len)
    is_draft = jnp.arange(query_len - 1)[None, :] < num_drafts[:, None]
    agrees = (tokens[:, :-1] == drafts) & is_draft
    num_accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    logprobs = None if num_logprobs is None else compute_logprobs(logits, picked, num_logprobs)
    return VerifiedTokens(tokens, num_accepted, logprobs)


_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed")


def _adjustments_per_position(
    adjustments: LogitsAdjustments, drafts: Int[Array, "reqs drafts"], offsets: Int32[Array, " positions"]
) -> LogitsAdjustments:
    """Return the rows' adjustments for each position, with the drafts before it counted as generated."""
    query_len = drafts.shape[1] + 1
    repeated = jax.tree.map(lambda rows: jnp.repeat(rows, query_len, axis=0), adjustments)
    no_token = jnp.iinfo(jnp.int32).max  # outside every vocabulary, so it is dropped
    is_before = jnp.arange(query_len - 1, dtype=jnp.int32)[None, :] < offsets[:, None]
    drafted = jnp.where(is_before, jnp.repeat(drafts, query_len, axis=0).astype(jnp.int32), no_token)
    outputs = jnp.concatenate([repeated.output_ids, drafted], axis=1)
    positions = jnp.tile(jnp.arange(query_len, dtype=jnp.int32), adjustments.bias_rows.shape[0])
    bias_rows = repeated.bias_rows * query_len + positions
    return repeated._replace(output_ids=outputs, last=adjustments.last, bias_rows=bias_rows)
