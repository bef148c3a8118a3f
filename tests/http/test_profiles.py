"""Profiles over HTTP and real gRPC, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from app.enginekit.runtime import RuntimeFault
from tests.doubles.engine import Fault
from tests.enginekit.full_engine import checksum
from tests.http.full import Full

pytestmark = pytest.mark.anyio

STEPS = {"profiler": "torch", "steps": 5, "record_shapes": True}


async def test_it_ends_when_the_files_exist_and_names_them(full: Full) -> None:
    accepted = (await full.order("profiles", STEPS)).json()
    path = f"/v1/operations/{accepted['id']}"
    while (await full.gate.get(path)).json()["progress"] != {
        "phase": "recording",
        "done": 0,
        "total": 0,
        "unit": "",
    }:
        pass
    running = await full.does("flush-caches", {"caches": ["prefix"]})  # it is not exclusive
    assert running["state"] == "succeeded"
    facts = await full.facts()
    assert (facts["profile"]["kind"], facts["profile"]["state"]) == ("torch", "running")
    other = await full.order("profiles", {**STEPS, "profiler": "memory"})
    assert (other.status_code, other.json()["reason"]) == (409, "PROFILE_RUNNING")
    full.engine.steps_done.set()
    ended = (await full.gate.get(path, Prefer="wait=20")).json()
    assert (ended["kind"], ended["state"]) == ("profile", "succeeded")
    result = ended["result"]
    assert (result["kind"], result["profile_id"]) == ("torch", facts["profile"]["id"])
    assert [(one["rank"], one["size_bytes"], one["sha256"]) for one in result["artifacts"]] == [
        (rank, 9, checksum(rank, "trace").hex()) for rank in (0, 1)
    ]


async def test_the_same_profile_is_not_recorded_twice(full: Full) -> None:
    first = (await full.order("profiles", STEPS)).json()
    while not full.engine.recorded:
        await full.facts()
    second = await full.does("profiles", STEPS)
    assert (second["state"], second["result"]["changed"]) == ("succeeded", False)
    full.engine.steps_done.set()
    ended = await full.gate.get(f"/v1/operations/{first['id']}", Prefer="wait=20")
    assert ended.json()["result"]["profile_id"] == second["result"]["profile_id"]
    assert full.engine.recorded == ["started torch", "finished"]


@pytest.mark.parametrize("how", [Fault.LOSE_REPLY, Fault.REFUSE_CONNECTION])
async def test_a_lost_reply_does_not_record_twice(full: Full, how: Fault) -> None:
    full.engine.steps_done.set()
    full.double.fail_next("StartProfile", how)
    ended = await full.does("profiles", STEPS)
    assert (ended["state"], len(ended["result"]["artifacts"])) == ("succeeded", 2)
    assert full.engine.recorded == ["started torch", "finished"]


async def test_cancelling_drops_it(full: Full) -> None:
    accepted = (await full.order("profiles", STEPS)).json()
    while not full.engine.recorded:
        await full.facts()
    path = f"/v1/operations/{accepted['id']}"
    await full.gate.http.post(f"{path}/cancel", headers=full.gate.auth())
    ended = (await full.gate.get(path, Prefer="wait=20")).json()
    assert ended["state"] == "cancelled"
    assert (await full.facts())["profile"] is None


async def test_a_profiler_that_fails_is_told(full: Full) -> None:
    async def broken() -> None:
        raise RuntimeFault("NO_SPACE", "the disk is full")

    full.engine.profiling["start"] = broken
    failed = await full.does("profiles", STEPS)
    assert (failed["state"], failed["error"]["reason"]) == ("failed", "NO_SPACE")


@pytest.mark.parametrize(
    "body",
    [
        {"profiler": "torch", "steps": 1, "duration_ms": 5},
        {"profiler": "cpu", "steps": 1},
        {"profiler": "torch", "steps": 0},
        {**STEPS, "path": "/tmp"},
    ],
)
async def test_senseless_orders_reach_no_engine(full: Full, body: dict[str, Any]) -> None:
    assert (await full.order("profiles", body)).status_code == 422
    assert full.double.rpcs["StartProfile"] == 0


async def test_a_dry_run_says_what_would_happen(full: Full) -> None:
    assert await full.effect("profiles", STEPS) == (
        "Records a torch profile of 5 steps beside other work."
    )
    assert await full.effect("profiles", {"profiler": "memory"}) == (
        "Records a memory profile until it is stopped beside other work."
    )
    without = await full.gate.order("profiles", STEPS)  # the scripted one
    assert (without.status_code, without.json()["reason"]) == (501, "UNSUPPORTED_OPERATION")
    assert full.double.rpcs["StartProfile"] == 0
