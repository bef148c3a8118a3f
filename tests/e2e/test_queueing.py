"""Orders that wait behind a drain, while the gateway is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.driving import admin, sequences
from tests.e2e.processes import chadburn
from tests.e2e.stack import register, stack

pytestmark = pytest.mark.anyio


async def test_a_line_outlives_its_gateway(tmp_path: Path) -> None:
    with stack(tmp_path) as standing:
        bridge = standing.bridge
        async with bridge.gateway.client:
            await register(bridge)
            running = await bridge.talk("the bridge rings", max_tokens=400).begun()
            drain = await bridge.accepted("pause", {"mode": "drain"})
            path = f"/v1/operations/{drain['id']}"
            await bridge.gateway.until(path, lambda found: found["state"] == "running")
            told = chadburn(
                "flush", bridge.engine, "--queue", "--json",
                CHADBURN_URL=bridge.gateway.url, CHADBURN_TOKEN=bridge.gateway.token,
            )  # fmt: skip
            assert told.returncode == 0, told.stderr
            assert '"queue_position": 1' in told.stdout
            for body in ({"caches": ["prefix"]}, {"caches": ["prefix"]}):
                await bridge.accepted("flush-caches", {**body, "when_busy": "queue"})
            listed = await bridge.gateway.get("/v1/operations?state=queued")
            waiting = [item["id"] for item in reversed(listed["items"])]
            assert [item["queue_position"] for item in listed["items"]] == [3, 2, 1]
            assert not running.is_over

            standing.gateway.kill()
            standing.start_gateway()
            for operation in (drain["id"], *waiting):
                ended = await bridge.gateway.ended(operation)
                assert ended["state"] == "succeeded", ended
                events = await bridge.gateway.events(operation)
                assert sequences(events) == list(range(1, len(events) + 1))
            await running.over()

            # The engine's own word: by its clock, in the order of the ledger, and each once.
            address, token = bridge.ready["admin_address"], bridge.ready["tokens"]["engine"]
            async with admin(address, token) as engine:
                known = [await engine.operation(each) for each in (drain["id"], *waiting)]
            times = [each.created_unix_nanos for each in known]
            assert times == sorted(times)
            assert len({each.operation_id for each in known}) == 4
