"""An engine's samplers: what stands behind each bucket's executable."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jattn.batch.bucket import Bucket
from jattn.parallel import logits_sharding, replicated_sharding
from jattn.serving.engine.logits_processors import Adjustments, adjusted
from jattn.serving.engine.logprobs import TokenLogprobs, logprobs_of
from jattn.serving.engine.rejection_sampler import Verified, rejection_sample
from jattn.serving.engine.sampler import SamplingMetadata, build_sampling_metadata, sample
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import Generation
from jattn.serving.engine.served_model import ServedModel


class Sampled(NamedTuple):
    """The next token of each row.

    Attributes:
        tokens: Padded to the most rows of the sampler: they feed a step of any bucket.
        logprobs: Of the rows, where somebody asked for them.
    """

    tokens: Int32[Array, " max_rows"]
    logprobs: TokenLogprobs | None


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


class StepSampling:
    """The sampling parameters of a step, one row a request: made anew where the requests changed.

    Attributes:
        place: Where they lie; None = on one device, or known to each process alone.
    """

    def __init__(self, place: jax.sharding.Sharding | None = None) -> None:
        """Begins with none."""
        self.place = place
        self._last: tuple[tuple[Any, ...], SamplingMetadata] | None = None

    def of(
        self, step: Step, generations: Sequence[Generation], num_rows: int
    ) -> tuple[SamplingMetadata, Any]:
        """Sampling parameters, and how many tokens each row's request has been given or promised."""
        num_generated = np.zeros(num_rows, np.int32)
        num_generated[: len(generations)] = [generation.num_asked_for for generation in generations]
        key = (step.request_ids, num_rows)
        if self._last is None or self._last[0] != key:
            params = [generation.sampling_params for generation in generations]
            made = build_sampling_metadata(params, num_rows)
            self._last = (key, made if self.place is None else jax.device_put(made, self.place))
        return self._last[1], num_generated


class Samplers:
    """Picks the tokens of a step, of few sizes for many buckets.

    Attributes:
        max_rows: The most rows behind any bucket.
    """

    def __init__(
        self, buckets: Sequence[Bucket], max_num_seqs: int, model: ServedModel, sampling: StepSampling
    ) -> None:
        """Compiles nothing yet.

        Args:
            buckets: Of all steps.
            max_num_seqs: Most requests of a step.
            model: Whose logits these are.
            sampling: What makes the parameters of steps.
        """
        self._max_num_seqs, self._vocab_size = max_num_seqs, model.config.vocab_size
        self._sampling_place = sampling.place
        self._by_vocabulary, self._whole = logits_sharding(model), replicated_sharding(model)
        self._gathered = jax.jit(lambda logits: logits, out_shardings=self._whole)
        self.max_rows = max(map(self.rows_of, buckets))

    def rows_of(self, bucket: Bucket) -> int:
        """Rows of the sampler: of steps with drafts those of the step, else all requests."""
        if bucket.decode_query_len > 1:
            return bucket.max_decodes
        return sampler_rows(bucket, self._max_num_seqs)

    def compile(self, rows: int, query_len: int) -> None:
        """Compiles what so many rows may want, one executable each.

        Nothing runs: on several devices what this thread starts and what the engine does would have to be
        started on each in the same order. A call finds what was compiled, as jit keeps it.
        """
        greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0, seed=0)
        filtered = (dataclasses.replace(drawn, min_p=0.5), dataclasses.replace(drawn, top_k=1))
        shape = lambda of, dtype, place: jax.ShapeDtypeStruct(of, dtype, sharding=place)
        logits = shape((rows * query_len, self._vocab_size), jnp.float32, self._by_vocabulary)
        counts = shape((rows,), jnp.int32, self._whole)
        ids = shape((rows * query_len,), jnp.int32, self._whole)
        drafts = (ids, shape((rows,), jnp.int32, None)) if query_len > 1 else None
        for params in (greedy, drawn, *filtered):
            made = build_sampling_metadata([params], rows)
            sampling = jax.tree.map(lambda array: shape(array.shape, array.dtype, self._sampling_place), made)
            given = logits
            if self._sums(sampling, drafts):
                self._gathered.lower(logits).compile()
                given = shape(logits.shape, logits.dtype, self._whole)
            function, arguments, static = self._call(given, drafts, counts, sampling)
            function.lower(*arguments, **static).compile()

    def __call__(
        self,
        logits: jax.Array,
        drafts: tuple[Any, Any] | None,
        num_generated: Any,
        sampling: SamplingMetadata,
        adjustments: Adjustments | None = None,
        num_logprobs: int | None = None,
    ) -> Sampled | Verified:
        """The next token of each row; with drafts (tokens, and how many a row has) all that they come by."""
        if self._sums(sampling, drafts, adjustments, num_logprobs):
            logits = self._gathered(logits)
        function, arguments, static = self._call(
            logits, drafts, num_generated, sampling, adjustments, num_logprobs
        )
        sampled: Sampled | Verified = function(*arguments, **static)
        return sampled

    def _sums(self, sampling: SamplingMetadata, *others: Any) -> bool:
        """Whether somebody sums over rows that devices have parts of: in one device's order, so of the whole.

        The rest looks for the best of a row, which devices find together.
        """
        return self._whole is not None and (sampling.cuts or any(given is not None for given in others))

    def _call(
        self,
        logits: Any,
        drafts: tuple[Any, Any] | None,
        num_generated: Any,
        sampling: SamplingMetadata,
        adjustments: Adjustments | None = None,
        num_logprobs: int | None = None,
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        if drafts is not None:
            drawn_by = (sampling, num_generated, adjustments)
            return rejection_sample, (logits, *drafts, *drawn_by), {"num_logprobs": num_logprobs}
        static = {"max_rows": self.max_rows, "num_logprobs": num_logprobs}
        return next_tokens, (logits, sampling, num_generated, adjustments), static
