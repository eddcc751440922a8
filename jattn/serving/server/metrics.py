"""`GET /metrics`: metrics under vLLM's names, in Prometheus' format."""

from collections.abc import Iterator, Mapping, Sequence

import prometheus_client
from prometheus_client import PROCESS_COLLECTOR, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jattn.serving.engine.stats import REQUEST_SECONDS, EngineStats, Histogram

LABELS, ENGINE = ("model_name", "engine"), "0"
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
        registry: Registry of the metrics.
        success: Number of completions, by finish reason.
        num_prompt_tokens: Number of prompt tokens that have been computed, also of clients that disconnect.
        seconds: Duration of requests, in seconds.
        prompt_tokens: Number of prompt tokens per request.
        generation_tokens: Number of generated tokens per request.
        max_tokens: max_tokens of requests.
        decode_seconds: Time from a request's first token to its last, in seconds.
        num_completions: Number of completions per request.
    """

    def __init__(self, model_name: str) -> None:
        """Create the metrics; `model_name` is the value of their label."""
        self.registry = CollectorRegistry(auto_describe=False)

        def histogram(name: str, description: str, bounds: Sequence[float]) -> prometheus_client.Histogram:
            metric = prometheus_client.Histogram(
                f"vllm:{name}", description, LABELS, registry=self.registry, buckets=bounds
            )
            return metric.labels(model_name, ENGINE)

        success = Counter(
            "vllm:request_success",
            "Number of completions, by finish reason.",
            [*LABELS, "finished_reason"],
            registry=self.registry,
        )
        self.success = {
            reason: success.labels(model_name, ENGINE, reason) for reason in ("stop", "length", "abort")
        }
        prompt_tokens = Counter(
            "vllm:prompt_tokens", "Number of prompt tokens.", LABELS, registry=self.registry
        )
        self.num_prompt_tokens = prompt_tokens.labels(model_name, ENGINE)
        self.seconds = histogram(
            "e2e_request_latency_seconds", "Duration of requests, in seconds.", REQUEST_SECONDS
        )
        self.decode_seconds = histogram(
            "request_decode_time_seconds",
            "Time from a request's first token to its last, in seconds.",
            REQUEST_SECONDS,
        )
        self.prompt_tokens = histogram(
            "request_prompt_tokens", "Number of prompt tokens per request.", NUM_TOKENS_BUCKETS
        )
        self.generation_tokens = histogram(
            "request_generation_tokens", "Number of generated tokens per request.", NUM_TOKENS_BUCKETS
        )
        self.max_tokens = histogram(
            "request_params_max_tokens", "max_tokens parameter of requests.", NUM_TOKENS_BUCKETS
        )
        self.num_completions = histogram(
            "request_params_n", "n parameter of requests.", NUM_COMPLETIONS_BUCKETS
        )


class EngineCollector(Collector):
    """Prometheus collector of an engine's metrics at one scrape."""

    def __init__(
        self, model_name: str, stats: EngineStats, num_waiting: int, cache_config: Mapping[str, int]
    ) -> None:
        self._stats, self._num_waiting, self._cache_config = stats, num_waiting, cache_config
        self._label_values = [model_name, ENGINE]

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        for name, (description, get_value) in ENGINE_GAUGES.items():
            yield self._gauge(name, description, get_value(self._stats))
        for name, (description, get_value) in ENGINE_COUNTERS.items():
            metric = CounterMetricFamily(f"vllm:{name}", description, labels=LABELS)
            metric.add_metric(self._label_values, get_value(self._stats))
            yield metric
        for name, (description, get_histogram) in ENGINE_HISTOGRAMS.items():
            yield self._histogram(name, description, get_histogram(self._stats))
        description = "Number of completions that wait for KV-cache blocks."
        yield self._gauge("num_requests_waiting", description, self._num_waiting)
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache.", labels=["engine", *self._cache_config]
        )
        cache.add_metric([ENGINE, *map(str, self._cache_config.values())], 1)
        yield cache
        yield from PROCESS_COLLECTOR.collect()

    def _gauge(self, name: str, description: str, value: float | int) -> Metric:
        metric = GaugeMetricFamily(f"vllm:{name}", description, labels=LABELS)
        metric.add_metric(self._label_values, value)
        return metric

    def _histogram(self, name: str, description: str, histogram: Histogram) -> Metric:
        metric = HistogramMetricFamily(f"vllm:{name}", description, labels=LABELS)
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
    registry.register(EngineCollector(model_name, stats, num_waiting, cache_config))
    return generate_latest(registry) + generate_latest(request_metrics.registry)
