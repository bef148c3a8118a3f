"""History that is no longer kept: one `reset` and a snapshot, never a gap without a word."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.domain.operation import Operation, Progress
from app.domain.transitions import Advanced, Progressed, advance
from app.http.rooms import Rooms
from tests.http.gateway import Gateway, gateway
from tests.streams.reading import Heard, first, heard, in_ledger, watching

pytestmark = pytest.mark.anyio

EVENTS = "/v1/events"
# More than is read at once, and more bytes than a connection that nobody reads from can hold.
MANY, BYTES = 260, 60_000


async def flushed(gate: Gateway) -> str:
    return f"/v1/operations/{(await gate.flush())['id']}/events"


async def progressing(rooms: Rooms, operation_id: str) -> Operation:
    """The operation with many long events more."""
    operation = await rooms.ledger.operations.get(operation_id)
    assert operation is not None
    for number in range(MANY):
        fact = Progressed(progress=Progress("x" * BYTES, done=number))
        step = advance(operation, fact, rooms.clock.now())
        assert isinstance(step, Advanced)
        operation = await rooms.ledger.operations.record(operation, step)
    return operation


async def dispatched(gate: Gateway) -> str:
    """The id of an operation that the engine has taken on and does not end."""
    gate.engine.go.clear()
    operation_id: str = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    events = await first(gate, f"/v1/operations/{operation_id}/events", 3)
    assert events[-1].data["sequence"] == 3
    return operation_id


async def test_an_operation_whose_first_events_are_gone_begins_with_a_reset(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path / "data") as gate:
        path = await flushed(gate)
        story = await heard(gate, path)
        await in_ledger(tmp_path / "data", "DELETE FROM events WHERE sequence < 3")
        reset, snapshot = await heard(gate, path)
        assert (reset.type, reset.data) == ("reset", {"reason": "history_pruned"})
        assert snapshot.data["operation"]["state"] == "succeeded"
        pages = (await gate.get(path, Accept="application/json")).json()
        assert [item["type"] for item in pages["items"]] == ["reset", "snapshot"]
        # A reader who has heard all of it is not told again.
        await in_ledger(tmp_path / "data", "DELETE FROM events")
        async with watching(gate, path, story[-1].id) as reader:
            assert reader.answer.status_code == 204


async def test_a_fleet_cursor_older_than_what_is_kept(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data") as gate:
        begin = (await heard(gate, await flushed(gate)))[0]
        await in_ledger(
            tmp_path / "data", f"UPDATE ledger SET pruned_to = {begin.data['position'] + 1}"
        )
        reset, snapshot = await first(gate, EVENTS, 2, begin.id)
        assert (reset.type, reset.data) == ("reset", {"reason": "cursor_too_old"})
        assert snapshot.type == "snapshot"


@pytest.mark.parametrize("whole_fleet", [True, False])
async def test_what_is_pruned_before_a_slow_reader_comes_to_it(
    tmp_path: Path, whole_fleet: bool
) -> None:
    data = tmp_path / "data"
    async with gateway(data) as gate:
        operation_id = await dispatched(gate)
        operation = await progressing(gate.rooms, operation_id)
        engine = gate.engine
    # A gateway that has just been started has nothing of that in memory.
    async with gateway(data, registered=False) as gate:
        gate.engine.adopt(engine)
        identity = gate.rooms.ledger.identity
        path, last = f"/v1/operations/{operation_id}/events", None
        if whole_fleet:
            path, last = EVENTS, f"{identity}.0"
        async with watching(gate, path, last) as reader, asyncio.timeout(120):
            events = aiter(reader)
            told = [await anext(events)]
            await in_ledger(
                data,
                "DELETE FROM events WHERE sequence BETWEEN 4 AND 250",
                f"UPDATE ledger SET pruned_to = (SELECT max(position) FROM events) "
                f"WHERE {int(whole_fleet)}",
            )
            while told[-1].type != "snapshot":
                told.append(await anext(events))
        *before, reset, snapshot = told
        assert (reset.type, reset.data) == ("reset", {"reason": "history_pruned"})
        assert reset.id is None
        _in_order(before)
        shown = snapshot.data["operation"] if not whole_fleet else snapshot.data["operations"][0]
        assert shown["sequence"] >= operation.sequence


def _in_order(events: list[Heard]) -> None:
    """What came before the reset has no gap in itself."""
    sequences = [event.data["sequence"] for event in events]
    assert sequences == list(range(1, len(sequences) + 1))
    assert len(sequences) < MANY
