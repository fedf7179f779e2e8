"""Prometheus metrics: counters and histograms of what the API process sees, gauges of what the engine reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gllm.outputs import Delta

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """One registry a server, so that two servers in one process do not share their numbers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "rserve_http_requests", "HTTP requests by path and status", ("path", "status"), registry=self.registry
        )
        self.generations = Counter(
            "rserve_generations", "generations by how they ended", ("outcome",), registry=self.registry
        )
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens, item tokens included")
        self.item_tokens = self._counter("image_tokens", "prompt tokens that stand for images")
        self.output_tokens = self._counter("output_tokens", "generated tokens")
        self.ttft = self._histogram("time_to_first_token_seconds", "from the request to its first token", _SECONDS)
        self.tpot = self._histogram("time_per_output_token_seconds", "a request's mean after its first", _TOKEN_SECONDS)
        self.inter_token = self._histogram("inter_token_seconds", "between two outputs of a request", _TOKEN_SECONDS)
        self.e2e = self._histogram("request_seconds", "from the request to its last token", _SECONDS)
        self._engine = EngineGauges()
        self.registry.register(self._engine)

    def set_gauges(self, stats: Mapping[str, float]) -> None:
        """Show these numbers of the engine, and no older ones."""
        self._engine.stats = stats

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"rserve_{name}", help, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"rserve_{name}", help, buckets=buckets, registry=self.registry)


class EngineGauges(Collector):
    """The engine's numbers as they are at a scrape: those that it does not report (any more) are absent."""

    def __init__(self) -> None:
        self.stats: Mapping[str, float] = {}

    def describe(self) -> Iterable[Metric]:
        return ()  # their names are not known beforehand

    def collect(self) -> Iterable[Metric]:
        for name, value in self.stats.items():
            yield GaugeMetricFamily(f"rserve_{name}", name.replace("_", " "), value)


class Observation:
    """The life of one generation, from its creation to `end`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._num_tokens = 0
        self._ended = False

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._num_tokens

    def prompt(self, num_tokens: int, num_item_tokens: int) -> None:
        self._metrics.prompt_tokens.inc(num_tokens)
        self._metrics.item_tokens.inc(num_item_tokens)

    def saw(self, delta: Delta) -> None:
        """This output has just arrived."""
        if delta.token_ids:
            self._saw_tokens(len(delta.token_ids))
        if delta.finish_reason is not None:
            self.end(delta.finish_reason)

    def _saw_tokens(self, count: int) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._metrics.ttft.observe(now - self._start)
        else:
            self._metrics.inter_token.observe(now - self._last)
        self._last = now
        self._num_tokens += count
        self._metrics.output_tokens.inc(count)

    def end(self, outcome: str) -> None:
        """outcome: a finish reason, "error" or "client_left". Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._metrics.generations.labels(outcome).inc()
        if self._first is not None and outcome in ("stop", "length"):
            self._metrics.e2e.observe(self._last - self._start)
            if self._num_tokens > 1:
                self._metrics.tpot.observe((self._last - self._first) / (self._num_tokens - 1))
