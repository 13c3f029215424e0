"""The engine's counters in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "mlx_dspark_"
GAUGES = {
    "active": ("active_requests", "Requests being decoded or prefilled."),
    "waiting": ("waiting_requests", "Requests in the queue."),
    "tau": ("tau", "Committed tokens per round of a request, over all rounds so far."),
    "rows_per_request": ("rows_per_request", "Rows verified per request and round, over all rounds so far."),
    "parked_share": ("parked_share", "Share of rounds without a draft."),
    "tokens_per_second": ("tokens_per_second", "Tokens committed per second, lately."),
    "kv_bytes": ("kv_bytes", "Bytes reserved for caches, kept prefixes included."),
    "kv_limit_bytes": ("kv_limit_bytes", "Bytes that caches may take."),
    "prefix_entries": ("prefix_entries", "Finished conversations kept for reuse."),
}
COUNTERS = {
    "requests": ("requests", "Requests accepted."),
    "rounds": ("rounds", "Rounds, counted per request."),
    "tokens": ("tokens", "Tokens committed."),
    "rows": ("rows", "Rows verified."),
    "drafts": ("drafts", "Draft tokens verified."),
    "accepted": ("accepted_drafts", "Draft tokens accepted."),
    "prefix_hits": ("prefix_hits", "Requests that began with a kept prefix."),
    "reused_tokens": ("reused_tokens", "Prompt tokens that were not computed again."),
}


class EngineCollector(Collector):
    """Reads one snapshot of the engine per scrape."""

    def __init__(self, snapshot: Callable[[], Any]):
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        now = self._snapshot()
        for field, (name, text) in GAUGES.items():
            if getattr(now, field) is not None:  # nothing to tell before the first round
                yield GaugeMetricFamily(PREFIX + name, text, value=getattr(now, field))
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(now, field))
        finished = CounterMetricFamily(PREFIX + "finished_requests", "Requests by how they ended.", labels=["reason"])
        for reason, count in now.finished.items():
            finished.add_metric([reason], count)
        yield finished


class Metrics:
    """Everything that /metrics shows: the engine, answers by status, and the process (on Linux)."""

    def __init__(self, snapshot: Callable[[], Any]):
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(snapshot))
        ProcessCollector(registry=self._registry)
        self._answers = Counter(PREFIX + "http_answers", "HTTP answers by path and status.", ["path", "status"],
                                registry=self._registry)

    def count(self, path: str, status: int) -> None:
        """Count an answer; `path` must come from a fixed set, or clients could fill the memory."""
        self._answers.labels(path, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
