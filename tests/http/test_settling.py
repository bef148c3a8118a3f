"""Stating the end of what nobody can read back: who may, of what, and what comes of it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.domain.commands import FlushCaches
from app.domain.kinds import CacheKind, OperationKind, OperationState
from app.domain.operation import DEADLINE_PASSED, Actor, Operation, OperationWarning
from app.domain.scopes import Scope
from app.domain.transitions import Advanced, Dispatched, Fact, OutcomeUnknown, Warned, advance
from app.ledger.values import AuditEntry
from tests.http.gateway import ENGINE_ID, Gateway, gateway
from tests.streams.reading import watching

pytestmark = pytest.mark.anyio

FAILED = {"outcome": "failed", "reason": "the machine was swapped out"}
LATE = Warned(warning=OperationWarning(DEADLINE_PASSED, "the deadline is over"))
ACTIONS = ("settle", "flush_caches")
NOBODY = "0198c5f1-0000-7000-8000-000000000000"


async def unknown(gate: Gateway, *more: Fact) -> str:
    """A flush whose outcome nobody knows: not even the process that it was sent to is known, so
    asking the engine proves nothing."""
    rooms, now = gate.rooms, gate.rooms.clock.now()
    operation = Operation(
        id=rooms.new_id(),
        engine_id=ENGINE_ID,
        kind=OperationKind.FLUSH_CACHES,
        state=OperationState.ACCEPTED,
        request=FlushCaches(caches=(CacheKind.PREFIX,)).document(),
        actor=Actor(gate.issuer.issuer, "grace", "console"),
        created_at=now,
        deadline_at=now + timedelta(hours=1),
    )
    entry = AuditEntry(at=now, action="flush_caches", outcome="accepted")
    await rooms.ledger.operations.accept(operation, key=None, audit=entry)
    for fact in (Dispatched(), OutcomeUnknown(message="no reply"), *more):
        step = advance(operation, fact, now)
        assert isinstance(step, Advanced)
        operation = await rooms.ledger.operations.record(operation, step)
    return operation.id


async def settle(
    gate: Gateway, operation_id: str, body: dict[str, Any], **headers: str
) -> httpx2.Response:
    path = f"/v1/operations/{operation_id}/settle"
    return await gate.http.post(path, json=body, headers={**gate.auth(), **headers})


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "cancelled"])
async def test_a_stated_end_is_the_end(gate: Gateway, outcome: str) -> None:
    operation_id = await unknown(gate)
    path = f"/v1/operations/{operation_id}"
    found = (await gate.get("/v1/operations?state=reconciling")).json()["items"]
    assert [each["id"] for each in found] == [operation_id]
    before = (await gate.get(f"/v1/engines/{ENGINE_ID}")).json()
    assert before["running_operation"] == operation_id
    assert (await gate.order("pause", {"mode": "drain"})).json()["reason"] == "ENGINE_BUSY"

    async with watching(gate, f"{path}/events") as reader:
        events = []
        async for event in reader:
            events.append(event)
            if event.type == "reconciling":
                body = {"outcome": outcome, "reason": "I looked"}
                answer = await settle(gate, operation_id, body)
    assert answer.status_code == 200
    settled = answer.json()
    assert (settled["state"], settled["done"]) == (outcome, True)
    assert (settled["verification"], settled["result"]) == ("settled", None)
    assert settled["revision"] is None
    error = {"reason": "SETTLED", "message": "I looked", "effect": "unknown"}
    if outcome == "failed":
        assert error.items() <= settled["error"].items()
    else:
        assert settled["error"] is None
    # One terminal event, which is the last one; and nothing to come back for.
    assert [event.type for event in events] == ["accepted", "dispatched", "reconciling", "settled"]
    said = {"state": outcome, "by": "ada", "reason": "I looked", "message": ""}
    assert events[-1].data["data"] == said
    async with watching(gate, f"{path}/events", events[-1].id) as reader:
        assert reader.answer.status_code == 204
    assert (await gate.get(path)).json() == settled

    after = (await gate.get(f"/v1/engines/{ENGINE_ID}")).json()
    assert after["running_operation"] is None
    # The engine is read all the while.
    assert {**after["facts"], "observed_at": ""} == {**before["facts"], "observed_at": ""}
    assert after["revision"] == before["revision"]
    assert gate.engine.orders == 0
    await gate.flush()


async def test_what_a_failure_says_of_itself(gate: Gateway) -> None:
    body = {**FAILED, "message": "half of the ranks had begun"}
    settled = (await settle(gate, await unknown(gate), body)).json()
    assert settled["error"]["message"] == "half of the ranks had begun"


async def test_only_what_is_in_doubt_can_be_settled(gate: Gateway) -> None:
    ended = (await gate.flush())["id"]
    gate.engine.go.clear()
    running = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    async with asyncio.timeout(20):
        while not gate.engine.calls["Pause"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    for operation_id, reason in ((ended, "OPERATION_ENDED"), (running, "NOT_RECONCILING")):
        answer = await settle(gate, operation_id, FAILED)
        assert (answer.status_code, answer.json()["reason"]) == (409, reason)
        assert answer.json()["operation"] == operation_id
    settled = await unknown_beside(gate)
    assert (await settle(gate, settled, FAILED)).status_code == 200
    again = await settle(gate, settled, FAILED)
    assert (again.status_code, again.json()["reason"]) == (409, "OPERATION_ENDED")
    for nothing in (NOBODY, "nothing"):
        answer = await settle(gate, nothing, FAILED)
        assert (answer.status_code, answer.json()["reason"]) == (404, "OPERATION_NOT_FOUND")


async def unknown_beside(gate: Gateway) -> str:
    """Once what runs has ended."""
    gate.engine.go.set()
    async with asyncio.timeout(20):
        path = f"/v1/engines/{ENGINE_ID}"
        while (await gate.get(path)).json()["running_operation"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return await unknown(gate)


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"outcome": "failed"}, "/reason"),
        ({"reason": "I looked"}, "/outcome"),
        ({**FAILED, "reason": ""}, "/reason"),
        ({**FAILED, "reason": " \t\n"}, "/reason"),
        ({**FAILED, "reason": "a" * 501}, "/reason"),
        ({**FAILED, "reason": "bell \a"}, "/reason"),
        ({**FAILED, "message": "a" * 501}, "/message"),
        ({**FAILED, "outcome": "reconciling"}, "/outcome"),
        ({**FAILED, "outcome": None}, "/outcome"),
        ({**FAILED, "state": "failed"}, ""),
    ],
)
async def test_a_statement_has_its_form(gate: Gateway, body: dict[str, Any], pointer: str) -> None:
    operation_id = await unknown(gate)
    answer = await settle(gate, operation_id, body)
    assert (answer.status_code, answer.json()["reason"]) == (422, "SCHEMA_VIOLATION")
    assert [place["pointer"] for place in answer.json()["errors"]] == [pointer]
    assert (await gate.get(f"/v1/operations/{operation_id}")).json()["state"] == "reconciling"


async def test_of_many_who_state_it_at_once_one_is_heard(gate: Gateway) -> None:
    operation_id = await unknown(gate)
    outcomes = ["succeeded", "failed", "cancelled"] * 6
    answers = await asyncio.gather(
        *(settle(gate, operation_id, {"outcome": each, "reason": each}) for each in outcomes)
    )
    won = [answer.json() for answer in answers if answer.status_code == 200]
    assert len(won) == 1
    lost = [answer.json() for answer in answers if answer.status_code != 200]
    assert {answer["reason"] for answer in lost} == {"OPERATION_ENDED"}
    assert (await gate.get(f"/v1/operations/{operation_id}")).json() == won[0]


async def test_it_takes_a_person(tmp_path: Path) -> None:
    """Known by the token: a client that speaks for itself has its own id as subject."""
    async with gateway(tmp_path / "data") as gate:
        operation_id = await unknown(gate)
        program = gate.auth(subject="console")
        answer = await settle(gate, operation_id, FAILED, **program)
        assert (answer.status_code, answer.json()["reason"]) == (403, "PERSON_NEEDED")
        # Before anything is looked up or parsed.
        path = f"/v1/operations/{NOBODY}/settle"
        answer = await gate.http.post(path, content=b"{", headers=program)
        assert answer.json()["reason"] == "PERSON_NEEDED"
    async with gateway(tmp_path / "data", registered=False, clients_may_settle=True) as gate:
        program = gate.auth(subject="console")
        assert (await settle(gate, operation_id, FAILED, **program)).status_code == 200


async def test_it_takes_the_scope_of_the_kind_as_well(gate: Gateway) -> None:
    operation_id = await unknown(gate)
    for scopes in ((Scope.SETTLE,), (Scope.SETTLE, Scope.CANCEL, Scope.PAUSE)):
        answer = await settle(gate, operation_id, FAILED, **gate.auth(*scopes))
        assert answer.status_code == 403
        assert 'scope="admin:cache admin:settle"' in answer.headers["www-authenticate"]
    both = gate.auth(Scope.SETTLE, Scope.CACHE)
    assert (await settle(gate, operation_id, FAILED, **both)).status_code == 200


async def test_who_stated_what_and_why_stands_in_the_audit(gate: Gateway) -> None:
    operation_id = await unknown(gate)
    await settle(gate, operation_id, FAILED, **gate.auth(subject="console"))
    await settle(gate, operation_id, {**FAILED, "extra": 1})
    await settle(gate, operation_id, FAILED)
    await settle(gate, operation_id, {**FAILED, "outcome": "succeeded"})
    answer = await gate.get("/v1/audit")
    rows = [r for r in reversed(answer.json()["items"]) if r["action"] in ACTIONS]
    told = [(row["action"], row["outcome"], row["reason"], row["note"]) for row in rows]
    assert told == [
        ("flush_caches", "accepted", None, None),
        ("settle", "denied", "PERSON_NEEDED", None),
        ("settle", "refused", "SCHEMA_VIOLATION", None),
        ("settle", "accepted", None, FAILED["reason"]),
        ("flush_caches", "failed", "SETTLED", None),
        ("settle", "refused", "OPERATION_ENDED", FAILED["reason"]),
    ]
    who = [row["principal"]["subject"] for row in rows[1:]]
    assert who == ["console", "ada", "ada", "grace", "ada"]
    # Who is no person is turned away before it is looked up what they speak of.
    assert [row["operation"] for row in rows[1:]] == [None, *[operation_id] * 4]
    assert rows[3]["detail"] == {"outcome": "failed", "message": ""}
    assert rows[4]["detail"] == {"verification": "settled"}


async def test_what_is_overdue_is_a_figure_to_be_woken_by(gate: Gateway) -> None:
    for more, overdue in ((), 0), ((LATE,), 1):
        operation_id = await unknown(gate, *more)
        figures = (await gate.get("/metrics")).text.splitlines()
        assert f"chadburn_operations_overdue {overdue}.0" in figures
        assert any(line.endswith('state="reconciling"} 1.0') for line in figures)
        assert (await settle(gate, operation_id, FAILED)).status_code == 200
    assert "chadburn_operations_overdue 0.0" in (await gate.get("/metrics")).text
