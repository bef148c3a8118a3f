"""The register of engines and their readings. On both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from enum import Enum

import pytest
from sqlalchemy.exc import IntegrityError

from app.domain.capabilities import Capabilities, Limits
from app.domain.engine import (
    Dialect,
    Engine,
    HealthState,
    Member,
    Observed,
    TlsNames,
)
from app.domain.errors import (
    EngineExists,
    EngineHasOpenOperation,
    GenerationMismatch,
    UnknownEngine,
)
from app.domain.facts import EngineFacts, LoraFact, PauseFact, ProfileFact, WeightsFact
from app.domain.kinds import (
    Admission,
    CacheKind,
    ContentPolicy,
    EngineRole,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
    RevisionSource,
    WeightsState,
)
from app.domain.transitions import Completed, Dispatched
from app.ledger import Ledger
from app.ledger.values import AuditFilter, EngineFilter, Watched
from tests.ledger.samples import (
    IN_ANY_CASE,
    START,
    SetClock,
    accept,
    entry,
    order,
    record,
    registration,
    with_engine,
)

pytestmark = pytest.mark.anyio

FACTS = EngineFacts(
    instance_id="i-1",
    revision=9,
    revision_source=RevisionSource.GATEWAY,
    admission=Admission.PAUSED,
    pause=PauseFact(
        mode=PauseMode.KEEP,
        epoch=3,
        by="op-1",
        since=START,
        new_requests=NewRequests.REFUSE,
        hold_limit_ms=500,
        requests_kept=4,
        requests_held=2,
    ),
    pause_epoch=3,
    released=frozenset({ResourceKind.KV_CACHE, ResourceKind.WEIGHTS}),
    release_epoch=2,
    weights=WeightsFact("v8", WeightsState.VALID, 1),
    role=EngineRole.DECODE,
    profile=ProfileFact("p-1", "torch", "running"),
    loras=(LoraFact("a", 1, "/l/a"), LoraFact("b", 2)),
    open_operations=("op-1", "op-2"),
    observed_at=START + timedelta(microseconds=1),
)
CAPABILITIES = Capabilities(
    operations=frozenset({OperationKind.PAUSE, OperationKind.RESUME}),
    cancellable=frozenset({OperationKind.PAUSE}),
    cache_kinds=frozenset({CacheKind.PREFIX}),
    resources={ResourceKind.WEIGHTS: frozenset({ContentPolicy.PRESERVE, ContentPolicy.DISCARD})},
    pause_modes=frozenset(PauseMode),
    new_requests=frozenset(NewRequests),
    drain_rules=frozenset({"wait"}),
    models=("llama", "draft"),
    world_size=4,
    limits=Limits(max_message_bytes=4, key_retention_ms=86_400_000),
)
READING = Observed(
    health=HealthState.SERVING,
    observed_at=START + timedelta(seconds=1),
    facts=FACTS,
    capabilities=CAPABILITIES,
    info={"version": "1.2", "extra": {"admin": "openengine.v1"}},
    models=({"id": "llama", "max_model_len": 4096}, {"id": "draft"}),
)


async def test_a_registered_engine_reads_back(ledger: Ledger) -> None:
    given = registration(
        dialect=Dialect.VLLM,
        members=(Member(0, "unix:/run/a", "10.0.0.1:2"), Member(1, "b:1", "b:2")),
        tls=TlsNames("engine.test", "fleet"),
        labels={"team": "rl", "zone": 'a"b\\c'},
    )
    audit = entry("register_engine", engine_id="e1")
    engine = await ledger.engines.register(given, audit)
    assert engine == Engine(given)
    assert await ledger.engines.get("e1") == engine
    (audited,) = (await ledger.audit.page(AuditFilter(engine_id="e1"))).items
    assert audited.entry == audit
    assert await ledger.engines.get("e2") is None


async def test_an_id_is_never_used_again(ledger: Ledger) -> None:
    await with_engine(ledger)
    with pytest.raises(EngineExists):
        await with_engine(ledger)
    await ledger.engines.remove("e1", 1, entry("remove_engine"))
    assert await ledger.engines.get("e1") is None
    assert (await ledger.engines.page(EngineFilter())).items == ()
    with pytest.raises(EngineExists):
        await with_engine(ledger)
    assert len((await ledger.audit.page(AuditFilter(action="register_engine"))).items) == 1


async def test_a_change_needs_the_generation_it_was_made_from(ledger: Ledger) -> None:
    await with_engine(ledger)
    later = START + timedelta(hours=1)
    wanted = registration(labels={"a": "b"}, updated_at=later, created_at=later, generation=99)
    changed = await ledger.engines.change(wanted, 1, entry("change_engine"))
    assert changed.registration == registration(
        labels={"a": "b"}, updated_at=later, created_at=START, generation=2
    )
    assert await ledger.engines.get("e1") == changed
    for attempt in (
        ledger.engines.change(registration(), 1, entry("change_engine")),
        ledger.engines.remove("e1", 1, entry("remove_engine")),
    ):
        with pytest.raises(GenerationMismatch):
            await attempt
    with pytest.raises(UnknownEngine):
        await ledger.engines.change(registration("e2"), 1, entry())
    assert await ledger.engines.get("e1") == changed


async def test_an_engine_with_open_operations_stays(ledger: Ledger) -> None:
    await with_engine(ledger)
    first = await accept(ledger, order())
    waiting = await accept(ledger, order(OperationKind.FLUSH_CACHES), queueing=IN_ANY_CASE)
    for still_open in (first, waiting):
        with pytest.raises(EngineHasOpenOperation) as refused:
            await ledger.engines.remove("e1", 1, entry())
        assert refused.value.operation_id == still_open.id
        running = await record(ledger, still_open, Dispatched())
        await record(ledger, running, Completed(result={}))
    await ledger.engines.remove("e1", 1, entry("remove_engine"))
    with pytest.raises(UnknownEngine):
        await ledger.engines.remove("e1", 1, entry())
    assert await ledger.operations.get(first.id) is not None, "its history stays"


async def test_a_reading_survives_whole(ledger: Ledger) -> None:
    await with_engine(ledger)
    engine = await ledger.engines.get("e1")
    assert engine is not None
    assert engine.observed == Observed()
    await ledger.engines.observe("e1", READING)
    engine = await ledger.engines.get("e1")
    assert engine is not None
    assert engine.observed == READING


async def test_an_older_reading_does_not_replace_a_newer_one(ledger: Ledger) -> None:
    await with_engine(ledger)
    at = START
    first, second = (
        Observed(health=HealthState.UNREACHABLE, observed_at=at),
        Observed(health=HealthState.SERVING, observed_at=at + timedelta(microseconds=1)),
    )

    async def known() -> HealthState:
        engine = await ledger.engines.get("e1")
        assert engine is not None
        return engine.observed.health

    await ledger.engines.observe("e1", Observed(health=HealthState.DEGRADED))
    assert await known() is HealthState.DEGRADED
    await ledger.engines.observe("e1", second)
    await ledger.engines.observe("e1", first)
    assert await known() is HealthState.SERVING
    again = Observed(health=HealthState.DEGRADED, observed_at=second.observed_at)
    await ledger.engines.observe("e1", again)
    assert await known() is HealthState.DEGRADED
    with pytest.raises(UnknownEngine):
        await ledger.engines.observe("e2", first)


class UnheardOf(Enum):
    FINE = "fine"


async def test_readings_that_come_together_cost_each_other_nothing(ledger: Ledger) -> None:
    names = [f"e{number}" for number in range(250)]  # more than go into one transaction
    for name in names:
        await with_engine(ledger, name)
    spoilt = replace(READING, health=UnheardOf.FINE)  # type: ignore[arg-type]
    readings = [(name, READING) for name in names]
    readings[7] = (names[7], spoilt)
    readings += [("never-registered", READING), (names[3], replace(READING, observed_at=START))]
    told = await asyncio.gather(
        *(ledger.engines.observe(name, reading) for name, reading in readings),
        return_exceptions=True,
    )
    wrong = {readings[place][0]: error for place, error in enumerate(told) if error is not None}
    assert isinstance(wrong.pop("never-registered"), UnknownEngine)
    assert isinstance(wrong.pop(names[7]), IntegrityError)
    assert wrong == {}
    for name in names:
        engine = await ledger.engines.get(name)
        assert engine is not None
        assert engine.observed == (Observed() if name == names[7] else READING), name


async def test_who_gives_up_waiting_stops_no_reading(ledger: Ledger) -> None:
    await with_engine(ledger)
    gone = asyncio.ensure_future(ledger.engines.observe("e1", READING))
    await asyncio.sleep(0)
    gone.cancel()
    await ledger.engines.observe("e1", Observed(observed_at=START))
    engine = await ledger.engines.get("e1")
    assert engine is not None
    assert engine.observed == READING


async def test_what_is_watched(ledger: Ledger) -> None:
    for name in ("e1", "e2", "e3"):
        await with_engine(ledger, name)
    await ledger.engines.observe("e2", READING)
    await ledger.engines.remove("e3", 1, entry())
    await accept(ledger, order(engine_id="e1"))
    assert await ledger.engines.watched() == (
        Watched("e1", 1, None, busy=True),
        Watched("e2", 1, READING.observed_at, busy=False),
    )


async def test_a_clock_that_is_set_back_does_not_stop_the_readings(ledger: Ledger) -> None:
    await with_engine(ledger)
    ahead = Observed(health=HealthState.SERVING, observed_at=START + timedelta(hours=1))
    await ledger.engines.observe("e1", ahead)
    await ledger.engines.observe("e1", Observed(health=HealthState.UNREACHABLE, observed_at=START))
    engine = await ledger.engines.get("e1")
    assert engine is not None
    assert engine.observed.health is HealthState.UNREACHABLE


async def test_engines_come_in_order_of_their_bytes(ledger: Ledger) -> None:
    names = ["a", "a-1", "aa", "B", "b", "ä", "é", "z"]
    for name in reversed(names):
        await with_engine(ledger, name)
    found: list[str] = []
    page = await ledger.engines.page(EngineFilter(), size=3)
    found += [engine.id for engine in page.items]
    while page.next is not None:
        assert isinstance(page.next, str)
        page = await ledger.engines.page(EngineFilter(), page.next, size=3)
        found += [engine.id for engine in page.items]
    assert found == sorted(names, key=str.encode)


async def test_engines_are_found_by_each_filter(ledger: Ledger) -> None:
    labels = {"zone": "a", 'o"dd\\': "'x\""}
    await ledger.engines.register(registration("e1", labels=labels), entry())
    await ledger.engines.register(registration("e2", labels={"zone": "b"}), entry())
    await ledger.engines.register(registration("e3"), entry())
    await ledger.engines.observe("e1", READING)
    await ledger.engines.observe("e2", Observed(health=HealthState.UNREACHABLE, observed_at=START))

    async def found(**wanted: object) -> list[str]:
        page = await ledger.engines.page(EngineFilter(**wanted))  # type: ignore[arg-type]
        return [engine.id for engine in page.items]

    assert await found() == ["e1", "e2", "e3"]
    assert await found(labels={"zone": "a"}) == ["e1"]
    assert await found(labels=labels) == ["e1"]
    assert await found(labels={"zone": "a", "team": "rl"}) == []
    assert await found(labels={"zone": ""}) == []
    assert await found(states=frozenset({HealthState.SERVING})) == ["e1"]
    assert await found(states=frozenset({HealthState.UNKNOWN})) == ["e3"]
    assert await found(roles=frozenset({EngineRole.DECODE})) == ["e1"]
    assert await found(roles=frozenset({EngineRole.UNKNOWN})) == ["e2", "e3"]
    assert await found(version="v8") == ["e1"]
    assert await found(version="v9") == []


async def test_what_runs_on_an_engine_is_the_exclusive_one(ledger: Ledger, clock: SetClock) -> None:
    await with_engine(ledger)
    await accept(ledger, order(OperationKind.ABORT_REQUESTS))
    engine = await ledger.engines.get("e1")
    assert engine is not None
    assert engine.running_operation is None
    running = await accept(ledger, order())
    await accept(ledger, order(OperationKind.FLUSH_CACHES), queueing=IN_ANY_CASE)
    (engine,) = (await ledger.engines.page(EngineFilter())).items
    assert engine.running_operation == running.id
