"""Figures of engines and open operations, as they stand when somebody looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.domain.engine import Engine, HealthState
from app.domain.facts import EngineFacts
from app.domain.kinds import Admission, OperationState, WeightsState
from app.domain.operation import DEADLINE_PASSED, Operation


class Standing(Collector):
    """They are read whole, and swapped in one go: a scrape by another thread sees the old ones or
    the new ones, never half of both."""

    def __init__(
        self, engines: tuple[Engine, ...] = (), open_operations: tuple[Operation, ...] = ()
    ) -> None:
        self.show(engines, open_operations)

    def show(self, engines: tuple[Engine, ...], open_operations: tuple[Operation, ...]) -> None:
        self._families = (*_of_engines(engines), *_of_operations(engines, open_operations))

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_engines(engines: tuple[Engine, ...]) -> Iterator[Metric]:
    health = _gauge(
        "engine_health",
        "1 for the state an engine was last seen in, 0 for the others.",
        "engine",
        "state",
    )
    observed = _gauge(
        "engine_observed_timestamp_seconds", "When an engine was last asked, unix time.", "engine"
    )
    revision = _gauge("engine_revision", "The engine's revision, as last seen.", "engine")
    admission = _gauge(
        "engine_admission",
        "1 for how an engine admitted requests when it was last seen, 0 for the others.",
        "engine",
        "state",
    )
    paused = _gauge(
        "engine_paused_timestamp_seconds",
        "Since when an engine is paused, unix time; absent where it is not, or where nobody knows.",
        "engine",
    )
    released = _gauge("engine_released", "1 for what an engine has released.", "engine", "resource")
    weights = _gauge(
        "engine_weights",
        "1 for the state of an engine's weights when it was last seen, 0 for the others.",
        "engine",
        "state",
    )
    for engine in engines:
        for state in HealthState:
            health.add_metric((engine.id, state.value), engine.observed.health is state)
        _add_moment(observed, engine.id, engine.observed.observed_at)
        facts = engine.observed.facts
        if facts is None:
            continue
        if facts.revision is not None:
            revision.add_metric((engine.id,), facts.revision)
        for one in Admission:
            admission.add_metric((engine.id, one.value), facts.admission is one)
        _add_moment(paused, engine.id, _paused_since(facts))
        for resource in facts.released:
            released.add_metric((engine.id, resource.value), 1)
        for of in WeightsState:
            weights.add_metric((engine.id, of.value), facts.weights.state is of)
    yield from (health, observed, revision, admission, paused, released, weights)


def _of_operations(
    engines: tuple[Engine, ...], open_operations: tuple[Operation, ...]
) -> Iterator[Metric]:
    operations = _gauge(
        "operations_open",
        "Operations that have not ended, by engine, kind and state.",
        "engine",
        "kind",
        "state",
    )
    counted = Counter((one.engine_id, one.kind.value, one.state.value) for one in open_operations)
    for labels, number in counted.items():
        operations.add_metric(labels, number)
    yield operations
    queued = _gauge("operations_queued", "Orders that wait behind others, by engine.", "engine")
    waiting = Counter(op.engine_id for op in open_operations if op.state is OperationState.QUEUED)
    for engine in engines:
        queued.add_metric((engine.id,), waiting[engine.id])
    yield queued
    overdue = _gauge(
        "operations_overdue",
        "Operations past their deadline whose outcome is still not known.",
    )
    overdue.add_metric((), sum(map(_is_overdue, open_operations)))
    yield overdue


def _gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"chadburn_{name}", meaning, labels=labels)


def _add_moment(family: GaugeMetricFamily, engine_id: str, at: datetime | None) -> None:
    if at is not None:
        family.add_metric((engine_id,), at.timestamp())


def _paused_since(facts: EngineFacts) -> datetime | None:
    return None if facts.pause is None else facts.pause.since


def _is_overdue(operation: Operation) -> bool:
    warned = any(warning.reason == DEADLINE_PASSED for warning in operation.warnings)
    return warned and operation.state is OperationState.RECONCILING
