"""``/metrics``, in Prometheus's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ..service import Service


class Metrics:
    """Counters since the server's start, and gauges of the present."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Searches(service))
        labels = ("method", "route", "status")
        self._requests = Counter("autotune_requests", "Requests answered.", labels, registry=self._registry)
        self._seconds = Histogram(
            "autotune_request_seconds", "Seconds to the answer's beginning.", ("route",), registry=self._registry
        )

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; ``route`` is a template, so that there are few."""
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)


class _Searches(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterator[Metric]:
        """Open the reader; nothing is read before the first request."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Read now."""
        states = GaugeMetricFamily("autotune_searches", "Searches by state.", labels=["state"])
        for state, number in self._service.searches.counts().items():
            states.add_metric([state], number)
        yield states
        running = GaugeMetricFamily("autotune_drivers", "Searches that this server works on.")
        running.add_metric([], self._service.runner.num_running)
        yield running
