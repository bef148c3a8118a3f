"""Profiles: stopped, listed, and fetched from a folder that others can write to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import Fault
from tests.http.full import FULL, Full
from tests.http.gateway import ENGINE_ID, Gateway, gateway

pytestmark = pytest.mark.anyio

PROFILES = f"/v1/engines/{FULL}/profiles"
RECORDING = {"phase": "recording", "done": 0, "total": 0, "unit": ""}
TRACE = b"\x1f\x8b not really a trace " * 100_000  # several pieces


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


@pytest.fixture
async def gate(tmp_path: Path, root: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path / "data", profile_roots={ENGINE_ID: root}) as made:
        yield made


def artifact(path: str, content: bytes, rank: int = 0, **other: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "path": path,
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "media_type": "application/gzip",
        **other,
    }


async def profile_with(gate: Gateway, *artifacts: dict[str, Any]) -> str:
    result = {"changed": True, "profile_id": "p-1", "kind": "torch", "artifacts": list(artifacts)}
    found = await gate.ended_profile(result)
    return f"/v1/engines/{ENGINE_ID}/profiles/{found}"


async def audited(gate: Gateway, action: str) -> list[tuple[str, str | None]]:
    page = (await gate.get(f"/v1/audit?action={action}")).json()["items"]
    return [(one["outcome"], one["reason"]) for one in page]


# ---- running ones ----


async def recording(full: Full, body: dict[str, Any]) -> str:
    """The id of a profile that records."""
    found: str = (await full.order("profiles", body)).json()["id"]
    while (await full.gate.get(f"/v1/operations/{found}")).json()["progress"] != RECORDING:
        pass
    return found


async def test_one_without_a_bound_records_until_it_is_stopped(full: Full) -> None:
    found = await recording(full, {"profiler": "torch"})
    path = f"{PROFILES}/{found}"
    known = (await full.gate.get(path)).json()
    assert (known["state"], known["profiler"]) == ("running", "torch")
    assert (known["id"], known["steps"], known["duration_ms"]) == (found, None, None)
    assert known["artifacts"] == []
    fetched = await full.gate.get(f"{path}/artifact")
    assert (fetched.status_code, fetched.json()["reason"]) == (409, "PROFILE_NOT_READY")
    # By the engine's own name for it too.
    by_engine = f"{PROFILES}/{known['profile_id']}/stop"
    stopped = await full.gate.http.post(
        by_engine, headers={**full.gate.auth(), "Prefer": "wait=20"}, json={"reason": "enough"}
    )
    assert (stopped.status_code, stopped.json()["state"]) == (200, "succeeded")
    assert stopped.json()["id"] == found
    again = await full.gate.http.post(f"{path}/stop", headers=full.gate.auth())
    assert (again.status_code, again.json()["state"]) == (200, "succeeded")
    assert full.engine.recorded == ["started torch", "finished"]
    known = (await full.gate.get(path)).json()
    assert (known["state"], [one["rank"] for one in known["artifacts"]]) == ("ready", [0, 1])
    assert known["artifacts"][0]["download"] is None  # there is no root for this engine
    fetched = await full.gate.get(f"{path}/artifact?rank=0")
    assert (fetched.status_code, fetched.json()["reason"]) == (501, "ARTIFACTS_NOT_REACHABLE")
    assert await audited(full.gate, "stop_profile") == [("accepted", None)]


async def test_who_was_attached_to_a_profile_stops_it_too(full: Full) -> None:
    found = await recording(full, {"profiler": "torch"})
    attached = await full.does("profiles", {"profiler": "torch"})
    path = f"{PROFILES}/{attached['id']}"
    known = (await full.gate.get(path)).json()
    assert (known["state"], known["artifacts"]) == ("attached", [])
    stopped = await full.gate.http.post(
        f"{path}/stop", headers={**full.gate.auth(), "Prefer": "wait=20"}
    )
    assert (stopped.json()["id"], stopped.json()["state"]) == (found, "succeeded")
    fetched = await full.gate.get(f"{path}/artifact?rank=0")
    assert fetched.json()["reason"] == "ARTIFACTS_NOT_REACHABLE"  # and not that there is none


async def test_one_that_the_engine_does_not_know_yet_is_not_stopped(full: Full) -> None:
    full.double.fail_next("StartProfile", Fault.LOSE_REPLY)
    found = (await full.order("profiles", {"profiler": "torch", "steps": 1})).json()["id"]
    answer = await full.gate.http.post(f"{PROFILES}/{found}/stop", headers=full.gate.auth())
    if answer.status_code == 409:  # unless it was quicker
        assert answer.json()["reason"] == "PROFILE_NOT_RECORDING"
        assert answer.json()["retryable"] is True
        assert await audited(full.gate, "stop_profile") == [("refused", "PROFILE_NOT_RECORDING")]
    full.engine.steps_done.set()
    ended = await full.gate.get(f"/v1/operations/{found}", Prefer="wait=20")
    assert ended.json()["state"] == "succeeded"


async def test_an_engine_that_says_nothing_or_no(full: Full) -> None:
    found = await recording(full, {"profiler": "torch"})
    path = f"{PROFILES}/{found}/stop"
    full.double.fail_next("StopProfile", Fault.LOSE_REPLY)
    lost = await full.gate.http.post(path, headers=full.gate.auth())
    assert (lost.status_code, lost.json()["reason"]) == (503, "ENGINE_UNREACHABLE")
    full.double.fail_next("StopProfile", Fault.REFUSE_CONNECTION)
    lost = await full.gate.http.post(path, headers=full.gate.auth())
    assert lost.status_code in (200, 503)
    done = await full.gate.http.post(path, headers={**full.gate.auth(), "Prefer": "wait=20"})
    assert (done.status_code, done.json()["state"]) == (200, "succeeded")
    assert full.engine.recorded == ["started torch", "finished"]


async def test_lists_hold_profiles_alone_and_the_newest_first(full: Full) -> None:
    full.engine.steps_done.set()
    ids = [(await full.does("profiles", {"profiler": "torch", "steps": n}))["id"] for n in (1, 2)]
    await full.does("flush-caches", {"caches": ["prefix"]})
    first = await full.gate.get(f"{PROFILES}?page_size=1")
    token = first.json()["next_page_token"]
    second = await full.gate.get(f"{PROFILES}?page_size=1&page_token={token}")
    assert f"page_token={token}" in first.headers["link"]
    seen = [page.json()["items"][0]["id"] for page in (first, second)]
    assert seen == ids[::-1]
    assert second.json()["next_page_token"] is None
    elsewhere = await full.gate.get(f"/v1/engines/{ENGINE_ID}/profiles")
    assert elsewhere.json()["items"] == []


async def test_what_is_no_profile_of_this_engine_is_not_found(full: Full) -> None:
    full.engine.steps_done.set()
    flush = (await full.does("flush-caches", {"caches": ["prefix"]}))["id"]
    profile = (await full.does("profiles", {"profiler": "torch", "steps": 1}))["id"]
    paths = [f"{PROFILES}/{name}" for name in (flush, "none", "%00", "x" * 200)]
    for path in (*paths, f"/v1/engines/{ENGINE_ID}/profiles/{profile}"):
        for found in (
            await full.gate.get(path),
            await full.gate.get(f"{path}/artifact"),
            await full.gate.http.post(f"{path}/stop", headers=full.gate.auth()),
        ):
            assert (found.status_code, found.json()["reason"]) == (404, "PROFILE_NOT_FOUND"), path


# ---- files ----


async def test_a_file_is_fetched_whole_and_audited(gate: Gateway, root: Path) -> None:
    (root / "p-1").mkdir()
    (root / "p-1" / 'rank-0 "x".json.gz').write_bytes(TRACE)
    (root / "p-1" / "rank-1.json").write_bytes(b"{}")
    path = await profile_with(
        gate,
        artifact('p-1/rank-0 "x".json.gz', TRACE),
        artifact("p-1/rank-1.json", b"{}", 1, media_type="text/html"),
    )
    known = (await gate.get(path)).json()
    assert [one["download"] for one in known["artifacts"]] == [
        f"{path}/artifact?rank={rank}" for rank in (0, 1)
    ]
    fetched = await gate.get(known["artifacts"][0]["download"])
    assert fetched.status_code == 200
    assert fetched.content == TRACE
    assert fetched.headers["content-type"] == "application/gzip"
    named = f'attachment; filename="{known["id"]}-rank-0__x_.json.gz"'
    assert fetched.headers["content-disposition"] == named
    assert "content-encoding" not in fetched.headers
    head = await gate.http.head(known["artifacts"][0]["download"], headers=gate.auth())
    assert (head.headers["content-length"], head.content) == (str(len(TRACE)), b"")
    other = await gate.get(f"{path}/artifact?rank=1")
    assert (other.headers["content-type"], other.content) == ("application/octet-stream", b"{}")
    for query in ("", "?rank=2"):
        which = await gate.get(f"{path}/artifact{query}")
        assert (which.status_code, which.json()["reason"]) == (404, "ARTIFACT_NOT_FOUND")
    entries = (await gate.get("/v1/audit?action=download_artifact")).json()["items"]
    assert [one["outcome"] for one in entries] == ["refused"] * 2 + ["allowed"] * 3
    assert entries[-1]["detail"] == {"rank": 0, "sha256": known["artifacts"][0]["sha256"]}
    assert (entries[-1]["operation"], entries[-1]["engine"]) == (known["id"], ENGINE_ID)


def outside(root: Path) -> Path:
    secret = root.parent / "secret"
    secret.write_bytes(TRACE)
    return secret


def linked(root: Path) -> str:
    (root / "link").symlink_to(outside(root))
    return "link"


def linked_inside(root: Path) -> str:
    (root / "file").write_bytes(TRACE)
    (root / "link").symlink_to(root / "file")
    return "link"


def linked_folder(root: Path) -> str:
    outside(root)
    (root / "folder").symlink_to(root.parent)
    return "folder/secret"


def above(root: Path) -> str:
    outside(root)
    return "../secret"


def absolute(root: Path) -> str:
    return str(outside(root))


def folder(root: Path) -> str:
    (root / "folder").mkdir()
    return "folder"


def pipe(root: Path) -> str:
    os.mkfifo(root / "pipe")
    return "pipe"


def shorter(root: Path) -> str:
    (root / "short").write_bytes(TRACE[:-1])
    return "short"


def altered(root: Path) -> str:
    (root / "other").write_bytes(b"x" + TRACE[1:])
    return "other"


def nameless(root: Path) -> str:
    return "" if root else "."


@pytest.mark.parametrize(
    "made",
    [
        linked,
        linked_inside,
        linked_folder,
        above,
        absolute,
        folder,
        pipe,
        shorter,
        altered,
        nameless,
    ],
)
async def test_what_is_not_the_file_that_was_named_is_not_handed_out(
    gate: Gateway, root: Path, made: Callable[[Path], str]
) -> None:
    path = await profile_with(gate, artifact(made(root), TRACE))
    refused = await gate.get(f"{path}/artifact")
    assert (refused.status_code, refused.json()["reason"]) == (502, "ARTIFACT_DAMAGED")
    assert str(root) not in refused.text
    assert await audited(gate, "download_artifact") == [("refused", "ARTIFACT_DAMAGED")]


async def test_a_file_that_was_removed_is_not_found(gate: Gateway, root: Path) -> None:
    path = await profile_with(gate, artifact("p-1/gone", TRACE))
    gone = await gate.get(f"{path}/artifact?rank=0")
    assert (gone.status_code, gone.json()["reason"]) == (404, "ARTIFACT_NOT_FOUND")


async def test_no_descriptor_is_left_open(gate: Gateway, root: Path) -> None:
    (root / "trace").write_bytes(TRACE)
    path = await profile_with(gate, artifact("trace", TRACE))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        request = gate.http.build_request("GET", f"{path}/artifact", headers=gate.auth())
        answer = await gate.http.send(request, stream=True)
        await answer.aclose()  # before all of it has come
        assert (await gate.get(f"{path}/artifact")).status_code == 200
    assert len(os.listdir("/proc/self/fd")) < before + 10
