"""Figures for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from app.domain.engine import Engine, HealthState
from app.domain.operation import Operation

CONTENT_TYPE = CONTENT_TYPE_LATEST

_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_OPERATION_SECONDS = (0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)


class Metrics:
    """Labels have few values: routes by template, never by path; engines by id, as registered."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "chadburn_http_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._request_seconds = Histogram(
            "chadburn_http_request_duration_seconds",
            "Time to the first byte of the answer.",
            ("route",),
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self._refused = Counter(
            "chadburn_auth_refused",
            "Calls refused for their token (401) or their scopes (403).",
            ("reason",),
            registry=self.registry,
        )
        self._operations = Counter(
            "chadburn_operations_ended",
            "Operations by kind and end.",
            ("kind", "state"),
            registry=self.registry,
        )
        self._operation_seconds = Histogram(
            "chadburn_operation_duration_seconds",
            "From acceptance to end.",
            ("kind",),
            buckets=_OPERATION_SECONDS,
            registry=self.registry,
        )
        self._open_operations = Gauge(
            "chadburn_operations_open",
            "Operations that have not ended, by state.",
            ("state",),
            registry=self.registry,
        )
        self._streams = Gauge(
            "chadburn_streams_open", "Event streams open now.", registry=self.registry
        )
        self._health = Gauge(
            "chadburn_engine_health",
            "1 for the state an engine was last seen in, 0 for the others.",
            ("engine", "state"),
            registry=self.registry,
        )
        self._observed_at = Gauge(
            "chadburn_engine_observed_timestamp_seconds",
            "When an engine was last asked, unix time.",
            ("engine",),
            registry=self.registry,
        )

    def request_answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def caller_refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def operation_ended(self, operation: Operation) -> None:
        self._operations.labels(operation.kind.value, operation.state.value).inc()
        if operation.ended_at is not None:
            lasted = (operation.ended_at - operation.created_at).total_seconds()
            self._operation_seconds.labels(operation.kind.value).observe(max(lasted, 0.0))

    def stream_opened(self) -> None:
        self._streams.inc()

    def stream_closed(self) -> None:
        self._streams.dec()

    def render(self, engines: Iterable[Engine], open_operations: Iterable[Operation]) -> bytes:
        """The exposition, with the state of engines and open operations as of this call."""
        self._health.clear()
        self._observed_at.clear()
        self._open_operations.clear()
        for engine in engines:
            for state in HealthState:
                seen = float(engine.observed.health is state)
                self._health.labels(engine.id, state.value).set(seen)
            if engine.observed.observed_at is not None:
                at = engine.observed.observed_at.timestamp()
                self._observed_at.labels(engine.id).set(at)
        for operation in open_operations:
            self._open_operations.labels(operation.state.value).inc()
        return generate_latest(self.registry)
