"""What is kept of engines that keep nothing themselves. On both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.domain.errors import UnknownEngine
from app.domain.kept_state import KeptState
from app.domain.kinds import OperationKind
from app.domain.transitions import Cancelled
from app.ledger import Ledger
from tests.ledger.samples import entry, order, record, with_engine

pytestmark = pytest.mark.anyio

FIRST = KeptState(
    number=1, revision=1, pause_epoch=0, release_epoch=0, document={"pause": None, "x": "\x00"}
)


async def test_of_two_writers_one_is_told_that_it_came_too_late(ledger: Ledger) -> None:
    await with_engine(ledger)
    states = ledger.kept_states
    assert await states.get("e1") is None
    both = await asyncio.gather(states.put("e1", FIRST), states.put("e1", FIRST))
    assert sorted(both) == [False, True]
    kept = await states.get("e1")
    assert kept == replace(FIRST, document={"pause": None, "x": "\ufffd"})
    second = replace(FIRST, number=2, revision=2, pause_epoch=1)
    both = await asyncio.gather(states.put("e1", second), states.put("e1", second))
    assert sorted(both) == [False, True]
    assert not await states.put("e1", replace(second, number=4))
    with pytest.raises(UnknownEngine):
        await states.put("nobody", FIRST)


async def test_no_counter_goes_back(ledger: Ledger) -> None:
    await with_engine(ledger)
    high = replace(FIRST, revision=5, pause_epoch=5, release_epoch=5)
    assert await ledger.kept_states.put("e1", high)
    for counter in ("revision", "pause_epoch", "release_epoch"):
        lower: dict[str, Any] = {counter: 4}
        assert not await ledger.kept_states.put("e1", replace(high, number=2, **lower))
    assert await ledger.kept_states.put("e1", replace(high, number=2))


async def test_an_order_that_has_ended_is_abandoned(ledger: Ledger) -> None:
    await with_engine(ledger)
    given = order(OperationKind.PAUSE)
    await ledger.operations.accept(given, key=None, audit=entry())
    await ledger.kept_states.put("e1", replace(FIRST, operation_id=given.id))
    kept = await ledger.kept_states.get("e1")
    assert kept is not None
    assert (kept.operation_id, kept.abandoned) == (given.id, False)
    await record(ledger, given, Cancelled(message=""))
    kept = await ledger.kept_states.get("e1")
    assert kept is not None
    assert kept.abandoned
    # One that is not kept any more has ended long ago.
    await ledger.kept_states.put("e1", replace(FIRST, number=2, operation_id="gone"))
    kept = await ledger.kept_states.get("e1")
    assert kept is not None
    assert kept.abandoned
