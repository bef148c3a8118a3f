"""Processes that are killed in the middle of an order: nothing is lost and nothing is invented."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest

from app.inference_client import FinishReason
from tests.e2e.conftest import Bridge
from tests.e2e.driving import Heard, admin, sequences, server_sent
from tests.e2e.processes import chadburn
from tests.e2e.stack import Stack, register, stack

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack")) as found:
        yield found


@pytest.fixture
async def bridge(standing: Stack) -> AsyncIterator[Bridge]:
    """All three up, and the engine open."""
    bridge = standing.bridge
    async with bridge.gateway.client:
        known = await bridge.gateway.client.get(f"/v1/engines/{bridge.engine}")
        if known.status_code == 404:
            await register(bridge)
        else:
            await bridge.gateway.open_again(bridge.engine)
        yield bridge


async def heard_until(bridge: Bridge, operation_id: str, kind: str) -> list[Heard]:
    """A stream's events up to the first of a kind; the connection is then left."""
    heard: list[Heard] = []
    async with bridge.gateway.stream(f"/v1/operations/{operation_id}/events") as response:
        async for event in server_sent(response.aiter_lines()):
            heard.append(event)
            if event.type == kind:
                break
    return heard


async def test_a_gateway_killed_in_a_drain_tells_the_truth_afterwards(
    standing: Stack, bridge: Bridge
) -> None:
    running = await bridge.talk("the bridge rings", max_tokens=400).begun()
    operation = await bridge.accepted("pause", {"mode": "drain"}, key="killed-gateway")
    before = await heard_until(bridge, operation["id"], "progress")
    assert not running.is_over
    standing.gateway.kill()
    with contextlib.suppress(httpx2.TransportError):
        await bridge.gateway.client.get("/healthz")
        raise AssertionError("it still answers")
    standing.start_gateway()

    after = await bridge.gateway.hear(operation["id"], after=before[-1].id)
    ended = await bridge.gateway.ended(operation["id"])
    assert ended["state"] == "succeeded"
    assert ended["result"]["requests_finished"] == 1
    await running.over()
    assert running.finished is not None
    assert running.finished.reason is FinishReason.LENGTH

    # Over both connections: every event of the ledger, once, in order.
    ledger = await bridge.gateway.events(operation["id"])
    assert sequences(ledger) == list(range(1, len(ledger) + 1))
    told = [event.data for event in (*before, *after) if event.id is not None]
    assert told == ledger
    assert [event["type"] for event in ledger].count("completed") == 1
    assert await bridge.gateway.hear(operation["id"], after=after[-1].id) == []

    # And one order at the engine, which the key still stands for.
    again = await bridge.order("pause", {"mode": "drain"}, key="killed-gateway")
    assert again.json()["id"] == operation["id"]
    async with admin(bridge.ready["admin_address"], bridge.ready["tokens"]["engine"]) as engine:
        known = await engine.operation(operation["id"])
        assert known.completed.revision == ended["revision"]


async def test_an_engine_killed_in_a_drain_leaves_a_failure_of_unknown_effect(
    standing: Stack, bridge: Bridge
) -> None:
    running = await bridge.talk("the bridge rings", max_tokens=2000).begun()
    operation = await bridge.accepted("pause", {"mode": "drain"})
    await heard_until(bridge, operation["id"], "progress")
    standing.engine.kill()
    await running.over()
    assert running.error is not None

    path = f"/v1/operations/{operation['id']}"
    await bridge.gateway.until(path, lambda found: found["state"] == "reconciling")
    busy = await bridge.order("pause", {"mode": "drain"})
    assert busy.status_code in {409, 503}  # the slot is held while nobody knows
    standing.start_engine()

    ended = await bridge.gateway.ended(operation["id"])
    assert ended["state"] == "failed"
    assert ended["error"]["reason"] == "ENGINE_RESTARTED"
    assert ended["error"]["effect"] == "unknown"
    ledger = await bridge.gateway.events(operation["id"])
    assert sequences(ledger) == list(range(1, len(ledger) + 1))
    assert [e["type"] for e in ledger][-1] == "failed"

    # The engine serves again, as the gateway can see.
    await bridge.gateway.open_again(bridge.engine)
    said = await bridge.talk("full ahead", max_tokens=3).over()
    assert said.finished is not None


async def test_both_killed_at_once(standing: Stack, bridge: Bridge) -> None:
    await bridge.talk("the bridge rings", max_tokens=2000).begun()
    operation = await bridge.accepted("pause", {"mode": "drain"})
    await heard_until(bridge, operation["id"], "progress")
    standing.gateway.kill()
    standing.engine.kill()
    standing.start_engine()
    standing.start_gateway()
    ended = await bridge.gateway.ended(operation["id"])
    assert (ended["state"], ended["error"]["reason"]) == ("failed", "ENGINE_RESTARTED")
    ledger = await bridge.gateway.events(operation["id"])
    assert sequences(ledger) == list(range(1, len(ledger) + 1))


async def test_a_gateway_that_is_asked_to_end_says_goodbye_and_goes_on_later(
    standing: Stack, bridge: Bridge
) -> None:
    running = await bridge.talk("the bridge rings", max_tokens=300).begun()
    operation = await bridge.accepted("pause", {"mode": "drain"})
    heard: list[Heard] = []
    async with bridge.gateway.stream(f"/v1/operations/{operation['id']}/events") as response:
        async for event in server_sent(response.aiter_lines()):
            heard.append(event)
            if event.type == "progress" and standing.gateway.running:
                assert standing.gateway.stop() == 0
    assert heard[-1].type == "goodbye"
    before = [event for event in heard if event.type != "goodbye"]
    standing.start_gateway()
    after = await bridge.gateway.hear(operation["id"], after=before[-1].id)
    told = [event.data for event in (*before, *after)]
    assert told == await bridge.gateway.events(operation["id"])
    assert told[-1]["type"] == "completed"
    assert (await running.over()).finished is not None


async def test_a_second_gateway_does_not_get_the_same_ledger(
    standing: Stack, bridge: Bridge
) -> None:
    second = chadburn(
        "serve", f"--config={standing.folder / 'gateway.toml'}", "--port=0", cwd=standing.folder
    )
    assert second.returncode != 0
    lines = [line for line in second.stderr.splitlines() if line.startswith("chadburn: ")]
    assert len(lines) == 1
    assert "Traceback" not in second.stderr
    assert (await bridge.gateway.client.get("/readyz")).status_code == 200
