"""What a look through the ledger finds: nothing after any course of things, and each damage."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import text

from app.domain.kinds import OperationKind, OperationState
from app.domain.operation import OperationError, OperationWarning, Progress
from app.domain.queueing import Queueing
from app.domain.transitions import Cancelled, Completed, Continued, Dispatched, Failed, Warned
from app.ledger import Ledger
from app.ledger.database import Write
from app.ledger.integrity import Examination, examine
from tests.ledger.samples import IN_ANY_CASE, SetClock, accept, claim, order, record, with_engine

pytestmark = pytest.mark.anyio

ABORT = OperationKind.ABORT_REQUESTS


async def filled(ledger: Ledger) -> dict[str, str]:
    """Ids of operations in each kind of state, with keys and a lease."""
    await with_engine(ledger)
    running = await record(ledger, await accept(ledger, order(), key=claim()), Dispatched())
    queued = await accept(ledger, order(), queueing=IN_ANY_CASE)
    assert queued.sequence == 2
    done = await record(ledger, await accept(ledger, order(ABORT), key=claim("k2")), Dispatched())
    warned = await record(ledger, done, Warned(warning=OperationWarning("W", "w")))
    done = await record(ledger, warned, Completed(result={}))
    failed = await accept(ledger, order(ABORT))
    error = OperationError(code="INTERNAL", reason="R", message="m")
    failed = await record(ledger, failed, Failed(error=error))
    dropped = await record(ledger, await accept(ledger, order(ABORT)), Cancelled(message="m"))
    assert await ledger.leases.acquire("e1", "me", 15.0)
    return {
        "running": running.id,
        "queued": queued.id,
        "done": done.id,
        "failed": failed.id,
        "dropped": dropped.id,
    }


async def damaged(ledger: Ledger, *statements: str, **values: object) -> None:
    async def work(write: Write) -> None:
        for statement in statements:
            await write.connection.execute(text(statement).bindparams(**values))

    await ledger.events._database.write(work)


def said(found: Examination) -> list[tuple[str, str]]:
    return [(finding.check, finding.subject) for finding in found.findings]


async def test_a_ledger_that_was_only_used_is_sound(
    ledger: Ledger, ledger_url: str, clock: SetClock
) -> None:
    await filled(ledger)
    found = await examine(ledger_url, clock)
    assert (found.findings, found.operations, found.keys, found.leases) == ((), 5, 2, 1)
    assert found.events == 2 + 2 + 4 + 2 + 2
    assert found.schema.revision == found.schema.head


async def test_a_session_that_is_gone_on_with_before_its_turn_is_sound(
    ledger: Ledger, ledger_url: str, clock: SetClock
) -> None:
    await with_engine(ledger)
    await record(ledger, await accept(ledger, order()), Dispatched())
    queued = await accept(ledger, order(OperationKind.UPDATE_WEIGHTS), queueing=Queueing(16))
    taken = Continued(progress=Progress("chunk_taken", 0, 1, "chunks"))
    assert (await record(ledger, queued, taken)).state is OperationState.QUEUED
    assert (await examine(ledger_url, clock)).findings == ()


async def test_each_damage_is_found(ledger: Ledger, ledger_url: str, clock: SetClock) -> None:
    """One after the other in one ledger, so that none hides another."""
    ids = await filled(ledger)
    known: list[tuple[str, str]] = []
    free = (await ledger.events.of_operation(ids["done"]))[1].position

    async def finds(
        check: str, subject: str, words: str, *statements: str, **values: object
    ) -> None:
        await damaged(ledger, *statements, **values)
        found = await examine(ledger_url, clock)
        assert sorted(said(found)) == sorted([*known, (check, subject)])
        (finding,) = (one for one in found.findings if (one.check, one.subject) not in known)
        assert words in finding.message
        known.append((check, subject))

    await finds(
        "operation", ids["done"], "are not 1 to 4: 3 of them",
        "DELETE FROM events WHERE operation_id = :id AND sequence = 2", id=ids["done"],
    )  # fmt: skip
    await finds(
        "operation", ids["failed"], "it is succeeded and its last event is failed",
        "UPDATE operations SET state = 'succeeded' WHERE id = :id", id=ids["failed"],
    )  # fmt: skip
    await finds(
        "operation", ids["dropped"], "has 0 events that end it",
        "UPDATE events SET type = 'warning', terminal = false WHERE operation_id = :id"
        " AND terminal", id=ids["dropped"],
    )  # fmt: skip
    await finds(
        "operation", ids["queued"], "do not rise",
        "UPDATE events SET position = :free WHERE operation_id = :id AND sequence = 1",
        id=ids["queued"], free=free,
    )  # fmt: skip
    await finds(
        "leftover", ids["failed"], "its payload was not deleted",
        "INSERT INTO payloads (operation_id, content) VALUES (:id, '')", id=ids["failed"],
    )  # fmt: skip
    await damaged(ledger, "UPDATE leases SET expires_at = :at", at=_later(ledger, clock))
    assert ("lease", "e1") in said(await examine(ledger_url, clock))


def _later(ledger: Ledger, clock: SetClock) -> object:
    later = clock.now() + timedelta(days=2)
    return later if ledger.events._database.postgres else later.isoformat(timespec="microseconds")


async def test_what_refers_to_nothing_is_found(
    ledger: Ledger, ledger_url: str, clock: SetClock
) -> None:
    ids = await filled(ledger)
    database = ledger.events._database
    with database._engine.connect() as connection:
        # Outside a transaction, where SQLite takes it and PostgreSQL keeps it.
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.execute(
            "SET session_replication_role = replica"
            if database.postgres
            else "PRAGMA foreign_keys = 0"
        )
        gone = text("DELETE FROM operations WHERE id = :id").bindparams(id=ids["done"])
        connection.execute(gone)
        connection.commit()
        connection.invalidate()
    found = said(await examine(ledger_url, clock))
    assert ("key", ids["done"]) in found
    assert ("event", ids["done"]) in found
