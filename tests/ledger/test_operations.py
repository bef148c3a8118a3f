"""Taking operations on, changing them, finding them again. On both databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy.exc import StatementError

from app.domain.errors import EngineBusy, IdempotencyKeyReused, UnknownEngine
from app.domain.events import EventType
from app.domain.kinds import FailureEffect, OperationKind, OperationState, Verification
from app.domain.operation import OperationError, OperationWarning, Progress
from app.domain.ranks import RankReport, RankState
from app.domain.selectors import Selector, Sight
from app.domain.transitions import (
    Advanced,
    Cancelled,
    CancelRequested,
    Completed,
    Dispatched,
    EngineAccepted,
    Failed,
    OutcomeUnknown,
    Progressed,
    RankReported,
    Reattached,
    Settled,
    Warned,
)
from app.ledger import Ledger
from app.ledger.errors import Superseded
from app.ledger.pruning import Portion, Pruned
from app.ledger.values import AuditFilter, EventFilter, OperationFilter
from tests.ledger.samples import (
    ALICE,
    BOB,
    IN_ANY_CASE,
    START,
    SetClock,
    accept,
    all_events,
    check_invariants,
    claim,
    entry,
    order,
    record,
    with_engine,
)

pytestmark = pytest.mark.anyio


async def test_an_accepted_operation_reads_back_as_it_was_given(ledger: Ledger) -> None:
    await with_engine(ledger)
    given = order(
        request={"mode": "keep", "hold_limit_ms": 2_500, "nested": {"a": [1, None, True, "ü"]}},
        idempotency_key="k",
        reason="rollout 🚢",
        expected_revision=7,
        deadline_at=START + timedelta(minutes=5),
        trace_id="0af7651916cd43dd8448eb211c80319c",
    )
    accepted = await ledger.operations.accept(given, key=claim(), audit=entry())
    assert accepted.fresh
    assert accepted.operation == given
    assert await ledger.operations.get(given.id) == given
    (event,) = await ledger.events.of_operation(given.id)
    assert (event.event.type, event.event.sequence) == ("accepted", 1)
    assert event.event.time == given.created_at
    (audited,) = (await ledger.audit.page(AuditFilter(action="pause"))).items
    assert audited.entry == entry()


async def test_every_field_survives_a_whole_life(ledger: Ledger) -> None:
    await with_engine(ledger)
    now = await accept(ledger, order())
    for fact in (
        Dispatched(instance_id="i-1"),
        EngineAccepted(engine_operation_id="eop-1", instance_id="i-1", engine_sequence=1),
        Progressed(progress=Progress("draining", 3, 9, "requests"), engine_sequence=2),
        RankReported(report=RankReport(1, RankState.PREPARED, "ok"), engine_sequence=3),
        RankReported(report=RankReport(0, RankState.FAILED), engine_sequence=4),
        Warned(warning=OperationWarning("SLOW", "slower than usual"), engine_sequence=5),
        CancelRequested(),
        OutcomeUnknown(message="the stream broke"),
        Reattached(),
    ):
        now = await record(ledger, now, fact)
        assert await ledger.operations.get(now.id) == now
    assert now.state is OperationState.CANCELLING
    failure = OperationError(
        "INTERNAL", "RANK_LOST", "rank 0 is gone", True, (0, 1), FailureEffect.ROLLED_BACK
    )
    now = await record(ledger, now, Failed(error=failure, revision=12))
    assert await ledger.operations.get(now.id) == now
    assert now.done
    await check_invariants(ledger)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (Completed(result={"changed": True, "pause_epoch": 3}, revision=4), "succeeded"),
        (Completed(result={}, verification=Verification.UNVERIFIED), "succeeded"),
        (Cancelled(message="asked to", revision=4), "cancelled"),
    ],
)
async def test_each_end_reads_back(ledger: Ledger, end: Completed | Cancelled, state: str) -> None:
    await with_engine(ledger)
    ended = await record(
        ledger, await record(ledger, await accept(ledger, order()), Dispatched()), end
    )
    assert ended.state.value == state
    assert await ledger.operations.get(ended.id) == ended
    assert await ledger.operations.open_ones() == ()


async def test_a_settled_operation_frees_the_slot(ledger: Ledger) -> None:
    await with_engine(ledger)
    now = await record(ledger, await accept(ledger, order()), Dispatched())
    now = await record(ledger, now, OutcomeUnknown(message="no reply"))
    with pytest.raises(EngineBusy) as busy:
        await accept(ledger, order())
    assert busy.value.operation_id == now.id, "an unknown outcome holds the slot"
    await record(ledger, now, Settled(end=OperationState.FAILED, by="alice", reason="looked"))
    await accept(ledger, order())
    await check_invariants(ledger)


async def test_times_come_back_as_the_same_moment_in_utc(ledger: Ledger) -> None:
    await with_engine(ledger)
    elsewhere = datetime(2026, 3, 1, 4, 0, 0, 1, tzinfo=timezone(timedelta(hours=-8)))
    given = await accept(ledger, order(created_at=elsewhere))
    found = await ledger.operations.get(given.id)
    assert found is not None
    assert found.created_at == elsewhere
    assert found.created_at.tzinfo is UTC
    at_noon = OperationFilter(since=elsewhere.astimezone(UTC))
    assert len((await ledger.operations.page(at_noon)).items) == 1
    later = OperationFilter(since=elsewhere + timedelta(microseconds=1))
    assert (await ledger.operations.page(later)).items == ()
    naive = START.replace(tzinfo=None)
    with pytest.raises(StatementError, match="timezone-aware"):
        await accept(ledger, order(OperationKind.PROFILE, created_at=naive))


async def test_what_a_database_cannot_spell_does_not_stop_an_operation(ledger: Ledger) -> None:
    await with_engine(ledger)
    now = await record(ledger, await accept(ledger, order(reason="a\x00b")), Dispatched())
    failure = OperationError("INTERNAL", "ODD", "nul \x00, half \ud83d, whole \ud83d\udea2")
    ended = await record(ledger, now, Failed(error=failure))
    found = await ledger.operations.get(ended.id)
    assert found is not None
    assert found.error is not None
    assert found.error.message == "nul �, half �, whole 🚢"
    assert found.reason == "a�b"
    assert await ledger.operations.get("a\x00b") is None
    warned = Completed(result={"rate": float("nan"), "a\x00": ["\ud800"]})
    other = await record(ledger, await accept(ledger, order()), Dispatched())
    other = await record(ledger, other, warned)
    found = await ledger.operations.get(other.id)
    assert found is not None
    assert found.result == {"rate": None, "a�": ["�"]}


# ---- keys ----


async def test_a_key_gives_its_operation_again(ledger: Ledger) -> None:
    await with_engine(ledger)
    first = await accept(ledger, order(), key=claim())
    moved_on = await record(ledger, first, Dispatched())
    again = await ledger.operations.accept(order(), key=claim(), audit=entry())
    assert not again.fresh
    assert again.operation == moved_on
    assert await ledger.operations.replay(ALICE, "k1", "f1") == moved_on
    assert len(await check_invariants(ledger)) == 1
    assert len((await ledger.audit.page(AuditFilter(action="pause"))).items) == 1


async def test_a_key_stands_for_one_request_alone(ledger: Ledger) -> None:
    await with_engine(ledger)
    first = await accept(ledger, order(), key=claim())
    for attempt in (
        ledger.operations.accept(order(), key=claim(fingerprint="f2"), audit=entry()),
        ledger.operations.replay(ALICE, "k1", "f2"),
    ):
        with pytest.raises(IdempotencyKeyReused) as reused:
            await attempt
        assert reused.value.operation_id == first.id
    assert len(await check_invariants(ledger)) == 1


async def test_a_key_belongs_to_issuer_subject_and_client(ledger: Ledger) -> None:
    await with_engine(ledger)
    await accept(ledger, order(OperationKind.ABORT_REQUESTS), key=claim())
    for other in (
        BOB,
        replace(ALICE, issuer="https://other.test"),
        replace(ALICE, client_id="ci"),
    ):
        assert await ledger.operations.replay(other, "k1", "f1") is None
        await accept(ledger, order(OperationKind.ABORT_REQUESTS, actor=other), key=claim())
    assert len(await check_invariants(ledger)) == 4


async def test_a_refused_order_leaves_its_key_unused(ledger: Ledger) -> None:
    await with_engine(ledger)
    holder = await accept(ledger, order())
    with pytest.raises(EngineBusy):
        await accept(ledger, order(), key=claim())
    assert await ledger.operations.replay(ALICE, "k1", "f1") is None
    holder = await record(ledger, holder, Dispatched())
    await record(ledger, holder, Completed(result={}))
    await accept(ledger, order(), key=claim())


async def test_a_replay_is_not_held_up_by_a_busy_engine(ledger: Ledger) -> None:
    await with_engine(ledger)
    first = await accept(ledger, order(), key=claim())
    again = await ledger.operations.accept(order(), key=claim(), audit=entry())
    assert again.operation.id == first.id


async def test_a_key_is_kept_for_a_day_at_least_and_as_long_as_was_promised(
    ledger: Ledger, clock: SetClock
) -> None:
    await with_engine(ledger)
    kinds = OperationKind.ABORT_REQUESTS
    short = await accept(ledger, order(kinds), key=claim("short", expires_at=START))
    promised = START + timedelta(hours=48)
    long = await accept(ledger, order(kinds), key=claim("long", expires_at=promised))
    for taken in (short, long):
        await record(ledger, await record(ledger, taken, Dispatched()), Completed(result={}))

    clock.at = START + timedelta(hours=24) - timedelta(microseconds=1)
    assert await ledger.pruning.keys() == Portion(Pruned(), more=False)
    assert await ledger.operations.replay(ALICE, "short", "f1") is not None

    clock.at = START + timedelta(hours=24)
    assert await ledger.operations.replay(ALICE, "short", "f1") is None
    anew = await accept(ledger, order(kinds), key=claim("short", "f2"))
    assert anew.id != short.id, "an expired key is like a new one"

    clock.at = promised
    assert await ledger.pruning.keys() == Portion(Pruned(keys=1), more=False)
    assert await ledger.operations.replay(ALICE, "long", "f1") is None
    assert await ledger.operations.get(long.id) is not None, "the operation itself stays"


async def test_a_key_does_not_expire_while_its_operation_is_open(
    ledger: Ledger, clock: SetClock
) -> None:
    await with_engine(ledger)
    now = await record(ledger, await accept(ledger, order(), key=claim()), Dispatched())
    clock.advance(days=30)
    assert await ledger.pruning.keys() == Portion(Pruned(), more=False)
    assert await ledger.operations.replay(ALICE, "k1", "f1") == now
    again = await ledger.operations.accept(order(), key=claim(), audit=entry())
    assert again.operation == now
    await record(ledger, now, Completed(result={}))
    assert await ledger.operations.replay(ALICE, "k1", "f1") is None


# ---- the slot ----


async def test_one_exclusive_operation_at_a_time(ledger: Ledger) -> None:
    await with_engine(ledger)
    await with_engine(ledger, "e2")
    first = await accept(ledger, order())
    with pytest.raises(EngineBusy) as busy:
        await accept(ledger, order(OperationKind.FLUSH_CACHES))
    assert busy.value.operation_id == first.id
    await accept(ledger, order(OperationKind.ABORT_REQUESTS))
    await accept(ledger, order(engine_id="e2"))
    engine = await ledger.engines.get("e1")
    assert engine is not None
    assert engine.running_operation == first.id
    assert len(await check_invariants(ledger)) == 3


async def test_a_queued_operation_waits_outside_the_slot(ledger: Ledger) -> None:
    await with_engine(ledger)
    first = await accept(ledger, order())
    waiting = await accept(ledger, order(OperationKind.FLUSH_CACHES), queueing=IN_ANY_CASE)
    assert (waiting.state, waiting.sequence) == (OperationState.QUEUED, 2)
    types = [stored.event.type for stored in await ledger.events.of_operation(waiting.id)]
    assert types == ["accepted", "queued"]
    with pytest.raises(EngineBusy) as busy:
        await record(ledger, waiting, Dispatched())
    assert busy.value.operation_id == first.id
    assert await ledger.operations.get(waiting.id) == waiting
    await record(ledger, await record(ledger, first, Dispatched()), Completed(result={}))
    await record(ledger, waiting, Dispatched())
    await check_invariants(ledger)


async def test_an_order_for_no_engine_is_refused(ledger: Ledger) -> None:
    await with_engine(ledger)
    with pytest.raises(UnknownEngine):
        await accept(ledger, order(engine_id="nowhere"), key=claim())
    await ledger.engines.remove("e1", 1, entry("remove_engine"))
    with pytest.raises(UnknownEngine):
        await accept(ledger, order())
    assert await check_invariants(ledger) == []


# ---- conditional writes ----


async def test_a_step_from_an_older_view_changes_nothing(ledger: Ledger) -> None:
    await with_engine(ledger)
    accepted = await accept(ledger, order())
    running = await record(ledger, accepted, Dispatched())
    for stale in (
        accepted,
        replace(running, sequence=running.sequence + 1),
        replace(running, engine_sequence=5),
        replace(running, state=OperationState.CANCELLING),
        order(),
    ):
        with pytest.raises(Superseded):
            await ledger.operations.record(
                stale,
                Advanced(replace(stale, cancel_requested=True), None),
                audit=entry("never written"),
            )
    assert await ledger.operations.get(accepted.id) == running
    assert (await ledger.audit.page(AuditFilter(action="never written"))).items == ()
    await check_invariants(ledger)


async def test_a_step_without_an_event_is_written_too(ledger: Ledger) -> None:
    await with_engine(ledger)
    running = await record(ledger, await accept(ledger, order()), Dispatched())
    silent = replace(running, engine_sequence=4)
    assert await ledger.operations.record(running, Advanced(silent, None)) == silent
    assert await ledger.operations.get(running.id) == silent
    await check_invariants(ledger)


async def test_an_ended_operation_takes_no_step(ledger: Ledger) -> None:
    await with_engine(ledger)
    running = await record(ledger, await accept(ledger, order()), Dispatched())
    ended = await record(ledger, running, Completed(result={}))
    with pytest.raises(Superseded):
        await record(ledger, running, Failed(error=OperationError("ABORTED", "LATE", "too late")))
    with pytest.raises(ValueError, match="open operation"):
        await ledger.operations.record(ended, Advanced(running, None))
    with pytest.raises(ValueError, match="the same one"):
        await ledger.operations.record(running, Advanced(order(), None))
    assert await ledger.operations.get(ended.id) == ended


async def test_the_audit_of_an_end_comes_with_the_end(ledger: Ledger) -> None:
    await with_engine(ledger)
    running = await record(ledger, await accept(ledger, order()), Dispatched())
    ending = entry("pause", "succeeded", operation_id=running.id, actor=ALICE)
    await record(ledger, running, Completed(result={}), audit=ending)
    (audited,) = (await ledger.audit.page(AuditFilter(operation_id=running.id))).items
    assert audited.entry == ending


# ---- pages ----


async def test_pages_go_back_in_order_of_acceptance(ledger: Ledger) -> None:
    await with_engine(ledger)
    # A clock that runs backwards changes nothing: the order is that of acceptance.
    given = [
        await accept(
            ledger,
            order(OperationKind.ABORT_REQUESTS, created_at=START - timedelta(minutes=number)),
        )
        for number in range(7)
    ]
    seen: list[str] = []
    page = await ledger.operations.page(OperationFilter(), size=3)
    sizes = [len(page.items)]
    seen += [operation.id for operation in page.items]
    # What is accepted in between does not move the pages behind it.
    late = await accept(ledger, order())
    while page.next is not None:
        assert isinstance(page.next, int)
        page = await ledger.operations.page(OperationFilter(), page.next, size=3)
        sizes.append(len(page.items))
        seen += [operation.id for operation in page.items]
    assert sizes == [3, 3, 1]
    assert seen == [operation.id for operation in reversed(given)]
    assert late.id not in seen
    with pytest.raises(ValueError, match="at least one"):
        await ledger.operations.page(OperationFilter(), size=0)


async def test_a_last_page_that_is_full_says_it_is_the_last(ledger: Ledger) -> None:
    await with_engine(ledger)
    for _ in range(4):
        await accept(ledger, order(OperationKind.ABORT_REQUESTS))
    page = await ledger.operations.page(OperationFilter(), size=2)
    assert isinstance(page.next, int)
    last = await ledger.operations.page(OperationFilter(), page.next, size=2)
    assert (len(last.items), last.next) == (2, None)


async def test_operations_are_found_by_each_filter(ledger: Ledger) -> None:
    await with_engine(ledger)
    await with_engine(ledger, "e2")
    first = await record(ledger, await accept(ledger, order()), Dispatched())
    second = await accept(
        ledger, order(OperationKind.FLUSH_CACHES, "e2", actor=BOB, created_at=START + timedelta(1))
    )

    async def found(**wanted: object) -> list[str]:
        page = await ledger.operations.page(OperationFilter(**wanted))  # type: ignore[arg-type]
        return [operation.id for operation in page.items]

    assert await found() == [second.id, first.id]
    assert await found(engine_id="e1") == [first.id]
    assert await found(kinds=frozenset({OperationKind.FLUSH_CACHES})) == [second.id]
    assert await found(states=frozenset({OperationState.RUNNING})) == [first.id]
    assert await found(subject="bob") == [second.id]
    assert await found(since=START + timedelta(1)) == [second.id]
    assert await found(since=datetime.min.replace(tzinfo=UTC)) == [second.id, first.id]
    assert await found(engine_id="e1", subject="bob") == []
    assert [one.id for one in await ledger.operations.open_ones()] == [first.id, second.id]
    assert [one.id for one in await ledger.operations.open_ones("e2")] == [second.id]
    marks = await ledger.operations.open_marks()
    assert [(one.operation_id, one.engine_id, one.state.value) for one in marks] == [
        (first.id, "e1", "running"),
        (second.id, "e2", "accepted"),
    ]
    several = await ledger.operations.several([second.id, "no such one", first.id])
    assert [one.id for one in several] == [first.id, second.id]
    assert [one.sequence for one in several] == [each.sequence for each in marks]


async def test_operations_are_found_by_the_whole_key_whoever_used_it(ledger: Ledger) -> None:
    await with_engine(ledger)
    await with_engine(ledger, "e2")
    made = [
        await accept(
            ledger,
            order(OperationKind.ABORT_REQUESTS, engine, actor=actor, idempotency_key=key),
            key=claim(key),
        )
        for engine, actor, key in (("e1", ALICE, "k1"), ("e2", BOB, "k1"), ("e1", ALICE, "k1 "))
    ]
    ended = await record(ledger, made[0], Cancelled(message=""))

    async def found(key: str, **wanted: object) -> list[str]:
        page = await ledger.operations.page(OperationFilter(key=key, **wanted))  # type: ignore[arg-type]
        return [operation.id for operation in page.items]

    alices, bobs, other = (one.id for one in made)
    assert await found("k1") == [bobs, alices]
    assert await found("k1 ") == [other]
    assert [await found(key) for key in ("k", "K1", "k_", "")] == [[], [], [], []]
    assert await found("k1", subject="bob", engine_id="e2") == [bobs]
    assert await found("k1", kinds=frozenset({OperationKind.PAUSE})) == []
    assert await found("k1", states=frozenset({ended.state})) == [alices]
    assert await found("k1", states=frozenset({made[1].state, ended.state})) == [bobs, alices]
    assert await found("k1", since=START + timedelta(1)) == []
    for some in (("e2",), tuple(f"e{n}" for n in range(2, 40))):
        sight = Sight((Selector(ids=frozenset(some)),))
        assert await found("k1", sight=sight) == [bobs], "who may not see it does not find it"
    page = await ledger.operations.page(OperationFilter(key="k1"), size=1)
    assert [one.id for one in page.items] == [bobs]
    assert isinstance(page.next, int)
    last = await ledger.operations.page(OperationFilter(key="k1"), page.next, size=1)
    assert ([one.id for one in last.items], last.next) == ([alices], None)


# ---- events ----


async def test_events_are_found_by_each_filter(ledger: Ledger) -> None:
    await with_engine(ledger)
    await with_engine(ledger, "e2")
    first = await record(ledger, await accept(ledger, order()), Dispatched())
    await accept(ledger, order(OperationKind.FLUSH_CACHES, "e2"))

    async def found(**wanted: object) -> list[tuple[str, str]]:
        some, horizon = await ledger.events.after(0, EventFilter(**wanted))  # type: ignore[arg-type]
        assert horizon == 3, "also where nothing matches, it has been read"
        return [(stored.event.engine_id, stored.event.type) for stored in some]

    everything = [("e1", "accepted"), ("e1", "dispatched"), ("e2", "accepted")]
    assert await found() == everything
    assert await found(engine_ids=frozenset({"e2"})) == everything[2:]
    assert await found(engine_ids=frozenset()) == []
    assert await found(operation_id=first.id) == everything[:2]
    assert await found(kinds=frozenset({OperationKind.FLUSH_CACHES})) == everything[2:]
    assert await found(types=frozenset({EventType.DISPATCHED})) == everything[1:2]


async def test_reading_goes_on_where_it_stopped(ledger: Ledger) -> None:
    await with_engine(ledger)
    assert await ledger.events.after(0, EventFilter()) == ((), 0)
    assert await ledger.events.horizon() == 0
    now = await record(ledger, await accept(ledger, order()), Dispatched())
    for done in range(5):
        now = await record(ledger, now, Progressed(progress=Progress("draining", done)))
    some, horizon = await ledger.events.after(0, EventFilter(), limit=3)
    assert [stored.position for stored in some] == [1, 2, 3]
    assert horizon == 3
    some, horizon = await ledger.events.after(horizon, EventFilter(), limit=4)
    assert [stored.position for stored in some] == [4, 5, 6, 7]
    assert await ledger.events.after(horizon, EventFilter()) == ((), 7)
    assert await ledger.events.horizon() == 7
    assert await ledger.events.after(99, EventFilter()) == ((), 99), "never back"
    assert len(await all_events(ledger)) == 7
    part = await ledger.events.of_operation(now.id, after_sequence=2, limit=2)
    assert [stored.event.sequence for stored in part] == [3, 4]
    assert await ledger.events.of_operation("nothing") == ()


async def test_which_cursors_can_be_resumed(ledger: Ledger) -> None:
    await with_engine(ledger)
    assert await ledger.events.oldest() == 0
    assert await ledger.events.given_out(0)
    assert not await ledger.events.given_out(1)
    await accept(ledger, order())
    assert await ledger.events.given_out(1)
    assert not await ledger.events.given_out(2)
    assert not await ledger.events.given_out(-1)
