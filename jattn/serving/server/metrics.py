"""`GET /metrics`: metrics under vLLM's names, in Prometheus' format."""

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

NUM_COMPLETIONS_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
NUM_TOKENS_BUCKETS = tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5))
ENGINE_GAUGES = {
    "num_requests_running": (
        "Number of completions that hold KV-cache blocks.",
        lambda stats: stats.num_running,
    ),
    "kv_cache_usage_perc": ("KV-cache usage; 1 means 100 percent.", lambda stats: stats.cache_usage),
}
ENGINE_COUNTERS = {
    "num_preemptions": ("Number of preemptions.", lambda stats: stats.num_preemptions),
    "generation_tokens": ("Number of generated tokens.", lambda stats: stats.num_generated_tokens),
    "prefix_cache_queries": (
        "Number of tokens looked up in the prefix cache.",
        lambda stats: stats.num_prefix_tokens,
    ),
    "prefix_cache_hits": (
        "Number of tokens found in the prefix cache.",
        lambda stats: stats.num_prefix_hit_tokens,
    ),
    "spec_decode_num_drafts": ("Number of drafts.", lambda stats: stats.num_drafts),
    "spec_decode_num_draft_tokens": ("Number of draft tokens.", lambda stats: stats.num_draft_tokens),
    "spec_decode_num_accepted_tokens": (
        "Number of accepted draft tokens.",
        lambda stats: stats.num_accepted_tokens,
    ),
    "failed_steps": (
        "Number of steps that failed and ended all running requests.",
        lambda stats: stats.num_failed_steps,
    ),
}
ENGINE_HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "Time from a request's arrival to its first token, in seconds.",
        lambda stats: stats.time_to_first_token,
    ),
    "inter_token_latency_seconds": (
        "Time between two tokens of a completion, in seconds.",
        lambda stats: stats.inter_token_latency,
    ),
    "request_queue_time_seconds": (
        "Time from a request's arrival to its first step, in seconds.",
        lambda stats: stats.queue_time,
    ),
    "request_prefill_time_seconds": (
        "Time from a request's first step to its first token, in seconds.",
        lambda stats: stats.prefill_time,
    ),
    "iteration_tokens_total": ("Number of tokens per step.", lambda stats: stats.step_tokens),
}


class RequestMetrics:
    """Metrics of requests that the server records, from the clients' point of view.

    Attributes:
        finish_reasons: Number of completions by finish reason.
        num_prompt_tokens: Number of prompt tokens that have been computed.
        seconds: Duration of requests, in seconds.
        prompt_tokens: Number of prompt tokens per request.
        generation_tokens: Number of generated tokens per request.
        max_tokens: max_tokens of requests.
        decode_seconds: Time from a request's first token to its last, in seconds.
        num_completions: Number of completions per request.
    """

    def __init__(self) -> None:
        self.finish_reasons: collections.Counter[str] = collections.Counter(
            {"stop": 0, "length": 0, "abort": 0}
        )
        self.num_prompt_tokens = 0
        self.seconds, self.decode_seconds = Histogram(REQUEST_SECONDS), Histogram(REQUEST_SECONDS)
        self.prompt_tokens = Histogram(NUM_TOKENS_BUCKETS)
        self.generation_tokens = Histogram(NUM_TOKENS_BUCKETS)
        self.max_tokens = Histogram(NUM_TOKENS_BUCKETS)
        self.num_completions = Histogram(NUM_COMPLETIONS_BUCKETS)

    def record_finish(self, finish_reason: str) -> None:
        """Record the end of a completion."""
        self.finish_reasons[finish_reason] += 1

    def record_prompt(self, num_prompt_tokens: int) -> None:
        """Record that a prompt has been computed, even if its client disconnects later."""
        self.num_prompt_tokens += num_prompt_tokens

    def record_request(self, params: SamplingParams, num_prompt_tokens: int, num_generated: int) -> None:
        """Record the sizes of a finished request.

        Args:
            params: Sampling parameters of the request.
            num_prompt_tokens: Number of prompt tokens.
            num_generated: Number of generated tokens of all completions.
        """
        self.prompt_tokens.add(float(num_prompt_tokens))
        self.generation_tokens.add(float(num_generated))
        if params.max_tokens is not None:
            self.max_tokens.add(float(params.max_tokens))
        self.num_completions.add(float(params.n))

    def record_latency(self, seconds: float, decode_seconds: float) -> None:
        """Record the duration of a finished request.

        Args:
            seconds: Duration of the request, in seconds.
            decode_seconds: Time from the first token to the last, in seconds.
        """
        self.seconds.add(seconds)
        self.decode_seconds.add(decode_seconds)


class MetricsCollector(Collector):
    """Prometheus collector of the metrics at one scrape."""

    def __init__(
        self,
        model_name: str,
        stats: EngineStats,
        request_metrics: RequestMetrics,
        num_waiting: int,
        cache_config: Mapping[str, int],
    ) -> None:
        self._stats, self._requests = stats, request_metrics
        self._num_waiting, self._cache_config = num_waiting, cache_config
        self._labels, self._label_values = ["model_name", "engine"], [model_name, "0"]

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from self._engine_metrics(self._stats)
        requests = self._requests
        yield self._gauge(
            "num_requests_waiting", "Number of completions that wait for KV-cache blocks.", self._num_waiting
        )
        yield self._counter("prompt_tokens", "Number of prompt tokens.", requests.num_prompt_tokens)
        yield self._histogram(
            "e2e_request_latency_seconds", "Duration of requests, in seconds.", requests.seconds
        )
        yield self._histogram(
            "request_prompt_tokens", "Number of prompt tokens per request.", requests.prompt_tokens
        )
        yield self._histogram(
            "request_generation_tokens",
            "Number of generated tokens per request.",
            requests.generation_tokens,
        )
        yield self._histogram(
            "request_decode_time_seconds",
            "Time from a request's first token to its last, in seconds.",
            requests.decode_seconds,
        )
        yield self._histogram(
            "request_params_max_tokens", "max_tokens parameter of requests.", requests.max_tokens
        )
        yield self._histogram("request_params_n", "n parameter of requests.", requests.num_completions)
        success = CounterMetricFamily(
            "vllm:request_success",
            "Number of completions, by finish reason.",
            labels=[*self._labels, "finished_reason"],
        )
        for finish_reason, count in requests.finish_reasons.items():
            success.add_metric([*self._label_values, finish_reason], count)
        yield success
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache.", labels=["engine", *self._cache_config]
        )
        cache.add_metric(["0", *map(str, self._cache_config.values())], 1)
        yield cache
        yield from PROCESS_COLLECTOR.collect()

    def _engine_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        for name, (description, get_value) in ENGINE_GAUGES.items():
            yield self._gauge(name, description, get_value(stats))
        for name, (description, get_value) in ENGINE_COUNTERS.items():
            yield self._counter(name, description, get_value(stats))
        for name, (description, get_histogram) in ENGINE_HISTOGRAMS.items():
            yield self._histogram(name, description, get_histogram(stats))

    def _gauge(self, name: str, description: str, value: float | int) -> Metric:
        metric = GaugeMetricFamily(f"vllm:{name}", description, labels=self._labels)
        metric.add_metric(self._label_values, value)
        return metric

    def _counter(self, name: str, description: str, value: float | int) -> Metric:
        metric = CounterMetricFamily(f"vllm:{name}", description, labels=self._labels)
        metric.add_metric(self._label_values, value)
        return metric

    def _histogram(self, name: str, description: str, histogram: Histogram) -> Metric:
        metric = HistogramMetricFamily(f"vllm:{name}", description, labels=self._labels)
        cumulative_count, buckets = 0, []
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            cumulative_count += count
            buckets.append((str(bound), float(cumulative_count)))
        metric.add_metric(self._label_values, buckets, histogram.sum)
        return metric


def render_metrics(
    model_name: str,
    stats: EngineStats,
    request_metrics: RequestMetrics,
    num_waiting: int,
    cache_config: Mapping[str, int],
) -> bytes:
    """Return the page that Prometheus scrapes.

    Args:
        model_name: Value of the label "model_name".
        stats: Current statistics of the engine.
        request_metrics: Metrics that the server recorded.
        num_waiting: Number of completions that are not in a step yet.
        cache_config: Configuration of the KV cache, under vLLM's names.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(model_name, stats, request_metrics, num_waiting, cache_config))
    return generate_latest(registry)
