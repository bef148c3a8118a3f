"""The invariants stand in the database too: what the program would not write, it refuses.

Each statement here goes around the program's own checks. On both databases.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Insert, delete
from sqlalchemy.exc import IntegrityError

from app.domain.errors import EngineExists
from app.domain.kinds import OperationKind, OperationState
from app.domain.transitions import Completed, Dispatched, accepted_event
from app.ledger import Ledger
from app.ledger import tables as t
from app.ledger.constraints import violated, violations
from app.ledger.database import Database, Raced, Write
from app.ledger.errors import LedgerUnavailable, Superseded
from app.ledger.rows import event_values, operation_values, registration_values
from tests.ledger.samples import (
    START,
    accept,
    claim,
    order,
    record,
    registration,
    with_engine,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def database(ledger: Ledger) -> Database:
    """With an engine `e1`, an ended operation `ended` and a running one `running`."""
    await with_engine(ledger)
    ended = await accept(ledger, order(id="ended"), key=claim("used"))
    await record(ledger, await record(ledger, ended, Dispatched()), Completed(result={}))
    await record(ledger, await accept(ledger, order(id="running")), Dispatched())
    return ledger.operations._database


def operation(**changes: Any) -> Insert:
    given = order(OperationKind.ABORT_REQUESTS, id="new")
    return t.operations.insert().values(operation_values(given) | changes)


def event(**changes: Any) -> Insert:
    given = event_values(accepted_event(order(id="running")), OperationKind.PAUSE, terminal=False)
    return t.events.insert().values(given | {"sequence": 3, "type": "progress"} | changes)


SECOND_END = {"operation_id": "ended", "sequence": 9, "type": "failed", "terminal": True}
KEY = {
    "issuer": "https://issuer.test",
    "subject": "alice",
    "client_id": "cli",
    "key": "used",
    "fingerprint": "f",
    "operation_id": "running",
    "expires_at": START,
}
ENGINE = {"id": "e2", "generation": 1, "created_at": START} | registration_values(registration())

NAMED: list[tuple[str, Any]] = [
    ("uq_operations_engine_slot", operation(takes_slot=True)),
    ("uq_operations_engine_slot", operation(takes_slot=True, state="reconciling")),
    ("uq_operations_id", operation(id="running")),
    ("ck_operations_state", operation(state="lost")),
    ("ck_operations_verification", operation(verification="believed")),
    ("ck_operations_ended", operation(state="failed")),
    ("ck_operations_ended", operation(ended_at=START)),
    ("ck_operations_sequences", operation(sequence=0)),
    ("ck_operations_sequences", operation(engine_sequence=-1)),
    ("fk_operations_engine_id", operation(engine_id="nowhere")),
    ("uq_events_operation_id_sequence", event(sequence=2)),
    (
        "uq_events_operation_end",
        event(**SECOND_END),
    ),
    ("ck_events_type", event(type="hello")),
    ("ck_events_terminal", event(type="failed")),
    ("ck_events_terminal", event(terminal=True)),
    ("ck_events_sequence", event(sequence=0)),
    ("fk_events_operation_id", event(operation_id="nothing")),
    ("pk_idempotency_keys", t.idempotency_keys.insert().values(KEY)),
    ("pk_engines", t.engines.insert().values(ENGINE | {"id": "e1"})),
    ("ck_engines_generation", t.engines.insert().values(ENGINE | {"generation": 0})),
    (
        "ck_observations_health",
        t.observations.insert().values(engine_id="e1", health="well", document={}),
    ),
    (
        "fk_observations_engine_id",
        t.observations.insert().values(engine_id="e2", health="serving", document={}),
    ),
    (
        "ck_leases_fence",
        t.leases.insert().values(engine_id="e1", owner="a", fence=0, expires_at=START),
    ),
    (
        "fk_leases_engine_id",
        t.leases.insert().values(engine_id="e2", owner="a", fence=1, expires_at=START),
    ),
    (
        "ck_audit_actor",
        t.audit.insert().values(at=START, action="a", outcome="o", issuer="i", detail={}),
    ),
    ("ck_ledger_single", t.ledger.insert().values(id=2, identity="x", pruned_to=0)),
    ("fk_operations_engine_id", delete(t.engines)),
    ("fk_events_operation_id", delete(t.operations)),
]


async def test_each_constraint_refuses_and_says_its_name(database: Database) -> None:
    for name, statement in NAMED:

        async def work(write: Write, statement: Any = statement) -> None:
            await write.connection.execute(statement)

        with pytest.raises(IntegrityError) as refused:
            await database.write(work)
        said = violated(refused.value)
        if database.postgres and name.startswith("fk_") and not isinstance(statement, Insert):
            # Several refer to it; any of them may be the first to refuse.
            assert said is not None
            assert said.startswith("fk_")
        elif database.postgres or name.startswith(("pk_", "uq_")):
            assert said == name
        else:
            # SQLite does not say which foreign key, and check constraints mean nothing to us.
            expected = "FOREIGN KEY" if name.startswith("fk_") else name
            assert expected in str(refused.value)


async def test_a_key_must_lead_to_an_operation_by_the_end_of_the_transaction(
    database: Database,
) -> None:
    async def work(write: Write) -> None:
        values = KEY | {"key": "unused", "operation_id": "nothing"}
        await write.connection.execute(t.idempotency_keys.insert().values(values))

    with pytest.raises(IntegrityError) as refused:
        await database.write(work)
    assert "alice" not in str(refused.value), "no values in what may be logged"


async def test_the_slot_is_open_for_what_is_queued_or_ended(database: Database) -> None:
    async def work(write: Write) -> None:
        for state, more in (
            (OperationState.QUEUED, {"takes_slot": True}),
            (OperationState.FAILED, {"takes_slot": True, "ended_at": START}),
            (OperationState.RUNNING, {"takes_slot": False}),
        ):
            statement = operation(id=f"n-{state.value}", state=state.value, **more)
            await write.connection.execute(statement)

    await database.write(work)


async def test_a_violation_is_told_by_its_meaning(database: Database) -> None:
    meanings: list[tuple[Insert, type[Exception]]] = [
        (t.engines.insert().values(ENGINE | {"id": "e1"}), EngineExists),
        (event(sequence=2), Superseded),
        (event(**SECOND_END), Superseded),
        (operation(id="running"), IntegrityError),
    ]
    for statement, meaning in meanings:

        async def work(write: Write, statement: Insert = statement) -> None:
            with violations():
                await write.connection.execute(statement)

        with pytest.raises(meaning):
            await database.write(work)


async def test_what_another_has_just_taken_is_tried_again(database: Database) -> None:
    for statement in (operation(takes_slot=True), t.idempotency_keys.insert().values(KEY)):
        tries = 0

        async def work(write: Write, statement: Insert = statement) -> int:
            nonlocal tries
            tries += 1
            if tries < 4:
                with violations():
                    await write.connection.execute(statement)
            return tries

        assert await database.write(work) == 4

    async def never(write: Write) -> None:
        raise Raced

    with pytest.raises(LedgerUnavailable, match="at once"):
        await database.write(never)
