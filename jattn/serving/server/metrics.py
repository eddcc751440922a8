"""`GET /metrics`: the engine's counts under vLLM's names, as Prometheus reads them."""

import collections
from collections.abc import Iterator, Mapping

from prometheus_client import PROCESS_COLLECTOR, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.stats import REQUEST_SECONDS, EngineStats, Histogram

COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)  # of vllm:request_params_n
# Of vllm:request_prompt_tokens, request_generation_tokens and request_params_max_tokens.
TOKENS = tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5))
ENGINE_GAUGES = {
    "num_requests_running": ("Completions that have cache blocks.", lambda now: now.num_running),
    "kv_cache_usage_perc": ("Share of the cache blocks in use; 1 = all.", lambda now: now.cache_usage),
}
ENGINE_COUNTERS = {
    "num_preemptions": ("Times that a request lost its blocks.", lambda now: now.num_preemptions),
    "generation_tokens": ("Tokens generated.", lambda now: now.num_generated_tokens),
    "prefix_cache_queries": (
        "Tokens of requests that looked for others' blocks.",
        lambda now: now.num_prefix_tokens,
    ),
    "prefix_cache_hits": ("Those that others had computed.", lambda now: now.num_prefix_hit_tokens),
    "spec_decode_num_drafts": ("Times that a request was drafted for.", lambda now: now.num_drafts),
    "spec_decode_num_draft_tokens": ("Tokens drafted.", lambda now: now.num_draft_tokens),
    "spec_decode_num_accepted_tokens": ("Those that stayed.", lambda now: now.num_accepted_tokens),
    "failed_steps": ("Steps that failed, with all that was open.", lambda now: now.num_failed_steps),
}
ENGINE_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival.", lambda now: now.time_to_first_token),
    "inter_token_latency_seconds": ("Between two tokens.", lambda now: now.inter_token_latency),
    "request_queue_time_seconds": ("Until a step has it.", lambda now: now.queue_time),
    "request_prefill_time_seconds": ("From there to the first token.", lambda now: now.prefill_time),
    "iteration_tokens_total": ("Tokens that a step computes.", lambda now: now.step_tokens),
}


class Counts:
    """What the server counts: of requests, as clients see them."""

    def __init__(self) -> None:
        """All zero."""
        self.reasons: collections.Counter[str] = collections.Counter({"stop": 0, "length": 0, "abort": 0})
        self.num_prompt_tokens = 0
        self.seconds, self.prompt_tokens = Histogram(REQUEST_SECONDS), Histogram(TOKENS)
        self.generation_tokens, self.max_tokens = Histogram(TOKENS), Histogram(TOKENS)
        self.decode_seconds, self.num_completions = Histogram(REQUEST_SECONDS), Histogram(COMPLETIONS)

    def finished(self, reason: str) -> None:
        """A completion has ended."""
        self.reasons[reason] += 1

    def began(self, num_prompt_tokens: int) -> None:
        """A prompt has been computed, whether its client stays for what it becomes or not."""
        self.num_prompt_tokens += num_prompt_tokens

    def served(self, params: SamplingParams, num_prompt_tokens: int, num_generated: int) -> None:
        """A prompt has all its completions."""
        self.prompt_tokens.add(float(num_prompt_tokens))
        self.generation_tokens.add(float(num_generated))
        if params.max_tokens is not None:
            self.max_tokens.add(float(params.max_tokens))
        self.num_completions.add(float(params.n))

    def took(self, seconds: float, decode_seconds: float) -> None:
        """That long, of it so long from the first token to the last."""
        self.seconds.add(seconds)
        self.decode_seconds.add(decode_seconds)


class EngineCollector(Collector):
    """What a scrape finds: everything is read when it is asked for, and counted in one place."""

    def __init__(
        self,
        model_name: str,
        stats: EngineStats,
        counts: Counts,
        num_waiting: int,
        cache: Mapping[str, int],
    ) -> None:
        self._stats, self._counts, self._num_waiting, self._cache = stats, counts, num_waiting, cache
        self._labels, self._values = ["model_name", "engine"], [model_name, "0"]

    def collect(self) -> Iterator[Metric]:
        """All metrics now."""
        yield from self._of_engine(self._stats)
        counts = self._counts
        yield self._gauge("num_requests_waiting", "Completions without.", self._num_waiting)
        yield self._counter("prompt_tokens", "Tokens of prompts.", counts.num_prompt_tokens)
        yield self._histogram("e2e_request_latency_seconds", "Of a request.", counts.seconds)
        yield self._histogram("request_prompt_tokens", "Of a request.", counts.prompt_tokens)
        yield self._histogram("request_generation_tokens", "Of a request.", counts.generation_tokens)
        yield self._histogram("request_decode_time_seconds", "Behind the first token.", counts.decode_seconds)
        yield self._histogram("request_params_max_tokens", "As asked for.", counts.max_tokens)
        yield self._histogram("request_params_n", "As asked for.", counts.num_completions)
        success = CounterMetricFamily(
            "vllm:request_success",
            "Completions, by why they ended.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, count in counts.reasons.items():
            success.add_metric([*self._values, reason], count)
        yield success
        cache = GaugeMetricFamily("vllm:cache_config_info", "The cache.", labels=["engine", *self._cache])
        cache.add_metric(["0", *map(str, self._cache.values())], 1)
        yield cache
        yield from PROCESS_COLLECTOR.collect()

    def _of_engine(self, now: EngineStats) -> Iterator[Metric]:
        for name, (told, value) in ENGINE_GAUGES.items():
            yield self._gauge(name, told, value(now))
        for name, (told, value) in ENGINE_COUNTERS.items():
            yield self._counter(name, told, value(now))
        for name, (told, histogram) in ENGINE_HISTOGRAMS.items():
            yield self._histogram(name, told, histogram(now))

    def _gauge(self, name: str, told: str, value: float | int) -> Metric:
        metric = GaugeMetricFamily(f"vllm:{name}", told, labels=self._labels)
        metric.add_metric(self._values, value)
        return metric

    def _counter(self, name: str, told: str, value: float | int) -> Metric:
        metric = CounterMetricFamily(f"vllm:{name}", told, labels=self._labels)
        metric.add_metric(self._values, value)
        return metric

    def _histogram(self, name: str, told: str, histogram: Histogram) -> Metric:
        metric = HistogramMetricFamily(f"vllm:{name}", told, labels=self._labels)
        total, buckets = 0, []
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        metric.add_metric(self._values, buckets, histogram.sum)
        return metric


def exposition(
    model_name: str, stats: EngineStats, counts: Counts, num_waiting: int, cache: Mapping[str, int]
) -> bytes:
    """The page that Prometheus scrapes.

    Args:
        model_name: A label of all metrics.
        stats: Of the engine, now.
        counts: Of the server.
        num_waiting: Completions that no step has yet.
        cache: Its sizes, by vLLM's names.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(model_name, stats, counts, num_waiting, cache))
    return generate_latest(registry)
