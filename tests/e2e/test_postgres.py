"""The main path once more, with the ledger on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.inference_client import FinishReason
from tests.e2e.driving import sequences
from tests.e2e.stack import register, stack

pytestmark = pytest.mark.anyio


async def test_an_order_and_a_killed_gateway(tmp_path: Path, postgres_url: str) -> None:
    with stack(tmp_path, postgres_url) as standing:
        bridge = standing.bridge
        async with bridge.gateway.client:
            await register(bridge)
            running = await bridge.talk("the bridge rings", max_tokens=200).begun()
            operation = await bridge.accepted("pause", {"mode": "drain"}, key="once")
            standing.gateway.kill()
            standing.start_gateway()

            ended = await bridge.gateway.ended(operation["id"])
            assert ended["state"] == "succeeded"
            await running.over()
            assert running.finished is not None
            assert running.finished.reason is FinishReason.LENGTH
            again = await bridge.order("pause", {"mode": "drain"}, key="once")
            assert again.json()["id"] == operation["id"]

            heard = await bridge.gateway.hear(operation["id"])
            told = [event.data for event in heard if event.id is not None]
            assert told == await bridge.gateway.events(operation["id"])
            assert sequences(told) == list(range(1, len(told) + 1))

            held = bridge.talk("full ahead", max_tokens=5)
            epoch = ended["result"]["pause_epoch"]
            await bridge.does("resume", {"pause_epoch": epoch})
            assert (await held.over()).finished is not None
