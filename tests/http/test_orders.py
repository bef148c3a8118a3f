"""Orders over HTTP, as a caller sees them."""

from __future__ import annotations

import pytest

from tests.http.gateway import Gateway

pytestmark = pytest.mark.anyio


async def test_an_order_is_taken_on_at_once_and_told_where_to_follow_it(gate: Gateway) -> None:
    gate.engine.go.clear()
    answer = await gate.order("pause", {"mode": "drain"})
    operation = answer.json()
    path = f"/v1/operations/{operation['id']}"
    assert answer.status_code == 202
    assert answer.headers["location"] == path
    assert answer.headers["link"] == f'<{path}/events>; rel="monitor"; type="text/event-stream"'
    assert answer.headers["vary"] == "Prefer"
    assert operation["kind"] == "pause"
    assert operation["done"] is False
    gate.engine.go.set()
    ended = (await gate.get(path, Prefer="wait=20")).json()
    assert ended["state"] == "succeeded"
    assert ended["result"]["pause_epoch"] == 1
