"""Many at once: what is decided by a constraint is decided once. On both databases.

On PostgreSQL a second ledger on the same database stands for a second gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import TypeVar

import pytest

from app.domain.errors import (
    ChadburnError,
    EngineBusy,
    EngineExists,
    EngineHasOpenOperation,
    GenerationMismatch,
    IdempotencyKeyReused,
    QueueFull,
    UnknownEngine,
)
from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import Operation, OperationError, Progress
from app.domain.queueing import Queueing
from app.domain.transitions import (
    Completed,
    Dispatched,
    Failed,
    OutcomeUnknown,
    Progressed,
    Settled,
)
from app.ledger import Ledger
from app.ledger.errors import Superseded
from app.ledger.values import Accepted, AuditFilter, Lease
from tests.ledger.samples import (
    IN_ANY_CASE,
    START,
    SetClock,
    accept,
    all_operations,
    check_invariants,
    claim,
    entry,
    order,
    record,
    registration,
    step,
    with_engine,
)

pytestmark = pytest.mark.anyio
T = TypeVar("T")


@pytest.fixture
async def gateways(ledger: Ledger, ledger_url: str, clock: SetClock) -> AsyncIterator[list[Ledger]]:
    if ledger_url.startswith("sqlite"):
        yield [ledger]
        return
    second = await Ledger.open(ledger_url, clock=clock)
    try:
        yield [ledger, second]
    finally:
        await second.close()


async def outcomes(
    attempts: Iterable[Awaitable[T]],
) -> tuple[list[T], list[ChadburnError]]:
    """All at once. Anything but a refusal that has a name is a failure of the test."""
    results = await asyncio.gather(*attempts, return_exceptions=True)
    refusals = [result for result in results if isinstance(result, ChadburnError)]
    done: list[T] = []
    for result in results:
        if isinstance(result, ChadburnError):
            continue
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done, refusals


def in_turn(gateways: list[Ledger], count: int) -> list[Ledger]:
    return [gateways[number % len(gateways)] for number in range(count)]


async def test_fifty_calls_with_one_key_give_one_operation(gateways: list[Ledger]) -> None:
    await with_engine(gateways[0])
    done, refusals = await outcomes(
        gateway.operations.accept(order(), key=claim(), audit=entry())
        for gateway in in_turn(gateways, 50)
    )
    assert refusals == []
    assert [accepted.fresh for accepted in done].count(True) == 1
    assert len({accepted.operation.id for accepted in done}) == 1
    (only,) = await check_invariants(gateways[0])
    assert only.id == done[0].operation.id
    assert len((await gateways[0].audit.page(AuditFilter(action="pause"))).items) == 1


async def test_no_call_is_told_that_its_own_twin_is_busy(gateways: list[Ledger]) -> None:
    """Twins that come a moment apart: the first one commits while the others look around."""
    for number in range(15):
        engine_id = f"e{number}"
        await with_engine(gateways[0], engine_id)

        async def call(gateway: Ledger, after_s: float, engine_id: str = engine_id) -> Accepted:
            await asyncio.sleep(after_s)
            return await gateway.operations.accept(
                order(engine_id=engine_id), key=claim(engine_id), audit=entry()
            )

        done, refusals = await outcomes(
            call(gateway, 0.002 * turn) for turn, gateway in enumerate(in_turn(gateways, 10))
        )
        assert refusals == []
        assert len({accepted.operation.id for accepted in done}) == 1


async def test_one_key_for_two_requests_has_one_winner(gateways: list[Ledger]) -> None:
    await with_engine(gateways[0])
    done, refusals = await outcomes(
        gateway.operations.accept(order(), key=claim(fingerprint=f"f{number % 2}"), audit=entry())
        for number, gateway in enumerate(in_turn(gateways, 20))
    )
    (only,) = await check_invariants(gateways[0])
    assert {accepted.operation.id for accepted in done} == {only.id}
    assert (len(done), len(refusals)) == (10, 10)
    for refusal in refusals:
        assert isinstance(refusal, IdempotencyKeyReused)
        assert refusal.operation_id == only.id


async def test_of_two_exclusive_orders_one_is_told_of_the_other(gateways: list[Ledger]) -> None:
    for number in range(10):
        await with_engine(gateways[0], f"e{number}")
        done, refusals = await outcomes(
            gateway.operations.accept(order(kind, f"e{number}"), key=None, audit=entry())
            for gateway, kind in zip(
                in_turn(gateways, 2), (OperationKind.PAUSE, OperationKind.FLUSH_CACHES), strict=True
            )
        )
        (accepted,), (refusal,) = done, refusals
        assert isinstance(refusal, EngineBusy)
        assert refusal.operation_id == accepted.operation.id


async def test_the_slot_is_never_held_twice_while_it_changes_hands(
    gateways: list[Ledger],
) -> None:
    """Everybody wants the slot, and lets go of it at once when it has it."""
    await with_engine(gateways[0])

    async def insist(gateway: Ledger) -> None:
        wanted = order()
        for _ in range(2_000):
            try:
                now = await accept(gateway, wanted)
            except EngineBusy:
                await asyncio.sleep(0.005)
                continue
            now = await record(gateway, now, Dispatched())
            await record(gateway, now, Completed(result={}))
            return
        raise AssertionError("never got the slot")

    await asyncio.gather(*(insist(gateway) for gateway in in_turn(gateways, 12)))
    assert [operation.state.value for operation in await check_invariants(gateways[0])] == [
        "succeeded"
    ] * 12


async def test_queued_operations_dispatched_at_once_run_one_at_a_time(
    gateways: list[Ledger],
) -> None:
    await with_engine(gateways[0])
    waiting = [await accept(gateways[0], order(), queueing=IN_ANY_CASE) for _ in range(6)]
    done, refusals = await outcomes(
        record(gateway, operation, Dispatched())
        for gateway, operation in zip(in_turn(gateways, 6), waiting, strict=True)
    )
    (running,) = done
    assert len(refusals) == 5
    for refusal in refusals:
        assert isinstance(refusal, EngineBusy)
        assert refusal.operation_id == running.id
    await check_invariants(gateways[0])


async def test_many_who_would_wait_stand_in_one_line(gateways: list[Ledger]) -> None:
    """Places are given once, the line has its bound, and whoever asks, it moves from its front."""
    await with_engine(gateways[0])
    queueing = Queueing(5)
    done, refusals = await outcomes(
        gateway.operations.accept(order(), key=None, audit=entry(), queueing=queueing)
        for gateway in in_turn(gateways, 9)
    )
    assert [type(refusal) for refusal in refusals] == [QueueFull] * 3
    given = {accepted.operation.id: accepted.operation for accepted in done}
    line = await gateways[-1].operations.line("e1")
    assert line.holder is not None
    assert [given[waits].queue_position for waits in line.waiting] == [1, 2, 3, 4, 5]
    now = await record(gateways[0], given[line.holder], Dispatched())
    for number, waits in enumerate(line.waiting, start=1):
        await record(gateways[-1], now, Completed(result={}))
        with pytest.raises(EngineBusy):
            await accept(gateways[-1], order())
        asked = [given[each] for each in line.waiting[number - 1 :]]
        sent, told = await outcomes(
            record(gateway, operation, Dispatched())
            for gateway, operation in zip(in_turn(gateways, len(asked)), asked, strict=True)
        )
        (now,) = sent
        assert now.id == waits
        assert all(isinstance(each, EngineBusy) and each.operation_id == waits for each in told)
    await check_invariants(gateways[0])


async def test_of_conflicting_steps_one_lands(gateways: list[Ledger]) -> None:
    await with_engine(gateways[0])
    running = await record(gateways[0], await accept(gateways[0], order()), Dispatched())
    ends = [
        Completed(result={}),
        Failed(error=OperationError("INTERNAL", "LOST", "lost")),
        Progressed(progress=Progress("draining")),
    ] * 5
    done, refusals = await outcomes(
        record(gateway, running, fact, audit=entry("end"))
        for gateway, fact in zip(in_turn(gateways, 15), ends, strict=True)
    )
    (landed,) = done
    assert all(isinstance(refusal, Superseded) for refusal in refusals)
    assert await gateways[0].operations.get(running.id) == landed
    assert len((await gateways[0].audit.page(AuditFilter(action="end"))).items) == 1
    await check_invariants(gateways[0])


async def test_an_engine_is_registered_once(gateways: list[Ledger]) -> None:
    done, refusals = await outcomes(
        gateway.engines.register(registration(), entry()) for gateway in in_turn(gateways, 10)
    )
    assert len(done) == 1
    assert all(isinstance(refusal, EngineExists) for refusal in refusals)


async def test_of_conflicting_changes_of_a_registration_one_lands(gateways: list[Ledger]) -> None:
    await with_engine(gateways[0])
    done, refusals = await outcomes(
        gateway.engines.change(registration(labels={"n": str(number)}), 1, entry())
        for number, gateway in enumerate(in_turn(gateways, 10))
    )
    (changed,) = done
    assert all(isinstance(refusal, GenerationMismatch) for refusal in refusals)
    assert await gateways[0].engines.get("e1") == changed


async def test_no_order_slips_in_while_its_engine_is_removed(gateways: list[Ledger]) -> None:
    for number in range(10):
        engine_id = f"e{number}"
        await with_engine(gateways[0], engine_id)
        removal = gateways[0].engines.remove(engine_id, 1, entry())
        ordering = gateways[-1].operations.accept(
            order(engine_id=engine_id), key=None, audit=entry()
        )
        done, (refusal,) = await outcomes([removal, ordering])
        if done == [None]:
            assert isinstance(refusal, UnknownEngine)
        else:
            assert isinstance(refusal, EngineHasOpenOperation)
            (accepted,) = done
            assert isinstance(accepted, Accepted)
            assert refusal.operation_id == accepted.operation.id


async def test_an_expired_lease_has_one_successor(gateways: list[Ledger], clock: SetClock) -> None:
    await with_engine(gateways[0])
    for fence in range(1, 6):
        done, refusals = await outcomes(
            gateway.leases.acquire("e1", f"owner-{number}", 10)
            for number, gateway in enumerate(in_turn(gateways, 8))
        )
        assert refusals == []
        (lease,) = [lease for lease in done if lease is not None]
        assert lease.fence == fence
        clock.advance(seconds=10)


async def test_a_successor_waits_for_the_write_of_its_predecessor(
    gateways: list[Ledger], clock: SetClock
) -> None:
    """A fenced write and a take-over at the same moment: whichever is first, the other knows."""
    await with_engine(gateways[0])
    now = await record(gateways[0], await accept(gateways[0], order()), Dispatched())
    for _ in range(10):
        lease = await gateways[0].leases.acquire("e1", "old", 10)
        assert lease is not None
        clock.advance(seconds=10)
        advanced = step(now, Progressed(progress=Progress("draining")))
        written, taken = await asyncio.gather(
            gateways[0].operations.record(now, advanced, lease=lease),
            gateways[-1].leases.acquire("e1", "new", 10),
            return_exceptions=True,
        )
        assert isinstance(taken, Lease)
        assert taken.fence == lease.fence + 1
        stored = await gateways[0].operations.get(now.id)
        if isinstance(written, Superseded):
            assert stored == now
        else:
            assert isinstance(written, Operation)
            assert stored == written
            now = written
        clock.advance(seconds=10)


async def test_a_persons_word_and_the_engines_late_answer_have_one_winner(
    gateways: list[Ledger],
) -> None:
    """And two persons who say different things. What the losers were about to write is nowhere,
    neither in the stream nor in the audit."""
    await with_engine(gateways[0])
    for number in range(30):
        now = await record(gateways[0], await accept(gateways[0], order()), Dispatched())
        now = await record(gateways[0], now, OutcomeUnknown(message="no reply"))
        attempts = [
            (Settled(end=OperationState.FAILED, by="alice", reason="looked"), "alice"),
            (Completed(result={"changed": True}), "engine"),
            (Settled(end=OperationState.CANCELLED, by="bob", reason="heard"), "bob"),
        ]
        turned = attempts[number % 3 :] + attempts[: number % 3]
        done, refusals = await outcomes(
            gateway.operations.record(
                now,
                step(now, fact),
                asked=entry("settle", note=who),
                audit=entry("pause", "ended", operation_id=now.id),
            )
            for gateway, (fact, who) in zip(in_turn(gateways, 3), turned, strict=True)
        )
        assert [type(refusal) for refusal in refusals] == [Superseded, Superseded]
        (ended,) = done
        assert await gateways[-1].operations.get(now.id) == ended
        ends = [stored.event.type for stored in await gateways[0].events.of_operation(now.id)][3:]
        assert ends == ["completed" if ended.state is OperationState.SUCCEEDED else "settled"]
        rows = (await gateways[0].audit.page(AuditFilter(operation_id=now.id))).items
        assert [row.entry.outcome for row in rows] == ["ended"]
    await check_invariants(gateways[0])
    asked = (await gateways[0].audit.page(AuditFilter(action="settle"), size=100)).items
    assert len(asked) == 30


async def test_many_writers_lose_nothing(gateways: list[Ledger]) -> None:
    """50 writers of 20 operations each. No lock is ever reported to a caller."""
    await with_engine(gateways[0])

    async def work(gateway: Ledger) -> list[str]:
        return [
            (await accept(gateway, order(OperationKind.ABORT_REQUESTS, created_at=START))).id
            for _ in range(20)
        ]

    written = await asyncio.gather(*(work(gateway) for gateway in in_turn(gateways, 50)))
    found = {operation.id for operation in await all_operations(gateways[0])}
    assert found == {operation_id for ids in written for operation_id in ids}
    assert len(found) == 1000
