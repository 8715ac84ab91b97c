"""What is noticed of every request: middleware that counts it, logs a line and adds the common headers to the response;
and ``/metrics``, in Prometheus's words."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from ..service import Service

_LOG = logging.getLogger("autotune.service")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_TOKEN = re.compile(r"atn_[\w-]+")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


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


class Observe:
    """An ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = time.perf_counter() - began
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                status = message["status"]
                self._metrics.count(method, route, status, seconds)
                client = scope["client"][0] if scope["client"] else "-"
                _LOG.info("%s %s %s %s %.3f s", client, method, _shown(scope["path"]), status, seconds)
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, sending)


def _shown(path: str) -> str:
    """A path on one line, without the token that somebody may have put into it."""
    return quote(_TOKEN.sub("atn_...", path)[:500], safe="/:@")
