"""A process that writes is killed, again and again: what it was told is there, and nothing is
half there. On both databases."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from app.domain.errors import EngineBusy
from app.domain.events import EventType
from app.ledger import Ledger, upgrade
from app.ledger.errors import LedgerInUse
from app.ledger.values import AuditFilter, EventFilter
from tests.ledger.samples import (
    ALICE,
    START,
    SetClock,
    accept,
    check_invariants,
    order,
    with_engine,
)

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.ledger.writing_child",
        *arguments,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(120):
        return (await process.stdout.readline()).decode().strip()


async def write_and_kill(url: str, number: int, lines: int) -> dict[str, tuple[int, str]]:
    """What was acknowledged: the last sequence and the key of each operation."""
    process = await start(url, str(number))
    try:
        assert await line_of(process) == "ready"
        said = [await line_of(process) for _ in range(lines)]
    finally:
        process.kill()
    assert process.stdout is not None
    rest = (await process.stdout.read()).decode()
    await process.wait()
    # The very last line may have been cut.
    said += rest.split("\n")[:-1]
    told: dict[str, tuple[int, str]] = {}
    for line in said:
        operation_id, sequence, key = line.split()
        told[operation_id] = (int(sequence), key)
    return told


async def test_what_was_acknowledged_survives_kills(ledger_url: str, clock: SetClock) -> None:
    ledger = await Ledger.open(ledger_url, clock=clock, migrate=True)
    await with_engine(ledger)
    await ledger.close()
    told: dict[str, tuple[int, str]] = {}
    for number, lines in enumerate((40, 7, 133)):
        told |= await write_and_kill(ledger_url, number, lines)

    ledger = await Ledger.open(ledger_url, clock=clock)
    try:
        stored = {operation.id: operation for operation in await check_invariants(ledger)}
        assert told.keys() <= stored.keys()
        for operation_id, (sequence, key) in told.items():
            assert stored[operation_id].sequence >= sequence
            again = await ledger.operations.replay(ALICE, key, "f1")
            assert again == stored[operation_id], "a key and its operation are written together"
        # As many acceptances as entries of the audit, which are written in the same transaction.
        accepted, _ = await ledger.events.after(
            0, EventFilter(types=frozenset({EventType.ACCEPTED})), limit=100_000
        )
        audited = await count_audit(ledger)
        assert audited == {
            "pause": len(accepted),
            "step": sum(operation.sequence - 1 for operation in stored.values()),
            "register_engine": 1,
        }
    finally:
        await ledger.close()


async def count_audit(ledger: Ledger) -> dict[str, int]:
    counts: dict[str, int] = {}
    before: int | None = None
    while True:
        page = await ledger.audit.page(AuditFilter(), before, size=500)
        for stored in page.items:
            counts[stored.entry.action] = counts.get(stored.entry.action, 0) + 1
        if page.next is None:
            return counts
        assert isinstance(page.next, int)
        before = page.next


async def test_a_second_process_is_refused_until_the_first_is_gone(
    tmp_path: Path, clock: SetClock
) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
    ledger = await Ledger.open(url, clock=clock, migrate=True)
    await with_engine(ledger)
    await ledger.close()

    child = await start(url, "0")
    try:
        assert await line_of(child) == "ready"
        (tmp_path / "link.db").symlink_to(tmp_path / "ledger.db")
        for way in (url, f"sqlite:///{tmp_path}/link.db"):
            with pytest.raises(LedgerInUse):
                await Ledger.open(way, clock=clock)
            with pytest.raises(LedgerInUse):
                await upgrade(way)
    finally:
        child.kill()
        await child.wait()

    # It held a lease for an hour. Nobody can hold it any more, so it is free at once.
    ledger = await Ledger.open(url, clock=clock)
    try:
        lease = await ledger.leases.acquire("e1", "successor", 10)
        assert lease is not None
        assert lease.fence == 2
        with pytest.raises(LedgerInUse):
            await Ledger.open(url, clock=clock)
    finally:
        await ledger.close()


async def test_on_postgres_the_leases_of_others_are_left_alone(
    postgres_url: str, clock: SetClock
) -> None:
    first = await Ledger.open(postgres_url, clock=clock, migrate=True)
    await with_engine(first)
    assert await first.leases.acquire("e1", "first", 10) is not None
    second = await Ledger.open(postgres_url, clock=clock)
    try:
        assert await second.leases.acquire("e1", "second", 10) is None
        await accept(second, order(created_at=START))
        with pytest.raises(EngineBusy):
            await accept(first, order())
    finally:
        await second.close()
        await first.close()
