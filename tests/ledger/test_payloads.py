"""What goes with an order lies apart from it, and goes when it ends. On both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import select, text

from app.domain.errors import EngineBusy
from app.domain.kinds import FailureEffect, OperationKind
from app.domain.operation import OperationError
from app.domain.transitions import Cancelled, Completed, Dispatched, Fact, Failed
from app.ledger import Ledger
from app.ledger.tables import metadata, payloads
from tests.ledger.samples import SetClock, claim, entry, order, record, with_engine

pytestmark = pytest.mark.anyio

UPDATE = OperationKind.UPDATE_WEIGHTS
CONTENT = b"canary\x00\xff" * 1000


async def rows(ledger: Ledger) -> int:
    async def count(connection: object) -> int:
        found = await connection.execute(text("SELECT count(*) FROM payloads"))  # type: ignore[attr-defined]
        return int(found.scalar_one())

    return await ledger._database.read(count)


@pytest.mark.parametrize(
    "facts",
    [
        [Cancelled(message="before it was sent")],
        [Dispatched(), Completed(result={})],
        [Dispatched(), Failed(error=OperationError("X", "Y", "z", effect=FailureEffect.NONE))],
    ],
)
async def test_it_is_there_until_the_end_and_no_longer(ledger: Ledger, facts: list[Fact]) -> None:
    await with_engine(ledger)
    given = order(UPDATE)
    await ledger.operations.accept(
        given, key=claim(), audit=entry("update_weights"), payload=CONTENT
    )
    plain = order(OperationKind.ABORT_REQUESTS)
    await ledger.operations.accept(plain, key=None, audit=entry())
    assert await ledger.payloads.get(given.id) == CONTENT
    assert await ledger.payloads.get(plain.id) is None
    operation = given
    for fact in facts:
        assert await ledger.payloads.get(given.id) == CONTENT
        operation = await record(ledger, operation, fact)
    assert await ledger.payloads.get(given.id) is None
    assert await rows(ledger) == 0


async def test_a_replay_and_a_refusal_leave_none(ledger: Ledger) -> None:
    await with_engine(ledger)
    first = order(UPDATE)
    for _ in range(2):
        again = await ledger.operations.accept(
            first,
            key=claim(),
            audit=entry(),
            payload=CONTENT,
        )
        assert again.operation.id == first.id
    with pytest.raises(EngineBusy):
        await ledger.operations.accept(
            order(UPDATE), key=claim("k2"), audit=entry(), payload=CONTENT
        )
    assert await rows(ledger) == 1


async def test_it_outlives_the_process(ledger_url: str, clock: SetClock) -> None:
    ledger = await Ledger.open(ledger_url, clock=clock, migrate=True)
    await with_engine(ledger)
    given = order(UPDATE)
    await ledger.operations.accept(given, key=claim(), audit=entry(), payload=CONTENT)
    await ledger.close()
    again = await Ledger.open(ledger_url, clock=clock)
    try:
        assert await again.payloads.get(given.id) == CONTENT
    finally:
        await again.close()


async def test_no_other_table_has_a_place_for_it(ledger: Ledger) -> None:
    """What is read to be shown can't come by it."""
    await with_engine(ledger)
    given = order(UPDATE)
    await ledger.operations.accept(given, key=claim(), audit=entry(), payload=CONTENT)
    for table in metadata.tables.values():
        if table is payloads:
            continue

        async def read(connection: object, table: object = table) -> str:
            found = await connection.execute(select(table))  # type: ignore[attr-defined,call-overload]
            return str(found.all())

        assert "canary" not in await ledger._database.read(read)
