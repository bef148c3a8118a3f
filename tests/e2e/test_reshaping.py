"""Another shape, and a lost rank, as the operator sees them through the gateway."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.e2e.conftest import Bridge
from tests.e2e.processes import Demo, chadburn
from tests.reference_engine.ranks import children, ranks

pytestmark = pytest.mark.anyio

FIRST = {"tensor_parallel_size": 2, "max_running_requests": 16, "max_batched_tokens": 512}


def ranks_of(demo: Demo) -> list[int]:
    """The processes of the demo's engine that are ranks."""
    return [one for child in children(demo.process.pid) for one in ranks(child)]


async def shape(bridge: Bridge) -> dict[str, int]:
    info = (await bridge.gateway.get(f"/v1/engines/{bridge.engine}/info"))["info"]
    found = {**info["parallelism"], **info["capacity"]}
    return {name: found[name] for name in FIRST}


async def said(bridge: Bridge) -> str:
    talk = await bridge.talk("slow astern, stop engines", max_tokens=12, seed=5).over()
    assert talk.finished is not None
    return talk.text


async def test_an_engine_in_another_shape_and_back(demo: Demo, bridge: Bridge) -> None:
    before, text = await shape(bridge), await said(bridge)
    assert before == FIRST
    revision = (await bridge.gateway.get(f"/v1/engines/{bridge.engine}"))["revision"]
    ordered = chadburn(
        *("reconfigure", bridge.engine, "--drain", "wait", "--wait", "--json"),
        *("--tensor-parallel-size", "1", "--max-running-requests", "4"),
        cwd=demo.folder,
        CHADBURN_DEMO__DIR="data",
    )
    assert ordered.returncode == 0, ordered.stderr
    operation = json.loads(ordered.stdout)
    small = {"tensor_parallel_size": 1, "max_running_requests": 4, "max_batched_tokens": 512}
    assert {name: operation["result"][name] for name in small} == small
    assert operation["verification"] == "verified"
    assert operation["revision"] > revision
    assert await shape(bridge) == small
    assert len(ranks_of(demo)) == 1
    assert await said(bridge) == text

    body: dict[str, Any] = {**FIRST, "drain": "refuse"}
    back = await bridge.does("reconfigure", body)
    assert back["result"]["changed"]
    assert await shape(bridge) == FIRST
    assert await said(bridge) == text
    assert not (await bridge.does("reconfigure", body))["result"]["changed"]
    impossible = await bridge.accepted("reconfigure", {"tensor_parallel_size": 3, "drain": "wait"})
    error = (await bridge.gateway.ended(impossible["id"]))["error"]
    assert (error["reason"], error["code"]) == ("SHAPE_NOT_POSSIBLE", "INVALID_ARGUMENT")


async def test_a_lost_rank_shows_and_comes_back(demo: Demo, bridge: Bridge) -> None:
    text = await said(bridge)
    engine = f"/v1/engines/{bridge.engine}"
    before = await bridge.gateway.get(engine)

    def lost(found: dict[str, Any]) -> bool:
        """They are back before anybody has looked; after each loss in a row it takes longer."""
        shows: bool = found["health"]["state"] != "serving"
        if not shows and len(there := ranks_of(demo)) > 1:
            os.kill(there[1], signal.SIGKILL)
        return shows

    seen = await bridge.gateway.until(engine, lost)
    assert seen["facts"]["weights"]["state"] == "unknown"
    assert seen["revision"] > before["revision"]
    after = await bridge.gateway.until(engine, lambda e: e["health"]["state"] == "serving")
    assert after["facts"]["weights"] == before["facts"]["weights"]
    assert after["facts"]["instance_id"] == before["facts"]["instance_id"]
    assert await said(bridge) == text
