"""Orders that wait, over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.http.gateway import Gateway, gateway

pytestmark = pytest.mark.anyio

QUEUED = {"caches": ["prefix"], "when_busy": "queue"}
WAIT = {"Prefer": "wait=20"}


async def test_an_order_waits_in_its_place_and_is_sent_in_its_turn(gate: Gateway) -> None:
    gate.engine.go.clear()
    drain = (await gate.order("pause", {"mode": "drain"})).json()
    answers = [await gate.order("flush-caches", QUEUED) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    first, second = (answer.json() for answer in answers)
    assert (first["state"], first["queue_position"]) == ("queued", 1)
    assert (second["state"], second["queue_position"]) == ("queued", 2)
    listed = (await gate.get("/v1/operations?state=queued")).json()["items"]
    assert [item["queue_position"] for item in listed] == [2, 1]
    assert (await gate.get("/v1/engines/e1")).json()["running_operation"] == drain["id"]
    gate.engine.go.set()
    ended = (await gate.get(f"/v1/operations/{second['id']}", **WAIT)).json()
    assert (ended["state"], ended["queue_position"]) == ("succeeded", None)
    assert gate.engine.keys == [drain["id"], first["id"], second["id"]]


async def test_who_does_not_wait_is_refused_and_named_what_is_in_the_way(gate: Gateway) -> None:
    gate.engine.go.clear()
    running = (await gate.order("flush-caches", {"caches": ["prefix"]})).json()
    await gate.order("flush-caches", QUEUED)
    refused = await gate.order("flush-caches", {"caches": ["prefix"]})
    assert (refused.status_code, refused.json()["reason"]) == (409, "ENGINE_BUSY")
    assert refused.json()["operation"] == running["id"]


async def test_a_dry_run_tells_the_place_it_would_get(gate: Gateway) -> None:
    gate.engine.go.clear()
    await gate.order("flush-caches", QUEUED)
    plan = (await gate.order("flush-caches", {**QUEUED, "dry_run": True})).json()
    assert (plan["would"], plan["queue_position"]) == ("queue", 1)


async def test_a_key_gives_what_waits(gate: Gateway) -> None:
    gate.engine.go.clear()
    await gate.order("flush-caches", QUEUED)
    key = {"Idempotency-Key": "waits"}
    first = await gate.order("flush-caches", QUEUED, key)
    again = await gate.order("flush-caches", QUEUED, key)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == first.json()


async def test_what_waits_is_cancelled_at_once(gate: Gateway) -> None:
    gate.engine.go.clear()
    await gate.order("flush-caches", QUEUED)
    waiting = (await gate.order("flush-caches", QUEUED)).json()
    path = f"/v1/operations/{waiting['id']}"
    cancelled = await gate.http.post(f"{path}/cancel", json={}, headers=gate.auth())
    assert (cancelled.json()["state"], cancelled.json()["queue_position"]) == ("cancelled", None)
    assert gate.engine.orders == 1


async def test_a_line_that_is_full_says_when_to_come_back(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", max_queued_orders=1) as gate:
        gate.engine.go.clear()
        running = (await gate.order("flush-caches", QUEUED)).json()
        await gate.order("flush-caches", QUEUED)
        for more in ({}, {"dry_run": True}):
            full = await gate.order("flush-caches", {**QUEUED, **more})
            assert (full.status_code, full.json()["reason"]) == (429, "QUEUE_FULL")
            assert full.json()["operation"] == running["id"]
            assert full.json()["retryable"] is True
            assert int(full.headers["retry-after"]) > 0
