"""Which drafted tokens stay: those that the model would have picked itself."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jattn.pytree import replace
from jattn.serving.engine.logits_processors import Adjustments, adjusted
from jattn.serving.engine.logprobs import TokenLogprobs, logprobs_of
from jattn.serving.engine.sampler import SamplingMetadata, sample


class Verified(NamedTuple):
    """What a step with drafts brought its rows.

    Attributes:
        tokens: What the model picks behind each of a row's tokens. The first `num_accepted + 1` are the row's
            new tokens: the drafts that stay and one more; what comes behind them stands on a rejected draft.
        num_accepted: Leading drafts that stay.
        logprobs: Of the places `row * (1 + drafts) + i`, where somebody asked for them.
    """

    tokens: Int32[Array, "reqs query_len"]
    num_accepted: Int32[Array, " reqs"]
    logprobs: TokenLogprobs | None


@functools.partial(jax.jit, static_argnames="num_logprobs")
def rejection_sample(
    logits: Float[Array, "places vocab"],
    token_ids: Int[Array, " places"],
    num_drafts: Int[Array, " reqs"],
    sampling: SamplingMetadata,
    num_generated: Int[Array, " reqs"],
    adjustments: Adjustments | None = None,
    *,
    num_logprobs: int | None = None,
) -> Verified:
    """Picks a token behind each token of the rows, and accepts the drafts that were picked.

    A place is a token of a row, `1 + drafts` of them a row. Each place draws with the noise that a step
    without drafts would draw its token with: by the request's seed and how many tokens it has by then. So
    drafts change when tokens come and never which: greedy or not, the text is that of decoding token by
    token. It has the model's distribution whatever the drafts are, and a draft stays as often as the model
    picks it: p(draft), just as in rejection sampling with a draft of probability one. A draft model that
    draws with the same noise agrees with probability >= (1 - d) / (1 + d), d being the distance of the two
    distributions in total variation, where rejection sampling by probabilities reaches 1 - d; in return no
    probabilities of drafts are kept, `[reqs, drafts, vocab]` of them, and a seed means what it means without
    drafts.

    Args:
        logits: Of each place.
        token_ids: The step's tokens by the same places: a row's last token and its drafts, behind which any
            token may stand.
        num_drafts: How many drafts each row has.
        sampling: Of the rows.
        num_generated: Tokens that each row's request has generated before this step.
        adjustments: What rows ask of the logits first; drafts count as generated for what comes behind them.
        num_logprobs: How many of the likeliest tokens to report; None = no log-probabilities. Static.

    Source: vLLM V1 `RejectionSampler`; differs in the noise, after Daliri et al., "Coupling without
    communication and drafter-invariant speculative decoding" (2024).
    """
    num_rows = num_generated.shape[0]
    query_len = logits.shape[0] // num_rows
    drafts = token_ids.reshape(num_rows, query_len)[:, 1:]
    of_places = lambda rows: jnp.repeat(rows, query_len, axis=0)
    offsets = jnp.tile(jnp.arange(query_len, dtype=jnp.int32), num_rows)
    counts = of_places(num_generated) + offsets
    logits = logits.astype(jnp.float32)
    wanted = logits
    if adjustments is not None:
        wanted = adjusted(logits, _behind_drafts(adjustments, drafts, offsets), counts)
    columns = {name: of_places(getattr(sampling, name)) for name in _COLUMNS}
    picked = sample(wanted, replace(sampling, **columns), counts)
    tokens = picked.reshape(num_rows, query_len)
    is_draft = jnp.arange(query_len - 1)[None, :] < num_drafts[:, None]
    agrees = (tokens[:, :-1] == drafts) & is_draft
    num_accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    logprobs = None if num_logprobs is None else logprobs_of(logits, picked, num_logprobs)
    return Verified(tokens, num_accepted, logprobs)


_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed")


def _behind_drafts(
    by: Adjustments, drafts: Int[Array, "reqs drafts"], offsets: Int32[Array, " places"]
) -> Adjustments:
    """The rows' adjustments for each place: the drafts before it have been generated, those behind it not."""
    query_len = drafts.shape[1] + 1
    repeated = jax.tree.map(lambda rows: jnp.repeat(rows, query_len, axis=0), by)
    nobody = jnp.iinfo(jnp.int32).max  # beyond every vocabulary: dropped
    before = jnp.arange(query_len - 1, dtype=jnp.int32)[None, :] < offsets[:, None]
    drafted = jnp.where(before, jnp.repeat(drafts, query_len, axis=0).astype(jnp.int32), nobody)
    outputs = jnp.concatenate([repeated.output_ids, drafted], axis=1)
    places = jnp.tile(jnp.arange(query_len, dtype=jnp.int32), by.bias_rows.shape[0])
    bias_rows = repeated.bias_rows * query_len + places
    return repeated._replace(output_ids=outputs, last=by.last, bias_rows=bias_rows)
