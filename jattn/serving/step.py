"""What the engine compiles: a batch through the model to logits, and logits to the next token of each row."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jattn.graphs import GraphStep
from jattn.implementations.choice import asked_for, first_able
from jattn.metadata.batch import BatchMetadata
from jattn.module import PagedAttention
from jattn.serving.adjustments import Adjustments, adjusted
from jattn.serving.logprobs import TokenLogprobs, logprobs_of
from jattn.serving.sampler import SamplingMetadata, sample
from pallas_kernels import support


class StepTokens(NamedTuple):
    """A step's tokens; some of them only the device knows yet.

    Attributes:
        ids: Tokens as the host knows them.
        rows: Row of the step before whose new token stands here; -1 where `ids` has it.
        last: New tokens of the step before, by its rows.
    """

    ids: Int32[Array, " tokens"]
    rows: Int32[Array, " tokens"]
    last: Int32[Array, " max_rows"]


class StepOutputs(NamedTuple):
    """What a step makes besides its caches.

    Attributes:
        logits: Of each row's last token; of all tokens of decode rows that have drafts.
        hidden: Of all tokens, behind the last norm: `model.logits` makes theirs where somebody asks.
    """

    logits: Float32[Array, "places vocab"]
    hidden: Float[Array, "tokens hidden"]


class Sampled(NamedTuple):
    """The next token of each row.

    Attributes:
        tokens: Padded to the rows of the largest bucket: they feed a step of any bucket.
        logprobs: Of the rows, where somebody asked for them.
    """

    tokens: Int32[Array, " max_rows"]
    logprobs: TokenLogprobs | None


def make_step(graphdef: Any) -> GraphStep:
    """The step that is compiled for each bucket: a batch to StepOutputs and caches.

    Args:
        graphdef: Of the model, from `nnx.split`; the params are its state.
    """

    def step(params: Any, caches: Any, metadata: Any, tokens: StepTokens) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)
        shared = model.plan(metadata, caches)
        token_ids = jnp.where(tokens.rows >= 0, tokens.last[tokens.rows], tokens.ids)
        hidden, caches = model(token_ids, caches, metadata, plan=shared)
        return StepOutputs(model.logits(hidden[_places(metadata)]), hidden), caches

    return step


def _places(metadata: BatchMetadata) -> Int32[Array, " places"]:
    """The tokens whose logits are wanted."""
    bucket, last = metadata.bucket, metadata.last_token_indices
    if bucket.decode_query_len == 1:
        return last
    return jnp.concatenate(
        [jnp.arange(bucket.max_decode_tokens, dtype=jnp.int32), last[bucket.max_decodes :]]
    )


@functools.partial(jax.jit, static_argnames=("max_rows", "num_logprobs"))
def next_tokens(
    logits: Float[Array, "reqs vocab"],
    sampling: SamplingMetadata,
    num_generated: Int32[Array, " reqs"],
    adjustments: Adjustments | None = None,
    *,
    max_rows: int,
    num_logprobs: int | None = None,
) -> Sampled:
    """`sample` of adjusted logits, and log-probabilities of the logits as the model made them.

    Not part of the step: a model would have to be compiled for each thing that rows may want of a sampler.

    Args:
        logits: Of each row's last token.
        sampling: Of the rows.
        num_generated: As in `sample`.
        adjustments: What rows ask of the logits first; None = nothing.
        max_rows: Rows of the largest bucket. Static.
        num_logprobs: How many of the likeliest tokens to report; None = no log-probabilities. Static.
    """
    logits = logits.astype(jnp.float32)
    wanted = logits if adjustments is None else adjusted(logits, adjustments, num_generated)
    tokens = sample(wanted, sampling, num_generated)
    logprobs = None if num_logprobs is None else logprobs_of(logits, tokens, num_logprobs)
    return Sampled(jnp.pad(tokens, (0, max_rows - tokens.shape[0])), logprobs)


def with_implementation(model: Any, implementation: str | Sequence[str] | None) -> Any:
    """The model over the same arrays, its attention by `implementation`; the given one is left as it is."""
    if implementation is None:
        return model
    # Raises now, not in the first step.
    first_able(asked_for(implementation), {"mosaic_gpu": support.why_not_on(nnx.state(model))})
    model = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, PagedAttention):
            module.implementation = implementation if isinstance(implementation, str) else (*implementation,)
    return model
