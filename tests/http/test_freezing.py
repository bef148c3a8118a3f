"""Freeze windows over HTTP: who sets them, what they keep out, and what goes on."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest

from app.domain.scopes import Scope
from tests.http.gateway import Gateway

pytestmark = pytest.mark.anyio

PATH = "/v1/engines/e1/freeze"
PREFIX = {"caches": ["prefix"]}


def ahead(**by: float) -> str:
    return (datetime.now(UTC) + timedelta(**by)).isoformat()


async def put(gate: Gateway, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return await gate.http.put(PATH, json=body, headers={**gate.auth(), **headers})


async def frozen(gate: Gateway) -> dict[str, Any]:
    answer = await put(gate, {"reason": "holidays", "until": ahead(hours=1)})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["frozen"]
    return found


async def test_a_frozen_engine_takes_no_orders(gate: Gateway) -> None:
    gate.engine.go.clear()
    running = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    async with asyncio.timeout(20):
        while not gate.engine.calls["Pause"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    window = await frozen(gate)
    assert (await gate.get("/v1/engines/e1")).json()["frozen"] == window
    (listed,) = (await gate.get("/v1/engines")).json()["items"]
    assert listed["frozen"] == window
    for verb, body in (
        ("flush-caches", PREFIX),
        ("abort-requests", {"all": True}),
        ("flush-caches", {**PREFIX, "dry_run": True}),
    ):
        answer = await gate.order(verb, body)
        assert (answer.status_code, answer.json()["reason"]) == (409, "ENGINE_FROZEN")
        assert answer.json()["code"] == "FAILED_PRECONDITION"
        assert answer.json()["detail"].endswith(": holidays")
        assert window["until"].rstrip("Z") in answer.json()["detail"]
        assert 3500 < int(answer.headers["retry-after"]) <= 3601
    # What runs goes on, can be read, and cancelled.
    assert (await gate.get("/v1/engines/e1/load")).status_code == 200
    path = f"/v1/operations/{running}"
    cancelled = await gate.http.post(f"{path}/cancel", headers=gate.auth())
    assert cancelled.status_code == 202
    assert (await gate.get(path, Prefer="wait=20")).json()["state"] == "cancelled"

    gate.engine.go.set()
    thawed = await gate.http.delete(f"{PATH}?reason=done", headers=gate.auth())
    assert (thawed.status_code, thawed.content) == (204, b"")
    assert (await gate.get("/v1/engines/e1")).json()["frozen"] is None
    await gate.flush()
    assert (await gate.http.delete(PATH, headers=gate.auth())).status_code == 204


async def test_a_key_that_was_used_before_the_freeze_still_gives_its_operation(
    gate: Gateway,
) -> None:
    key = {"Idempotency-Key": "mine", "Prefer": "wait=20"}
    first = await gate.order("flush-caches", PREFIX, key)
    await frozen(gate)
    again = await gate.order("flush-caches", PREFIX, key)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


async def test_overriding_takes_the_scope_that_freezing_takes(gate: Gateway) -> None:
    await frozen(gate)
    body = {**PREFIX, "override_freeze": True}
    answer = await gate.order("flush-caches", body, gate.auth(Scope.CACHE))
    assert answer.status_code == 403
    assert 'scope="admin:cache admin:engines"' in answer.headers["www-authenticate"]
    both = {**gate.auth(Scope.CACHE, Scope.ENGINES), "Prefer": "wait=20"}
    answer = await gate.order("flush-caches", body, both)
    assert (answer.status_code, answer.json()["state"]) == (200, "succeeded")
    planned = await gate.order("flush-caches", {**body, "dry_run": True}, both)
    assert planned.json()["would"] == "accept"
    rows = (await gate.get("/v1/audit?action=flush_caches")).json()["items"]
    told = [(row["outcome"], row["reason"], row["detail"]) for row in reversed(rows)]
    assert told == [
        ("denied", "INSUFFICIENT_SCOPE", {}),
        ("accepted", None, {"override_freeze": True}),
        ("succeeded", None, {}),
    ]
    gate_thawed = await gate.http.delete(PATH, headers=gate.auth())
    assert gate_thawed.status_code == 204
    # Not frozen: it says so all the same, and needs the scope all the same.
    answer = await gate.order("flush-caches", body, gate.auth(Scope.CACHE))
    assert answer.status_code == 403


async def test_another_freeze_takes_the_place_of_the_one_before(gate: Gateway) -> None:
    first = await frozen(gate)
    until = ahead(minutes=5)
    body = {"reason": "audit", "until": until}
    second = (await put(gate, body, **gate.auth(subject="grace"))).json()["frozen"]
    assert (second["reason"], second["by"]["subject"]) == ("audit", "grace")
    assert datetime.fromisoformat(second["until"]) == datetime.fromisoformat(until)
    assert second["since"] > first["since"]
    rows = (await gate.get("/v1/audit?engine=e1&action=freeze_engine")).json()["items"]
    assert [(row["outcome"], row["note"], row["principal"]["subject"]) for row in rows] == [
        ("accepted", "audit", "grace"),
        ("accepted", "holidays", "ada"),
    ]
    assert rows[0]["detail"] == {"until": second["until"]}


async def test_a_freeze_is_over_by_itself(gate: Gateway) -> None:
    await put(gate, {"reason": "for a moment", "until": ahead(seconds=0.3)})
    async with asyncio.timeout(20):
        while (await gate.get("/v1/engines/e1")).json()["frozen"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await gate.flush()


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"until": "2999-01-01T00:00:00Z"}, "/reason"),
        ({"reason": "x"}, "/until"),
        ({"reason": " ", "until": "2999-01-01T00:00:00Z"}, "/reason"),
        ({"reason": "x", "until": "2020-01-01T00:00:00Z"}, "/until"),
        ({"reason": "x", "until": "2999-01-01T00:00:00Z"}, "/until"),
        ({"reason": "x", "until": "0001-01-01T00:00:00+23:59"}, "/until"),
        ({"reason": "x", "until": "2999-01-01"}, "/until"),
        ({"reason": "x", "until": "2999-01-01T00:00:00"}, "/until"),
        ({"reason": "x", "until": "4102444800"}, "/until"),
        ({"reason": "x", "until": 4102444800}, "/until"),
        ({"reason": "x", "until": None}, "/until"),
        ({"reason": "x", "until": "2999-01-01T00:00:00Z", "for": "ever"}, ""),
    ],
)
async def test_what_a_freeze_has_to_say(gate: Gateway, body: dict[str, Any], pointer: str) -> None:
    answer = await put(gate, body)
    assert answer.status_code == 422
    assert [place["pointer"] for place in answer.json()["errors"]] == [pointer]
    assert (await gate.get("/v1/engines/e1")).json()["frozen"] is None
    (row,) = (await gate.get("/v1/audit?action=freeze_engine")).json()["items"]
    assert row["outcome"] == "refused"


async def test_a_stranger_to_the_register_freezes_nothing(gate: Gateway) -> None:
    window = {"reason": "x", "until": ahead(hours=1)}
    assert (await put(gate, window, **gate.auth(Scope.PAUSE))).status_code == 403
    none = await gate.http.put("/v1/engines/none/freeze", json=window, headers=gate.auth())
    assert (none.status_code, none.json()["reason"]) == (404, "ENGINE_NOT_FOUND")
