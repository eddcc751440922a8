"""An engine's samplers: what stands behind each bucket's executable."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.bucket import Bucket
from jattn.serving.adjustments import Adjustments
from jattn.serving.rejection_sampler import Verified, rejection_sample
from jattn.serving.sampler import SamplingMetadata, build_sampling_metadata
from jattn.serving.sampling_params import SamplingParams
from jattn.serving.step import Sampled, next_tokens, sampler_rows


class Samplers:
    """Picks the tokens of a step, of few sizes for many buckets.

    Attributes:
        max_rows: The most rows behind any bucket.
    """

    def __init__(self, buckets: Sequence[Bucket], max_num_seqs: int, vocab_size: int) -> None:
        """Compiles nothing yet.

        Args:
            buckets: Of all steps.
            max_num_seqs: Most requests of a step.
            vocab_size: Of the logits.
        """
        self._max_num_seqs, self._vocab_size = max_num_seqs, vocab_size
        self.max_rows = max(map(self.rows_of, buckets))

    def rows_of(self, bucket: Bucket) -> int:
        """Rows of the sampler: of steps with drafts those of the step, else all requests."""
        if bucket.decode_query_len > 1:
            return bucket.max_decodes
        return sampler_rows(bucket, self._max_num_seqs)

    def compile(self, rows: int, query_len: int) -> None:
        """Compiles what so many rows may want, one executable each."""
        greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0, seed=0)
        filtered = (dataclasses.replace(drawn, min_p=0.5), dataclasses.replace(drawn, top_k=1))
        logits, ids = jnp.zeros((rows * query_len, self._vocab_size)), jnp.zeros(rows * query_len, jnp.int32)
        drafts = (ids, np.zeros(rows, np.int32)) if query_len > 1 else None
        for params in (greedy, drawn, *filtered):
            sampling = build_sampling_metadata([params], rows)
            self(logits, drafts, jnp.zeros(rows, jnp.int32), sampling)

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
        if drafts is not None:
            drawn_by = (sampling, num_generated, adjustments)
            return rejection_sample(logits, *drafts, *drawn_by, num_logprobs=num_logprobs)
        static = {"max_rows": self.max_rows, "num_logprobs": num_logprobs}
        return next_tokens(logits, sampling, num_generated, adjustments, **static)
