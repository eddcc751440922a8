"""Counters and histograms of an engine."""

import bisect
import dataclasses
from collections.abc import Sequence

# Bucket bounds of vllm:time_to_first_token_seconds and vllm:inter_token_latency_seconds.
TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_LATENCY = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
# Bucket bounds of vllm:e2e_request_latency_seconds and of the times of a request's phases.
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))  # bounds of vllm:iteration_tokens_total


class Histogram:
    """A histogram with Prometheus bucket bounds, usually of seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Start empty. Bounds must be ascending."""
        self.bounds, self._counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def __repr__(self) -> str:
        count = self.count
        return f"mean {self.sum / count:.3g} (n={count})" if count else "(n=0)"

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of values in each bucket; the last bucket counts values above the last bound."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        """Total number of values."""
        return sum(self._counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The state of an engine, and its counters since it was created.

    Attributes:
        num_running: Number of requests that have cache blocks.
        num_waiting: Number of requests that wait for cache blocks.
        num_steps: Number of steps run.
        num_cascade_steps: Number of steps that read a shared prefix once (cascade attention).
        num_failed_steps: Number of failed steps. A failed step ends all unfinished requests.
        num_compiles: Number of compiled executables, one per bucket.
        num_preemptions: Number of times that a request lost its blocks to an older one and was recomputed.
        num_blocks: Number of cache blocks available to requests.
        peak_blocks: Maximum number of blocks in use at once.
        num_used_blocks: Number of blocks in use.
        num_prefix_tokens: Number of tokens looked up in the prefix cache, counted again after a preemption.
            Zero without prefix caching; requests with prompt_logprobs are excluded.
        num_prefix_hit_tokens: Number of looked-up tokens found in the prefix cache.
        num_forked_tokens: Number of prompt tokens that completions shared with the request's first
            completion.
        num_generated_tokens: Number of tokens returned.
        num_drafts: Number of times that a request had draft tokens.
        num_draft_tokens: Number of draft tokens.
        num_accepted_tokens: Number of accepted draft tokens.
        time_to_first_token: Seconds from a request's arrival to its first token.
        inter_token_latency: Seconds between consecutive tokens of a request.
        queue_time: Seconds from a completion's arrival to its first step.
        prefill_time: Seconds from a completion's first step to its first token.
        step_tokens: Number of tokens computed per step.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_cascade_steps: int
    num_failed_steps: int
    num_compiles: int
    num_preemptions: int
    num_blocks: int
    peak_blocks: int
    num_used_blocks: int
    num_prefix_tokens: int
    num_prefix_hit_tokens: int
    num_forked_tokens: int
    num_generated_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    step_tokens: Histogram

    @property
    def acceptance_rate(self) -> float:
        """Fraction of draft tokens that were accepted; 0 without draft tokens."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def cache_usage(self) -> float:
        """Fraction of the cache blocks in use."""
        return self.num_used_blocks / self.num_blocks
