"""The audit book and the leases of engines. On both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from app.domain.errors import UnknownEngine
from app.domain.operation import Progress
from app.domain.transitions import Dispatched, Progressed
from app.ledger import Ledger
from app.ledger.errors import Superseded
from app.ledger.values import AuditFilter, Lease
from tests.ledger.samples import (
    ALICE,
    BOB,
    START,
    SetClock,
    accept,
    check_invariants,
    entry,
    order,
    record,
    step,
    with_engine,
)

pytestmark = pytest.mark.anyio


async def test_an_entry_reads_back_whole(ledger: Ledger) -> None:
    given = entry(
        "pause",
        "refused",
        actor=ALICE,
        engine_id="an engine that is not there",
        operation_id="op",
        reason="ENGINE_BUSY",
        note="for the rollout \x00",
        request_id="r-1",
        trace_id="t-1",
        source="192.0.2.7",
        detail={"mode": "drain", "labels": ["a"]},
    )
    await ledger.audit.append(given)
    (stored,) = (await ledger.audit.page(AuditFilter())).items
    assert stored.entry.note == "for the rollout �"
    assert stored.entry.actor == ALICE
    assert stored.entry.detail == given.detail
    assert stored.entry.source == "192.0.2.7"


async def test_entries_are_paged_newest_first_and_filtered(ledger: Ledger) -> None:
    for number in range(5):
        await ledger.audit.append(
            entry(
                f"a{number % 2}",
                actor=BOB if number else None,
                engine_id=f"e{number}",
                operation_id=f"o{number}",
                at=START + timedelta(seconds=number),
            )
        )
    page = await ledger.audit.page(AuditFilter(), size=2)
    assert [stored.entry.engine_id for stored in page.items] == ["e4", "e3"]
    assert isinstance(page.next, int)
    page = await ledger.audit.page(AuditFilter(), page.next, size=5)
    assert [stored.entry.engine_id for stored in page.items] == ["e2", "e1", "e0"]
    assert page.next is None

    async def found(**wanted: object) -> list[str | None]:
        page = await ledger.audit.page(AuditFilter(**wanted))  # type: ignore[arg-type]
        return [stored.entry.engine_id for stored in page.items]

    assert await found(engine_id="e2") == ["e2"]
    assert await found(operation_id="o3") == ["e3"]
    assert await found(subject="bob") == ["e4", "e3", "e2", "e1"]
    assert await found(action="a0") == ["e4", "e2", "e0"]
    assert await found(since=START + timedelta(seconds=3)) == ["e4", "e3"]
    assert len(await found(since=datetime.min.replace(tzinfo=UTC))) == 5


async def test_a_lease_has_one_holder_until_its_time_is_up(ledger: Ledger, clock: SetClock) -> None:
    await with_engine(ledger)
    first = await ledger.leases.acquire("e1", "a", 10)
    assert first == Lease("e1", "a", 1, START + timedelta(seconds=10))
    clock.advance(seconds=9.999)
    assert await ledger.leases.acquire("e1", "b", 10) is None
    assert await ledger.leases.acquire("e1", "a", 10) is None
    clock.advance(seconds=0.001)
    second = await ledger.leases.acquire("e1", "b", 10)
    assert second is not None
    assert second.fence == 2
    assert (first.taken_from, second.taken_from) == ("", "a")
    assert await ledger.leases.renew(first, 10) is None
    await ledger.leases.release(first)
    assert await ledger.leases.acquire("e1", "c", 10) is None, "a late release frees nothing"
    with pytest.raises(UnknownEngine):
        await ledger.leases.acquire("e2", "a", 10)
    with pytest.raises(ValueError, match="owner"):
        await ledger.leases.acquire("e1", "", 10)


async def test_a_lease_is_renewed_and_released(ledger: Ledger, clock: SetClock) -> None:
    await with_engine(ledger)
    held = await ledger.leases.acquire("e1", "a", 10)
    assert held is not None
    clock.advance(seconds=8)
    held = await ledger.leases.renew(held, 10)
    assert held == Lease("e1", "a", 1, START + timedelta(seconds=18))
    clock.advance(seconds=9)
    assert await ledger.leases.acquire("e1", "b", 10) is None
    clock.advance(seconds=60)
    held = await ledger.leases.renew(held, 10)
    assert held is not None, "nobody took it in the meantime"
    await ledger.leases.release(held)
    assert await ledger.leases.renew(held, 10) is None
    second = await ledger.leases.acquire("e1", "b", 10)
    assert second is not None
    assert second.fence == 2, "a fence never comes twice"
    assert second.taken_from == "", "it was given back"


async def test_a_lease_given_back_is_free_by_every_clock(ledger: Ledger, clock: SetClock) -> None:
    """Also where the giver's was ahead, or has been set back since: else nobody could drive the
    engine until it is that late."""
    await with_engine(ledger)
    held = await ledger.leases.acquire("e1", "a", 10)
    assert held is not None
    await ledger.leases.release(held)
    clock.advance(seconds=-600)
    second = await ledger.leases.acquire("e1", "b", 10)
    assert second is not None
    await ledger.leases.end_all()
    clock.advance(seconds=-600)
    assert await ledger.leases.acquire("e1", "c", 10) is not None


async def test_a_holder_that_was_asleep_writes_nothing(ledger: Ledger, clock: SetClock) -> None:
    await with_engine(ledger)
    old = await ledger.leases.acquire("e1", "a", 10)
    accepted = await accept(ledger, order())
    running = await record(ledger, accepted, Dispatched(), lease=old)
    clock.advance(seconds=11)
    new = await ledger.leases.acquire("e1", "b", 10)
    next_step = step(running, Progressed(progress=Progress("draining")))
    for gone in (old, Lease("e1", "b", 1, clock.at), Lease("e2", "b", 2, clock.at)):
        with pytest.raises(Superseded):
            await ledger.operations.record(running, next_step, lease=gone)
    await ledger.operations.record(running, next_step, lease=new)
    await check_invariants(ledger)
