"""Sampling after a step: samplers for all buckets, and sampling metadata that is reused across steps."""

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
from jattn.serving.engine.logits_processors import LogitsAdjustments, adjust_logits
from jattn.serving.engine.logprobs import TokenLogprobs, compute_logprobs
from jattn.serving.engine.rejection_sampler import VerifiedTokens, rejection_sample
from jattn.serving.engine.sampler import SamplingMetadata, build_sampling_metadata, sample
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.served_model import ServedModel


class SampledTokens(NamedTuple):
    """The next token of each row.

    Attributes:
        tokens: Token ids, padded to the sampler's maximum number of rows, as input of any bucket's next step.
        logprobs: Log-probabilities of the rows, if requested.
    """

    tokens: Int32[Array, " max_rows"]
    logprobs: TokenLogprobs | None


@functools.partial(jax.jit, static_argnames=("max_rows", "num_logprobs"))
def next_tokens(
    logits: Float[Array, "reqs vocab"],
    sampling: SamplingMetadata,
    num_generated: Int32[Array, " reqs"],
    adjustments: LogitsAdjustments | None = None,
    *,
    max_rows: int,
    num_logprobs: int | None = None,
) -> SampledTokens:
    """Sample from adjusted logits, and compute the log-probabilities of the model's unmodified logits.

    This is not part of the step, so that the model is not compiled for each combination of sampling features.

    Args:
        logits: Logits of each row's last token.
        sampling: Sampling parameters of the rows.
        num_generated: Number of generated tokens of each row; see `sample`.
        adjustments: Adjustments of the logits; None: no adjustments.
        max_rows: Maximum number of sampler rows. Static.
        num_logprobs: Number of most likely tokens to report; None: no log-probabilities. Static.
    """
    logits = logits.astype(jnp.float32)
    adjusted_logits = logits if adjustments is None else adjust_logits(logits, adjustments, num_generated)
    tokens = sample(adjusted_logits, sampling, num_generated)
    logprobs = None if num_logprobs is None else compute_logprobs(logits, tokens, num_logprobs)
    return SampledTokens(jnp.pad(tokens, (0, max_rows - tokens.shape[0])), logprobs)


def num_sampler_rows(bucket: Bucket, max_num_seqs: int) -> int:
    """Return the number of sampler rows of a bucket: a power of two, or 1.5 times one.

    These few sizes keep the compile time of all samplers at seconds. There are at least two rows, because for
    one row XLA and cuBLAS convert the whole output matrix to f32 first (0.9 ms and 2.5 GB for 152k tokens of
    an 8B model).
    """
    rows = max(min(bucket.max_reqs, max_num_seqs), 2)
    power = 1 << (rows - 1).bit_length()
    return 3 * power // 4 if power > 2 and 3 * power // 4 >= rows else power


class SamplingMetadataCache:
    """The sampling metadata of the last step, rebuilt when the requests change.

    Attributes:
        sharding: Sharding of the metadata; None: a single device, or separate processes.
    """

    def __init__(self, sharding: jax.sharding.Sharding | None = None) -> None:
        """Start without metadata."""
        self.sharding = sharding
        self._last: tuple[tuple[Any, ...], SamplingMetadata] | None = None

    def get(
        self, step: Step, sequences: Sequence[SequenceState], num_rows: int
    ) -> tuple[SamplingMetadata, Any]:
        """Return the sampling metadata of a step, and the number of requested tokens of each row."""
        num_generated = np.zeros(num_rows, np.int32)
        num_generated[: len(sequences)] = [sequence.num_requested for sequence in sequences]
        key = (step.request_ids, num_rows)
        if self._last is None or self._last[0] != key:
            params = [sequence.sampling_params for sequence in sequences]
            metadata = build_sampling_metadata(params, num_rows)
            self._last = (key, metadata if self.sharding is None else jax.device_put(metadata, self.sharding))
        return self._last[1], num_generated


class StepSampler:
    """The samplers of an engine, in few sizes for many buckets.

    Attributes:
        max_rows: Maximum number of rows of any bucket.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        max_num_seqs: int,
        model: ServedModel,
        sampling: SamplingMetadataCache,
    ) -> None:
        """Prepare the samplers. Nothing is compiled yet.

        Args:
            buckets: Buckets of all steps.
            max_num_seqs: Maximum number of requests per step.
            model: Model that computes the logits.
            sampling: Cache of the steps' sampling metadata.
        """
        self._max_num_seqs, self._vocab_size = max_num_seqs, model.config.vocab_size
        self._sampling_sharding = sampling.sharding
        self._by_vocabulary, self._replicated = logits_sharding(model), replicated_sharding(model)
        self._gather = jax.jit(lambda logits: logits, out_shardings=self._replicated)
        self.max_rows = max(map(self.rows_of, buckets))

    def rows_of(self, bucket: Bucket) -> int:
        """Return the number of sampler rows of a bucket.

        Steps with drafts have one per decode row; other steps have one per request.
        """
        if bucket.decode_query_len > 1:
            return bucket.max_decodes
        return num_sampler_rows(bucket, self._max_num_seqs)

    def compile(self, rows: int, query_len: int) -> None:
        """Compile the samplers of one size, one executable for each combination of features.

        Nothing runs: on several devices, this thread and the engine would have to start work in the same
        order everywhere. jit caches the executables for later calls.
        """
        greedy, sampled_params = SamplingParams(), SamplingParams(temperature=1.0, seed=0)
        filtered = (
            dataclasses.replace(sampled_params, min_p=0.5),
            dataclasses.replace(sampled_params, top_k=1),
        )

        def abstract(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        logits = abstract((rows * query_len, self._vocab_size), jnp.float32, self._by_vocabulary)
        counts = abstract((rows,), jnp.int32, self._replicated)
        ids = abstract((rows * query_len,), jnp.int32, self._replicated)
        drafts = (ids, abstract((rows,), jnp.int32, None)) if query_len > 1 else None
        for params in (greedy, sampled_params, *filtered):
            metadata = build_sampling_metadata([params], rows)
            sampling = jax.tree.map(
                lambda array: abstract(array.shape, array.dtype, self._sampling_sharding), metadata
            )
            sharded_logits = logits
            if self._needs_full_rows(sampling, drafts):
                self._gather.lower(logits).compile()
                sharded_logits = abstract(logits.shape, logits.dtype, self._replicated)
            function, arguments, static = self._call(sharded_logits, drafts, counts, sampling)
            function.lower(*arguments, **static).compile()

    def __call__(
        self,
        logits: jax.Array,
        drafts: tuple[Any, Any] | None,
        num_generated: Any,
        sampling: SamplingMetadata,
        adjustments: LogitsAdjustments | None = None,
        num_logprobs: int | None = None,
    ) -> SampledTokens | VerifiedTokens:
        """Sample the next token of each row.

        With drafts (tokens, and their number per row), verify them as well.
        """
        if self._needs_full_rows(sampling, drafts, adjustments, num_logprobs):
            logits = self._gather(logits)
        function, arguments, static = self._call(
            logits, drafts, num_generated, sampling, adjustments, num_logprobs
        )
        sampled: SampledTokens | VerifiedTokens = function(*arguments, **static)
        return sampled

    def _needs_full_rows(self, sampling: SamplingMetadata, *others: Any) -> bool:
        """Return whether the sampler reduces over rows that are sharded by vocabulary.

        Such sums must run in the order of a single device, so the rows are gathered. Without them, only the
        maximum of a row is needed, which the devices compute together.
        """
        return self._replicated is not None and (
            sampling.has_top_k_or_top_p or any(sharded_logits is not None for sharded_logits in others)
        )

    def _call(
        self,
        logits: Any,
        drafts: tuple[Any, Any] | None,
        num_generated: Any,
        sampling: SamplingMetadata,
        adjustments: LogitsAdjustments | None = None,
        num_logprobs: int | None = None,
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        if drafts is not None:
            sampling_inputs = (sampling, num_generated, adjustments)
            return rejection_sample, (logits, *drafts, *sampling_inputs), {"num_logprobs": num_logprobs}
        static = {"max_rows": self.max_rows, "num_logprobs": num_logprobs}
        return next_tokens, (logits, sampling, num_generated, adjustments), static
