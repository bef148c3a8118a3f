"""Figures for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from app.domain.engine import Engine, HealthState
from app.domain.kinds import OperationState
from app.domain.operation import DEADLINE_PASSED, Operation

CONTENT_TYPE = CONTENT_TYPE_LATEST

_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
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
        self._standing = _Standing()
        self.registry.register(self._standing)

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

    def saw(self, engines: Iterable[Engine], open_operations: Iterable[Operation]) -> None:
        """Engines and open operations as of now, for every scrape until the next call."""
        self._standing.families = tuple(_families(tuple(engines), tuple(open_operations)))

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
        return generate_latest(_Without(self.registry, self._standing)) + generate_latest(
            _Standing(tuple(_families(tuple(engines), tuple(open_operations))))
        )


class _Standing(Collector):
    """Figures that are read whole from elsewhere, and swapped in one go: a scrape by another
    thread sees the old ones or the new ones, never half of both."""

    def __init__(self, families: tuple[Metric, ...] = ()) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


def _families(
    engines: tuple[Engine, ...], open_operations: tuple[Operation, ...]
) -> Iterator[Metric]:
    health = GaugeMetricFamily(
        "chadburn_engine_health",
        "1 for the state an engine was last seen in, 0 for the others.",
        labels=("engine", "state"),
    )
    observed = GaugeMetricFamily(
        "chadburn_engine_observed_timestamp_seconds",
        "When an engine was last asked, unix time.",
        labels=("engine",),
    )
    for engine in engines:
        for state in HealthState:
            seen = float(engine.observed.health is state)
            health.add_metric((engine.id, state.value), seen)
        if engine.observed.observed_at is not None:
            observed.add_metric((engine.id,), engine.observed.observed_at.timestamp())
    yield health
    yield observed
    operations = GaugeMetricFamily(
        "chadburn_operations_open", "Operations that have not ended, by state.", labels=("state",)
    )
    for state_name, number in Counter(op.state.value for op in open_operations).items():
        operations.add_metric((state_name,), number)
    yield operations
    queued = GaugeMetricFamily(
        "chadburn_operations_queued",
        "Orders that wait behind others, by engine.",
        labels=("engine",),
    )
    waiting = Counter(op.engine_id for op in open_operations if op.state is OperationState.QUEUED)
    for engine in engines:
        queued.add_metric((engine.id,), waiting[engine.id])
    yield queued
    overdue = GaugeMetricFamily(
        "chadburn_operations_overdue",
        "Operations past their deadline whose outcome is still not known.",
    )
    overdue.add_metric((), sum(map(_is_overdue, open_operations)))
    yield overdue


def _is_overdue(operation: Operation) -> bool:
    warned = any(warning.reason == DEADLINE_PASSED for warning in operation.warnings)
    return warned and operation.state is OperationState.RECONCILING


class _Without(Collector):
    """A registry but for one of its collectors."""

    def __init__(self, registry: CollectorRegistry, left_out: Collector) -> None:
        self._registry = registry
        self._left_out = left_out

    def collect(self) -> Iterable[Metric]:
        left_out = {family.name for family in self._left_out.collect()}
        return (family for family in self._registry.collect() if family.name not in left_out)
