"""Counts of an engine, for a dashboard."""

import bisect
import dataclasses
from collections.abc import Sequence

# vLLM's buckets of vllm:time_to_first_token_seconds and vllm:inter_token_latency_seconds.
TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_LATENCY = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
# Of vllm:e2e_request_latency_seconds, and of the times of a request's phases.
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))  # of vllm:iteration_tokens_total


class Histogram:
    """How often a number, mostly of seconds, was at most each bound, as Prometheus counts."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Starts empty; bounds ascend."""
        self.bounds, self._counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def __repr__(self) -> str:
        return f"{self.count} of {self.sum:.3g} in all"

    def add(self, value: float) -> None:
        """Counts one."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Of each bound, and of those above the last."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        """All of them."""
        return sum(self._counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """An engine now, and counts since it was made.

    Attributes:
        num_running: Requests that have blocks.
        num_waiting: Requests that wait for some.
        num_steps: Steps run.
        num_cascade_steps: Those that attended to a prefix of all requests once.
        num_failed_steps: Steps that failed, and took all requests with them that were open.
        num_compiles: Executables compiled, one a bucket.
        num_preemptions: Times that a request lost its blocks to an older one and was computed again.
        num_blocks: Cache blocks that requests can have.
        peak_blocks: Most of them in use at once.
        num_used_blocks: Those in use now.
        num_prefix_tokens: Tokens of requests that looked for what others had computed (again, where they were
            preempted): not without prefix caching, and not of those that want prompt_logprobs.
        num_prefix_hit_tokens: Those of them that others had computed.
        num_forked_tokens: Tokens of prompts that completions took over from the first one of theirs.
        num_generated_tokens: Tokens handed out.
        num_drafts: How often a request was drafted for.
        num_draft_tokens: Tokens drafted.
        num_accepted_tokens: Those of them that the model would have picked.
        time_to_first_token: Seconds from a request's arrival.
        inter_token_latency: Seconds between two of its tokens.
        queue_time: Seconds from a completion's arrival until a step first has it.
        prefill_time: Seconds from there to its first token.
        step_tokens: Tokens that steps computed.
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
        """Share of the drafted tokens that were accepted; 0 where none was drafted."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def cache_usage(self) -> float:
        """Share of the blocks that requests have now."""
        return self.num_used_blocks / self.num_blocks
