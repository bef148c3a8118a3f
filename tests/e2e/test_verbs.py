"""The command line against a running demo."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Bridge
from tests.e2e.processes import Demo, chadburn

pytestmark = pytest.mark.anyio

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(demo: Demo, bridge: Bridge) -> Run:
    """`chadburn ARGUMENTS` without any flag that says where: the demo is found."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return chadburn(*arguments, cwd=demo.folder, CHADBURN_DEMO__DIR="data")

    return run


async def test_pause_and_resume(run: Run, bridge: Bridge) -> None:
    paused = run("pause", bridge.engine, "--mode", "drain", "--wait", "--reason", "weights")
    assert paused.returncode == 0, paused.stderr
    assert "pause  demo  succeeded" in paused.stdout
    assert "completed" in paused.stderr
    resumed = run("resume", bridge.engine, "--wait", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert "lifting pause" in resumed.stderr
    assert json.loads(resumed.stdout)["result"]["changed"] is True
    again = run("resume", bridge.engine)
    assert (again.returncode, again.stdout) == (6, "")


async def test_release_restore_and_resume(run: Run, bridge: Bridge) -> None:
    released = run(
        *("release", bridge.engine, "--resource", "kv_cache", "--content", "discard"),
        *("--drain", "wait", "--wait", "--json"),
    )
    assert released.returncode == 0, released.stderr
    result = json.loads(released.stdout)["result"]
    assert result["released"] == ["kv_cache"]
    assert [(one["rank"], one["resource"]) for one in result["memory"]] == [
        (0, "kv_cache"),
        (1, "kv_cache"),
    ]
    assert all(one["bytes_after"] < one["bytes_before"] for one in result["memory"])
    early = run("resume", bridge.engine)
    assert (early.returncode, "RESOURCES_RELEASED" in early.stderr) == (6, True)
    restored = run("restore", bridge.engine, "--wait")
    assert restored.returncode == 0, restored.stderr
    assert f"restoring kv_cache of release {result['release_epoch']}" in restored.stderr
    assert run("resume", bridge.engine, "--wait").returncode == 0
    said = await bridge.talk("full ahead", max_tokens=5).over()
    assert said.finished is not None


def unpacked(file: str) -> dict[str, Any]:
    trace = json.loads(gzip.decompress(Path(file).read_bytes()))
    assert isinstance(trace, dict)
    return trace


async def test_a_profile_is_recorded_and_fetched(run: Run, bridge: Bridge, demo: Demo) -> None:
    running = bridge.talk("the bridge rings", max_tokens=2000, request_id="profiled")
    await running.begun()
    started = run("profile", "start", bridge.engine, "--steps", "3", "--wait", "--json")
    assert started.returncode == 0, started.stderr
    operation = json.loads(started.stdout)
    assert operation["id"] in run("profile", "list", bridge.engine).stdout
    into = demo.folder / "traces"
    fetched = run("profile", "download", bridge.engine, operation["id"], "--into", str(into))
    assert fetched.returncode == 0, fetched.stderr
    files = fetched.stdout.splitlines()
    assert len(files) == 2
    for rank, file in enumerate(files):
        trace = unpacked(file)
        assert (trace["chadburn"]["rank"], trace["chadburn"]["steps"]) == (rank, 3)
        assert "aten::linear" in {event["name"] for event in trace["traceEvents"]}
    open_ended = run("profile", "start", bridge.engine, "--profiler", "memory", "--json")
    profile = json.loads(open_ended.stdout)["id"]
    while run("profile", "stop", bridge.engine, profile, "--wait").returncode != 0:
        pass  # the engine has not taken it on yet
    shown = json.loads(run("profile", "get", bridge.engine, profile).stdout)
    assert (shown["state"], len(shown["artifacts"])) == ("ready", 2)
    assert run("abort", bridge.engine, "profiled", "--wait").returncode == 0
    await running.over()


async def test_refusals_and_their_codes(run: Run, bridge: Bridge) -> None:
    unknown = run("pause", "nobody", "--mode", "drain")
    assert (unknown.returncode, "ENGINE_NOT_FOUND" in unknown.stderr) == (6, True)
    stale = run("pause", bridge.engine, "--mode", "drain", "--if-revision", "1")
    assert (stale.returncode, "REVISION_MISMATCH" in stale.stderr) == (6, True)
    assert stale.stderr.count("\n") == 1
    reader = run("token", "--client", "reader").stdout.strip()
    denied = run("pause", bridge.engine, "--mode", "drain", "--token", reader)
    assert denied.returncode == 6
    assert "insufficient" in denied.stderr.lower()


async def test_tokens_are_as_narrow_as_asked(run: Run, bridge: Bridge) -> None:
    narrow = run("token", "--scope", "admin:read").stdout.strip()
    assert run("engines", "list", "--token", narrow).returncode == 0
    assert run("flush", bridge.engine, "--token", narrow).returncode == 6
    assert run("token", "--client", "reader", "--scope", "admin:pause").returncode == 6
    inference = run("token", "--client", "inference").stdout.strip()
    assert run("engines", "list", "--token", inference).returncode == 6


async def test_the_fleet_and_its_operations(run: Run, bridge: Bridge) -> None:
    flushed = run("flush", bridge.engine, "--wait", "--json", "--key", "flush-1")
    operation = json.loads(flushed.stdout)
    assert operation["idempotency_key"] == "flush-1"
    assert run("flush", bridge.engine, "--wait", "--json", "--key", "flush-1").stdout == (
        flushed.stdout
    )
    listed = run("ops", "list", "--kind", "flush_caches")
    assert operation["id"] in listed.stdout
    watched = run("ops", "watch", operation["id"])
    assert watched.returncode == 0
    assert "accepted" in watched.stdout.splitlines()[0]
    assert "serving" in run("engines", "list").stdout
    assert run("ops", "cancel", operation["id"]).returncode == 6  # it has ended


async def test_a_plan_orders_nothing(run: Run, bridge: Bridge) -> None:
    before = await bridge.gateway.get("/v1/operations?page_size=1")
    planned = run("pause", bridge.engine, "--mode", "abort", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    json.loads(planned.stdout)
    assert await bridge.gateway.get("/v1/operations?page_size=1") == before


async def test_generate_and_abort(run: Run, demo: Demo, bridge: Bridge) -> None:
    said = run("generate", "the bridge rings", "--max-tokens", "12", "--seed", "3")
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()
    assert "12 completion tokens" in said.stderr
    assert run("generate", "the bridge rings", "--max-tokens", "12", "--seed", "3").stdout == (
        said.stdout
    )
    unheard = run("generate", "x", "--address", "127.0.0.1:1", "--token", "t", "--timeout", "5")
    assert unheard.returncode == 7
    wrong = run("generate", "x", "--token", bridge.ready["tokens"]["operator"])
    assert wrong.returncode == 6
    running = bridge.talk("the bridge rings", max_tokens=2000, request_id="to-abort")
    await running.begun()
    aborted = run("abort", bridge.engine, "to-abort", "--wait")
    assert aborted.returncode == 0, aborted.stderr
    await running.over()
