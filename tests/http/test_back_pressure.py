"""Nothing waits for ever and nothing grows without end; health and reads go on."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx2
import pytest

from app.http.middleware.doors import Doors
from tests.http.gateway import ENGINE_ID, Gateway, gateway

pytestmark = pytest.mark.anyio

PAUSE = {"mode": "drain"}
EVERYBODY = {"request_ids": ["nobody"]}


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110 - what is waited for has no event here
            await asyncio.sleep(0.02)


def refused(answer: httpx2.Response, status: int, reason: str) -> None:
    assert (answer.status_code, answer.json()["reason"]) == (status, reason), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["retryable"]


async def is_up(gate: Gateway) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await gate.http.get(path)).status_code == 200


@asynccontextmanager
async def half_sent(gate: Gateway, sent: int = 100, announced: int = 200) -> AsyncIterator[None]:
    """An order whose body does not end, for the time of the block."""
    host, port = gate.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/engines/{ENGINE_ID}/pause HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: {gate.auth()['Authorization']}\r\nIdempotency-Key: half\r\n"
        f"Content-Type: application/json\r\nContent-Length: {announced}\r\n\r\n"
    )
    writer.write(head.encode() + b" " * sent)
    await writer.drain()
    try:
        yield
    finally:
        writer.close()


async def test_orders_that_pile_up_leave_room_for_reads(tmp_path: Path) -> None:
    narrow = gateway(tmp_path / "data", max_concurrent_requests=3, max_concurrent_changes=1)
    async with narrow as gate:
        async with half_sent(gate):
            await until(lambda: doors_of(gate)._changing == 1)
            refused(await gate.order("pause", PAUSE), 503, "OVERLOADED")
            assert (await gate.get("/v1/engines")).status_code == 200
            await is_up(gate)
        await until(lambda: doors_of(gate)._changing == 0)
        assert (await gate.order("pause", PAUSE)).status_code == 202


async def test_probes_get_in_when_every_place_is_taken(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", max_concurrent_requests=1) as gate, half_sent(gate):
        await until(lambda: doors_of(gate)._under_way == 1)
        refused(await gate.get("/v1/engines"), 503, "OVERLOADED")
        await is_up(gate)


async def test_all_bodies_together_have_a_limit(tmp_path: Path) -> None:
    narrow = gateway(
        tmp_path / "data", max_body_bytes=4096, max_update_bytes=4096, max_bodies_bytes=4096
    )
    async with narrow as gate:
        async with half_sent(gate, 3000, 4000):
            await until(lambda: doors_of(gate)._held_bytes == 3000)
            assert (await gate.order("pause", {**PAUSE, "dry_run": True})).status_code == 200
            many = {"request_ids": [f"{number:08}" for number in range(200)]}
            refused(await gate.order("abort-requests", many), 503, "OVERLOADED")
            await is_up(gate)
        await until(lambda: doors_of(gate)._held_bytes == 0)
        assert (await gate.order("abort-requests", many)).status_code == 202


async def test_who_waits_keeps_nobody_out_and_has_a_limit_too(tmp_path: Path) -> None:
    narrow = gateway(tmp_path / "data", max_concurrent_requests=1, max_waiting=1)
    async with narrow as gate:
        gate.engine.go.clear()
        waiting = asyncio.create_task(gate.order("pause", PAUSE, {"Prefer": "wait=25"}))
        await until(lambda: gate.rooms.waiting.count == 1)
        # The one place is free again; and no second caller waits.
        (running,) = (await gate.get("/v1/operations")).json()["items"]
        at_once = await gate.get(f"/v1/operations/{running['id']}", Prefer="wait=25")
        assert (at_once.status_code, at_once.json()["done"]) == (200, False)
        assert "preference-applied" not in at_once.headers
        gate.engine.go.set()
        answer = await waiting
        assert (answer.status_code, answer.json()["state"]) == (200, "succeeded")
        assert answer.headers["preference-applied"] == "wait=25"
        assert gate.rooms.waiting.count == 0


async def test_an_engine_that_does_not_answer_keeps_its_own_callers_alone(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", max_reads_per_engine=2) as gate:
        gate.engine.answers.clear()
        path = f"/v1/engines/{ENGINE_ID}/capabilities"
        calls = gate.engine.calls["GetAdminProfile"]
        asking = [asyncio.create_task(gate.get(path)) for _ in range(2)]
        await until(lambda: gate.engine.calls["GetAdminProfile"] >= calls + 2)
        refused(await gate.get(path), 429, "TOO_MANY_ENGINE_READS")
        refused(await gate.get(path.replace("capabilities", "load")), 429, "TOO_MANY_ENGINE_READS")
        assert (await gate.get(f"/v1/engines/{ENGINE_ID}")).status_code == 200
        gate.engine.answers.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200, 200]
        assert (await gate.get(path)).status_code == 200


async def test_open_operations_of_one_engine_have_a_limit(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data", max_open_operations=1) as gate:
        gate.engine.go.clear()
        key = gate.key()
        running = await gate.order("pause", PAUSE, key)
        refused(await gate.order("abort-requests", EVERYBODY), 429, "TOO_MANY_OPEN_OPERATIONS")
        again = await gate.order("pause", PAUSE, key)
        assert again.json()["id"] == running.json()["id"]
        gate.engine.go.set()
        await gate.get(f"/v1/operations/{running.json()['id']}", Prefer="wait=20")
        assert (await gate.order("abort-requests", EVERYBODY)).status_code == 202


async def test_a_ledger_that_takes_no_writes_refuses_them_in_time_and_goes_on_reading(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path / "data", database_wait_s=0.3) as gate:
        key = gate.key()
        # SQLite has room for one writer, and this one takes its time.
        with closing(sqlite3.connect(tmp_path / "data" / "chadburn.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            first = asyncio.create_task(gate.order("pause", PAUSE, key))
            busy = await gate.order("abort-requests", EVERYBODY)
            while busy.status_code == 202 or busy.json()["reason"] != "LEDGER_BUSY":
                busy = await gate.order("abort-requests", EVERYBODY)
            refused(busy, 503, "LEDGER_BUSY")
            assert (await gate.get("/v1/operations")).json()["items"] == []
            assert (await gate.get("/v1/engines")).status_code == 200
            await is_up(gate)
            other.rollback()
        await first
        again = await gate.order("pause", PAUSE, {**key, "Prefer": "wait=20"})
        while again.status_code == 503:  # what waited for the writer comes first
            refused(again, 503, "LEDGER_BUSY")
            again = await gate.order("pause", PAUSE, {**key, "Prefer": "wait=20"})
        assert (again.status_code, again.json()["state"]) == (200, "succeeded"), again.json()


async def test_an_answer_has_a_limit_of_time_and_the_order_is_not_lost(
    gate: Gateway, tmp_path: Path
) -> None:
    object.__setattr__(gate.rooms.edge, "request_timeout_s", 0.3)
    path = tmp_path / "data" / "chadburn.db"
    key = gate.key()
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        late = await gate.order("pause", PAUSE, key)
        assert (late.status_code, late.json()["reason"]) == (504, "ANSWER_TIMED_OUT")
        assert not late.json()["retryable"]
        other.rollback()
    object.__setattr__(gate.rooms.edge, "request_timeout_s", 60.0)

    async def known() -> bool:
        return bool((await gate.get("/v1/operations")).json()["items"])

    async with asyncio.timeout(30):
        while not await known():
            pass
    again = await gate.order("pause", PAUSE, key)
    assert again.headers["idempotency-replayed"] == "true"


def doors_of(gate: Gateway) -> Doors:
    """The layer that counts requests, as it stands in the running application."""
    layer = gate.app.middleware_stack
    while not isinstance(layer, Doors):
        layer = getattr(layer, "app", None) or layer._app  # type: ignore[union-attr]
    return layer
