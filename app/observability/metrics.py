"""Figures for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from app.domain.engine import Engine
from app.domain.operation import Operation
from app.observability.standing import Standing

CONTENT_TYPE = CONTENT_TYPE_LATEST

_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_CALL_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600)
_LAG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_OPERATION_SECONDS = (0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)


class Metrics:
    """Labels have few values: routes by template, never by path; engines by id, as registered."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = CounterMetric(
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
        self._refused = CounterMetric(
            "chadburn_auth_refused",
            "Calls refused for their token (401) or their scopes (403).",
            ("reason",),
            registry=self.registry,
        )
        self._operations = CounterMetric(
            "chadburn_operations_ended",
            "Operations by engine, kind and end.",
            ("engine", "kind", "state"),
            registry=self.registry,
        )
        self._operation_seconds = Histogram(
            "chadburn_operation_duration_seconds",
            "From acceptance to end.",
            ("kind",),
            buckets=_OPERATION_SECONDS,
            registry=self.registry,
        )
        self._streams = Gauge(
            "chadburn_streams_open", "Event streams open now.", registry=self.registry
        )
        self._policy_reads = CounterMetric(
            "chadburn_policy_reads",
            "Changed policy files, by what became of them.",
            ("outcome",),
            registry=self.registry,
        )
        self._policy_refused = Gauge(
            "chadburn_policy_refused",
            "1 while the policy file was refused and an earlier policy stays in force.",
            registry=self.registry,
        )
        self._discovery = Gauge(
            "chadburn_discovery_problems",
            "What a source of engines lists and can't be followed, and faults of the list itself.",
            ("source",),
            registry=self.registry,
        )
        self._engine_calls = CounterMetric(
            "chadburn_engine_calls",
            "Calls to engines, by how gRPC says that they ended.",
            ("dialect", "method", "code"),
            registry=self.registry,
        )
        self._engine_call_seconds = Histogram(
            "chadburn_engine_call_duration_seconds",
            "How long calls to engines took; of an order, until its end.",
            ("dialect", "method"),
            buckets=_CALL_SECONDS,
            registry=self.registry,
        )
        self._leases = Gauge(
            "chadburn_leases_held",
            "Engines that this gateway drives orders of.",
            registry=self.registry,
        )
        self._leases_taken_over = CounterMetric(
            "chadburn_leases_taken_over",
            "Leases taken that another gateway had let run out.",
            registry=self.registry,
        )
        self._leases_lost = CounterMetric(
            "chadburn_leases_lost",
            "Leases that ran out here and were taken by another gateway.",
            registry=self.registry,
        )
        self._stream_lag = Histogram(
            "chadburn_stream_lag_seconds",
            "From when an event was written down until a stream had sent it.",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        self._admitted = CounterMetric(
            "chadburn_auth_admitted",
            "Calls of callers who may, by the scope that it takes; any, where it takes none.",
            ("scope",),
            registry=self.registry,
        )
        self._standing = Standing()
        self.registry.register(self._standing)

    def request_answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def caller_refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def operation_ended(self, operation: Operation) -> None:
        kind = operation.kind.value
        self._operations.labels(operation.engine_id, kind, operation.state.value).inc()
        if operation.ended_at is not None:
            lasted = (operation.ended_at - operation.created_at).total_seconds()
            self._operation_seconds.labels(kind).observe(max(lasted, 0.0))

    def stream_opened(self) -> None:
        self._streams.inc()

    def stream_closed(self) -> None:
        self._streams.dec()

    def engine_called(self, dialect: str, method: str, code: str, seconds: float) -> None:
        """`method`: as `Service/Method`. `code`: as gRPC names it."""
        self._engine_calls.labels(dialect, method, code).inc()
        self._engine_call_seconds.labels(dialect, method).observe(seconds)

    def lease_taken(self, *, over: bool) -> None:
        """`over`: from somebody who had not given it back."""
        self._leases.inc()
        if over:
            self._leases_taken_over.inc()

    def lease_ended(self, *, lost: bool) -> None:
        self._leases.dec()
        if lost:
            self._leases_lost.inc()

    def event_sent(self, seconds: float) -> None:
        self._stream_lag.observe(max(seconds, 0.0))

    def caller_admitted(self, scope: str) -> None:
        self._admitted.labels(scope).inc()

    def saw(self, engines: Iterable[Engine], open_operations: Iterable[Operation]) -> None:
        """Engines and open operations as of now, for every scrape until the next call."""
        self._standing.show(tuple(engines), tuple(open_operations))

    def policy_read(self, outcome: str, *, in_force: bool) -> None:
        """`outcome`: loaded or refused. `in_force`: the policy is what its file says now."""
        self._policy_reads.labels(outcome).inc()
        self._policy_refused.set(not in_force)

    def discovered(self, source: str, problems: int) -> None:
        self._discovery.labels(source).set(problems)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def render_for(self, engines: Iterable[Engine], open_operations: Iterable[Operation]) -> bytes:
        """For who may not see all of the engines: all other figures, and those of these alone."""
        seen = tuple(engines)
        of_all = _Seen(self.registry, self._standing, frozenset(one.id for one in seen))
        return generate_latest(of_all) + generate_latest(Standing(seen, tuple(open_operations)))


class _Seen(Collector):
    """A registry as somebody may see it: without one of its collectors, and of other figures
    without those of engines that are not among `engines`."""

    def __init__(
        self, registry: CollectorRegistry, left_out: Collector, engines: frozenset[str]
    ) -> None:
        self._registry = registry
        self._left_out = left_out
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        left_out = {family.name for family in self._left_out.collect()}
        for family in self._registry.collect():
            if family.name not in left_out:
                shown = Metric(family.name, family.documentation, family.type, family.unit)
                shown.samples = [one for one in family.samples if self._may_be_seen(one.labels)]
                yield shown

    def _may_be_seen(self, labels: Mapping[str, str]) -> bool:
        return "engine" not in labels or labels["engine"] in self._engines
