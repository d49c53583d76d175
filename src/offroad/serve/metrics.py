"""Prometheus metrics of one server: latencies seen here, gauges and counters from the engine's last message."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from offroad.execute.client import EngineClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens that were run."),
    ("generation_tokens", "generated_tokens", "Tokens that were generated."),
    ("prefix_cache_queries", "prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_matched_tokens", "prefix_matched_tokens", "Prompt tokens found in the prefix cache."),
    (
        "prefix_cache_resumed_tokens",
        "prefix_resumed_tokens",
        "Prompt tokens not run again, since their state was found.",
    ),
    ("preemptions", "preemptions", "Sequences that gave up their memory and started again."),
    ("spec_decode_num_drafts", "draft_rows", "Steps of a sequence that looked at drafts."),
    ("spec_decode_num_draft_tokens", "draft_tokens", "Drafts that were looked at."),
    ("spec_decode_num_accepted_tokens", "accepted_draft_tokens", "Drafts that were what the model said."),
    ("spec_decode_num_undrafted_steps", "undrafted_steps", "Steps with sequences to draft for, and no draft."),
    ("engine_steps", "steps", "Steps of the engine."),
    ("engine_step_seconds", "step_seconds", "Seconds spent in steps of the engine."),
    ("kernel_compilations_after_ready", "late_compilations", "Kernels compiled while requests ran; should be 0."),
)


class _EngineCollector(Collector):
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield GaugeMetricFamily("offroad_num_requests_running", "Sequences that run.", stats.running)
        yield GaugeMetricFamily("offroad_num_requests_waiting", "Sequences that wait.", stats.waiting)
        yield GaugeMetricFamily("offroad_kv_cache_usage_ratio", "Share of the KV blocks in use, 0 to 1.", used)
        for name, attribute, text in _COUNTERS:
            yield CounterMetricFamily(f"offroad_{name}", text, getattr(stats, attribute))
        for name, counts, text in (
            ("spec_decode_num_draft_tokens_per_pos", stats.drafted_by_place, "Drafts looked at, by place."),
            ("spec_decode_num_accepted_tokens_per_pos", stats.accepted_by_place, "Drafts accepted, by place."),
        ):
            family = CounterMetricFamily(f"offroad_{name}", text, labels=["position"])
            for place, count in enumerate(counts):
                family.add_metric([str(place)], count)
            yield family
        restarts = self._client.restarts
        yield CounterMetricFamily("offroad_engine_restarts", "How often the engine was started again.", restarts)
        length = 1 + stats.accepted_draft_tokens / stats.draft_rows if stats.draft_rows else 1.0
        text = "Tokens a step of a sequence that looked at drafts, on average."
        yield GaugeMetricFamily("offroad_spec_decode_mean_accepted_length", text, length)


class Metrics:
    """One registry for one app, so that several can live in a process."""

    def __init__(self, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(client))
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", _SECONDS
        )
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between tokens of a sequence.", _FAST)
        self.request = self._histogram(
            "e2e_request_latency_seconds", "From submission to the end of a choice.", _SECONDS
        )
        self._finished = Counter(
            "offroad_request_success",
            "Choices that have ended, by reason.",
            ["finished_reason"],
            registry=self.registry,
        )

    def finished(self, reason: str, seconds: float) -> None:
        """Counts a choice that ended: "stop", "length", "abort" or "error"."""
        self._finished.labels(reason).inc()
        self.request.observe(seconds)

    def text(self) -> bytes:
        """The exposition for a scrape."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"offroad_{name}", text, buckets=buckets, registry=self.registry)
