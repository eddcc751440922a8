"""What the engine compiles: a batch through the model to logits, and logits to the next token of each row."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jattn.batch.bucket import Bucket
from jattn.implementations.selection import asked_for, first_able, hashable
from jattn.nn import PagedAttention
from jattn.runtime.decode_graphs import DecodeGraphs, GraphStep
from jattn.serving.engine.adjustments import Adjustments, adjusted
from jattn.serving.engine.logprobs import TokenLogprobs, logprobs_of
from jattn.serving.engine.near_blocks import NearTables
from jattn.serving.engine.sampler import SamplingMetadata, sample
from pallas_kernels import support

# From so many tokens a step's products are cuBLAS's alone. XLA tunes Triton's beside them, which takes
# compiling from 3 to 15 CPU-seconds, and chooses by one timed run some that split columns into parts, whose
# sums are kernels of their own. 36 layers of 8B width without attention on an H200, cuBLAS alone and what XLA
# chose: 4.52 and 4.16 ms for 2 tokens, 4.39 and 4.23 for 8, 4.46 and 4.36 for 16, 4.55 and 4.59 for 32, 4.46
# and 4.77 for 48, 4.62 and 4.97 for 64, 4.97 and 5.38 for 128, 6.47 and 6.58 for 256, 20.0 and 20.2 for 1024.
CUBLAS_TOKENS = 32


class StepTokens(NamedTuple):
    """A step's tokens; some of them only the device knows yet.

    Attributes:
        ids: Tokens as the host knows them.
        rows: The sampler's row in the step before whose new token stands here; -1 where `ids` has it.
        last: New tokens of the step before, by its rows.
        ends: Which tokens are the last of a request: those that the next tokens are drawn for, in the rows of
            the sampler. The rest of these rows are padding. In a step with drafts all tokens, place by place.
        near: The blocks of layers that have their own; None = all layers have the metadata's.
        num_generated: Of each row of the sampler, as in `sample`: it goes through the step, to be sent with
            the rest. None = the sampler has it from elsewhere.
    """

    ids: Int32[Array, " tokens"]
    rows: Int32[Array, " tokens"]
    last: Int32[Array, " max_rows"]
    ends: Int32[Array, " places"]
    near: NearTables | None = None
    num_generated: Int32[Array, " reqs"] | None = None


class StepOutputs(NamedTuple):
    """What a step makes besides its caches.

    Attributes:
        logits: Of the tokens that StepTokens.ends names.
        hidden: Of all tokens, behind the last norm: `model.logits` makes theirs where somebody asks.
        num_generated: StepTokens'.
    """

    logits: Float32[Array, "places vocab"]
    hidden: Float[Array, "tokens hidden"]
    num_generated: Int32[Array, " reqs"] | None


class Sampled(NamedTuple):
    """The next token of each row.

    Attributes:
        tokens: Padded to the most rows of the sampler: they feed a step of any bucket.
        logprobs: Of the rows, where somebody asked for them.
    """

    tokens: Int32[Array, " max_rows"]
    logprobs: TokenLogprobs | None


def make_step(graphdef: Any) -> GraphStep:
    """The step that is compiled for each bucket: a batch to StepOutputs and caches.

    What is given behind the tokens is the length of a prefix that all rows share: it is attended to once.

    Args:
        graphdef: Of the model, from `nnx.split`; the params are its state.
    """

    def step(
        params: Any, caches: Any, metadata: Any, tokens: StepTokens, common_prefix_len: Any = None
    ) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)
        prefix = {} if common_prefix_len is None else {"common_prefix_len": common_prefix_len}
        metadata = metadata if tokens.near is None else tokens.near.beside(metadata)
        shared = model.plan(metadata, caches, **prefix)
        token_ids = jnp.where(tokens.rows >= 0, tokens.last[tokens.rows], tokens.ids)
        hidden, caches = model(token_ids, caches, metadata, plan=shared)
        return StepOutputs(model.logits(hidden[tokens.ends]), hidden, tokens.num_generated), caches

    return step


def step_graphs(step: GraphStep, buckets: Iterable[Bucket]) -> DecodeGraphs:
    """An engine's executables of a step."""
    return DecodeGraphs(step, buckets, from_host=True, compiler_options=_compiler_options)


def _compiler_options(bucket: Bucket) -> dict[str, Any]:
    is_gpus = jax.default_backend() == "gpu" and bucket.max_tokens >= CUBLAS_TOKENS
    return {"xla_gpu_enable_triton_gemm": False} if is_gpus else {}


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
        max_rows: The most rows of the sampler. Static.
        num_logprobs: How many of the likeliest tokens to report; None = no log-probabilities. Static.
    """
    logits = logits.astype(jnp.float32)
    wanted = logits if adjustments is None else adjusted(logits, adjustments, num_generated)
    tokens = sample(wanted, sampling, num_generated)
    logprobs = None if num_logprobs is None else logprobs_of(logits, tokens, num_logprobs)
    return Sampled(jnp.pad(tokens, (0, max_rows - tokens.shape[0])), logprobs)


def sampler_rows(bucket: Bucket, max_num_seqs: int) -> int:
    """Rows of the sampler behind a bucket: all requests of it; a power of two or one and a half of one.

    So few sizes that the samplers of all buckets compile in seconds. Two at least: for one row of logits XLA
    and cuBLAS widen the whole matrix to f32 first, 0.9 ms and 2.5 GB for 152k tokens of an 8B model.
    """
    rows = max(min(bucket.max_reqs, max_num_seqs), 2)
    power = 1 << (rows - 1).bit_length()
    return 3 * power // 4 if power > 2 and 3 * power // 4 >= rows else power


def with_implementation(model: Any, implementation: str | Sequence[str] | None) -> Any:
    """The model over the same arrays, its attention by `implementation`; the given one is left as it is."""
    if implementation is None:
        return model
    # Raises now, not in the first step.
    first_able(asked_for(implementation), {"mosaic_gpu": support.why_not_on(nnx.state(model))})
    model = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, PagedAttention):
            module.implementation = hashable(implementation)
    return model
