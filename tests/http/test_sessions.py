"""New weights in pieces, over HTTP and real gRPC: several calls, one operation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from app.domain.kinds import OperationKind
from tests.doubles.engine import Fault
from tests.enginekit.client import client_of, until
from tests.enginekit.minimal_engine import hang
from tests.enginekit.session_engine import COMPLETE, Sender, SessionEngine
from tests.http.full import FULL, Full, full_engine
from tests.http.gateway import Gateway

pytestmark = pytest.mark.anyio


@pytest.fixture
async def full(gate: Gateway, tmp_path: Path) -> AsyncIterator[Full]:
    async with full_engine(gate, tmp_path / "sessions", SessionEngine) as made:
        yield made


@pytest.fixture
def engine(full: Full) -> SessionEngine:
    return cast("SessionEngine", full.engine)


def begin(session_id: str = "s1", lease_ms: int | None = None, **more: Any) -> dict[str, Any]:
    started: dict[str, Any] = {"disk": {"path": "/models/v2"}}
    if lease_ms is not None:
        started["lease_ms"] = lease_ms
    session = {"session_id": session_id, "begin": started}
    return {"source": {"session": session}, "weight_version": "v2", "pause": "drain", **more}


def stage(session_id: str = "s1", **said: Any) -> dict[str, Any]:
    return {"source": {"session": {"session_id": session_id, **said}}}


def chunk(index: int, *files: str, session_id: str = "s1") -> dict[str, Any]:
    names = list(files) or [f"part-{index}"]
    return stage(session_id, chunk={"index": index, "disk": {"files": names}})


def commit(chunks: int, **more: str) -> dict[str, Any]:
    return stage(commit={"chunks": chunks, **more})


async def taken(full: Full, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = await full.order("update-weights", body, **headers)
    assert answer.status_code in (200, 202), answer.text
    return cast("dict[str, Any]", answer.json())


async def ended(full: Full, operation_id: str) -> dict[str, Any]:
    answer = await full.gate.get(f"/v1/operations/{operation_id}", Prefer="wait=20")
    operation = cast("dict[str, Any]", answer.json())
    assert operation["done"], operation
    return operation


async def events(full: Full, operation_id: str) -> list[dict[str, Any]]:
    answer = await full.gate.get(f"/v1/operations/{operation_id}/events", Accept="application/json")
    return cast("list[dict[str, Any]]", answer.json()["items"])


async def test_the_calls_make_one_operation(full: Full, engine: SessionEngine) -> None:
    begun = await full.order("update-weights", begin())
    assert begun.status_code == 202
    operation_id = begun.json()["id"]
    # At once: whether the engine has it yet is nothing that a caller has to know.
    first = await full.order("update-weights", chunk(0), Prefer="wait=20")
    assert (first.status_code, first.json()["id"]) == (200, operation_id)
    assert first.json()["progress"]["unit"] == "chunks"
    assert first.json()["progress"]["done"] == 1
    assert first.json()["state"] == "running"
    second = await full.order("update-weights", chunk(1, COMPLETE))
    assert (second.status_code, second.json()["id"]) == (202, operation_id)
    assert second.headers["location"] == f"/v1/operations/{operation_id}"
    done = await taken(full, commit(2), Prefer="wait=20")
    assert (done["id"], done["state"], done["verification"]) == (
        operation_id,
        "succeeded",
        "verified",
    )
    assert done["result"]["weight_version"] == "v2"
    assert {staged[1] for staged in engine.staged} == {0, 1}
    assert list(engine.staged.values()) == [[0, 1], [0, 1]]
    told = await events(full, operation_id)
    phases = [event["data"]["phase"] for event in told if event["type"] == "progress"]
    assert phases.count("chunk_taken") == 2
    assert phases.count("commit_taken") == 1
    assert phases.count("staged") == 2
    listed = await full.gate.get(f"/v1/operations?engine={FULL}")
    assert [one["id"] for one in listed.json()["items"]] == [operation_id]
    facts = await full.facts()
    assert (facts["weights"]["version"], facts["admission"]) == ("v2", "open")


async def test_the_version_may_be_said_at_the_end(full: Full) -> None:
    await taken(full, begin())
    await taken(full, chunk(0, COMPLETE))
    done = await taken(full, commit(1, weight_version="step-7"), Prefer="wait=20")
    assert (done["state"], done["result"]["weight_version"]) == ("succeeded", "step-7")
    assert (await full.facts())["weights"]["version"] == "step-7"


async def test_each_call_is_safe_to_repeat(full: Full, engine: SessionEngine) -> None:
    keys = {name: {"Idempotency-Key": f"k-{name}"} for name in ("begin", "chunk", "commit")}
    bodies = {"begin": begin(), "chunk": chunk(0, COMPLETE), "commit": commit(1)}
    ids = set()
    for name, body in bodies.items():
        answers = await asyncio.gather(
            *(full.order("update-weights", body, **keys[name]) for _ in range(5))
        )
        assert {answer.status_code for answer in answers} <= {200, 202}
        assert sum("idempotency-replayed" in answer.headers for answer in answers) == 4
        ids |= {answer.json()["id"] for answer in answers}
    (operation_id,) = ids
    assert (await ended(full, operation_id))["state"] == "succeeded"
    assert list(engine.staged.values()) == [[0], [0]]
    for name, body in bodies.items():
        again = await full.order("update-weights", body, **keys[name])
        assert (again.status_code, again.json()["id"]) == (200, operation_id)
    other = await full.order("update-weights", chunk(0, "other"), **keys["chunk"])
    assert (other.status_code, other.json()["reason"]) == (409, "IDEMPOTENCY_KEY_REUSED")


async def test_what_is_refused_reaches_no_engine(full: Full) -> None:
    operation_id = (await taken(full, begin()))["id"]
    await until(lambda: full.double.rpcs["UpdateWeights"] == 1)
    expected: list[tuple[dict[str, Any], int, str]] = [
        (chunk(1), 409, "CHUNK_OUT_OF_ORDER"),
        (chunk(0, session_id="other"), 404, "SESSION_NOT_FOUND"),
        (begin("s2"), 409, "ENGINE_BUSY"),
        ({**chunk(0), "weight_version": "v3"}, 422, "INVALID_ARGUMENT"),
        ({**chunk(0), "deadline_ms": 5}, 422, "INVALID_ARGUMENT"),
        (stage(chunk={"index": 0, "nccl": {"tensors": [W]}}), 422, "INVALID_ARGUMENT"),
        (stage(chunk={"index": 0, "ipc": IPC}), 501, "UNSUPPORTED_OPERATION"),
        (stage(chunk={"index": 0}), 422, "INVALID_ARGUMENT"),
        (stage(begin={"nccl": {**PLACE, "group": "g\0"}}), 422, "SCHEMA_VIOLATION"),
        (stage(), 422, "INVALID_ARGUMENT"),
        (stage(commit={"chunks": 0}, abort={}), 422, "INVALID_ARGUMENT"),
        ({**chunk(0), "expected_revision": 99}, 409, "REVISION_MISMATCH"),
    ]
    for body, status, reason in expected:
        refused = await full.order("update-weights", body)
        assert (refused.status_code, refused.json()["reason"]) == (status, reason), refused.text
    busy = await full.order("update-weights", begin("s2"))
    assert busy.json()["operation"] == operation_id
    assert full.double.rpcs["UpdateWeights"] == 1
    refusals = await full.gate.get(f"/v1/audit?engine={FULL}&action=update_weights")
    assert "CHUNK_OUT_OF_ORDER" in {one["reason"] for one in refusals.json()["items"]}


W = {"name": "w", "dtype": "float32", "shape": [2]}
PLACE = {"address": "127.0.0.1", "port": 29500, "world_size": 3, "rank_offset": 1}
IPC = {"tensors": [W], "handles": [{"object_name": "chadburn-w"}]}


async def test_another_caller_has_no_part_in_it(full: Full) -> None:
    await taken(full, begin())
    theirs = {**full.gate.auth(subject="mallory"), **full.gate.key()}
    for body in (chunk(0), stage(abort={})):
        refused = await full.gate.http.post(
            f"/v1/engines/{FULL}/update-weights", json=body, headers={**theirs, **full.gate.key()}
        )
        assert (refused.status_code, refused.json()["reason"]) == (404, "SESSION_NOT_FOUND")
    reader = full.gate.auth("admin:read")
    refused = await full.gate.http.post(
        f"/v1/engines/{FULL}/update-weights", json=chunk(0), headers={**reader, **full.gate.key()}
    )
    assert refused.status_code == 403


async def test_abort_and_lease(full: Full, engine: SessionEngine) -> None:
    operation_id = (await taken(full, begin()))["id"]
    await taken(full, chunk(0), Prefer="wait=20")
    called_off = await taken(full, stage(abort={"reason": "diverged"}), Prefer="wait=20")
    assert (called_off["id"], called_off["state"]) == (operation_id, "cancelled")
    assert ("SESSION_ABORTED", "diverged") in {
        (one["reason"], one["message"]) for one in called_off["warnings"]
    }
    late = await full.order("update-weights", chunk(1))
    assert (late.status_code, late.json()["reason"]) == (404, "SESSION_NOT_FOUND")
    silent = (await taken(full, begin(lease_ms=200)))["id"]
    lapsed = await ended(full, silent)
    assert (lapsed["state"], lapsed["error"]["reason"]) == ("failed", "SESSION_LEASE_EXPIRED")
    assert lapsed["error"]["effect"] == "none"
    assert {engine.held[rank].version for rank in engine.ranks} == {"v1"}


async def test_a_lost_reply_to_a_call_stages_nothing_twice(
    full: Full, engine: SessionEngine
) -> None:
    operation_id = (await taken(full, begin()))["id"]
    await until(lambda: full.double.rpcs["UpdateWeights"] == 1)
    full.double.fail_next("UpdateWeights", Fault.LOSE_REPLY, Fault.REFUSE_CONNECTION)
    await taken(full, chunk(0, COMPLETE), Prefer="wait=20")
    done = await taken(full, commit(1), Prefer="wait=20")
    assert (done["id"], done["state"]) == (operation_id, "succeeded")
    assert list(engine.staged.values()) == [[0], [0]]


async def test_an_engine_that_restarts_in_the_middle(full: Full) -> None:
    operation_id = (await taken(full, begin()))["id"]
    await taken(full, chunk(0, COMPLETE), Prefer="wait=20")
    await full.double.restart()
    failed = await ended(full, operation_id)
    assert (failed["state"], failed["error"]["reason"]) == ("failed", "ENGINE_RESTARTED")
    late = await full.order("update-weights", commit(1))
    assert (late.status_code, late.json()["reason"]) == (404, "SESSION_NOT_FOUND")


async def test_a_call_that_the_engine_refuses_ends_the_session(
    full: Full, engine: SessionEngine
) -> None:
    """It was judged by what was known here; the engine knows better."""
    operation_id = (await taken(full, begin()))["id"]
    await taken(full, chunk(0), Prefer="wait=20")

    # Behind the gateway's back, as another client with the engine's credential might.
    async with client_of(full.double) as direct:
        sender = Sender(direct, "s1")
        await sender.sent(sender.chunk(1))
    await taken(full, chunk(1))
    done = await ended(full, operation_id)
    assert done["state"] == "cancelled"
    reasons = {one["reason"]: one["message"] for one in done["warnings"]}
    assert "CHUNK_OUT_OF_ORDER" in reasons["STAGE_REFUSED"]


async def test_cancelling_the_operation(full: Full, engine: SessionEngine) -> None:
    engine.script("stage", hang, 1)
    operation_id = (await taken(full, begin()))["id"]
    await taken(full, chunk(0))
    await until(lambda: any(call.phase == "stage" for call in engine.calls))
    asked = await full.gate.http.post(
        f"/v1/operations/{operation_id}/cancel", json={}, headers=full.gate.auth()
    )
    assert asked.status_code in (200, 202), asked.text
    closed = await full.order("update-weights", chunk(1))
    assert closed.json()["reason"] in ("SESSION_CLOSED", "SESSION_NOT_FOUND")
    assert (await ended(full, operation_id))["state"] == "cancelled"


async def waiting(full: Full) -> tuple[dict[str, Any], dict[str, Any]]:
    """A session that is open, and one that waits for it."""
    first = await taken(full, begin("s0"))
    await until(lambda: full.double.rpcs["UpdateWeights"] == 1)
    second = await taken(full, {**begin(), "when_busy": "queue"})
    assert (second["state"], second["queue_position"]) == ("queued", 1)
    return first, second


async def test_the_calls_of_a_session_wait_for_its_turn(full: Full, engine: SessionEngine) -> None:
    """They are taken on and judged as ever, and the engine gets them in their order at its turn."""
    first, second = await waiting(full)
    for index, files in enumerate(([], [COMPLETE])):
        now = await taken(full, chunk(index, *files))
        assert (now["id"], now["state"]) == (second["id"], "queued")
        assert (now["progress"]["done"], now["progress"]["total"]) == (0, index + 1)
    early = await full.order("update-weights", chunk(3))
    assert (early.status_code, early.json()["reason"]) == (409, "CHUNK_OUT_OF_ORDER")
    assert (await taken(full, commit(2)))["state"] == "queued"
    late = await full.order("update-weights", chunk(2))
    assert (late.status_code, late.json()["reason"]) == (409, "SESSION_CLOSED")
    assert full.double.rpcs["UpdateWeights"] == 1

    await taken(full, stage("s0", abort={}))
    assert (await ended(full, first["id"]))["state"] == "cancelled"
    done = await ended(full, second["id"])
    assert (done["state"], done["result"]["weight_version"]) == ("succeeded", "v2")
    assert list(engine.staged.values()) == [[0, 1], [0, 1]]
    told = [(event["type"], event["data"].get("phase")) for event in await events(full, done["id"])]
    assert told[:6] == [
        ("accepted", None),
        ("queued", None),
        ("progress", "chunk_taken"),
        ("progress", "chunk_taken"),
        ("progress", "commit_taken"),
        ("dispatched", None),
    ]


async def test_a_session_that_is_cancelled_before_its_turn_reaches_no_engine(full: Full) -> None:
    _, second = await waiting(full)
    await taken(full, chunk(0))
    cancelled = await full.gate.http.post(
        f"/v1/operations/{second['id']}/cancel", json={}, headers=full.gate.auth()
    )
    assert cancelled.json()["state"] == "cancelled"
    late = await full.order("update-weights", chunk(1))
    assert (late.status_code, late.json()["reason"]) == (404, "SESSION_NOT_FOUND")
    await taken(full, stage("s0", abort={}), Prefer="wait=20")
    assert full.double.rpcs["UpdateWeights"] == 2  # of the other session


async def test_dry_runs(full: Full) -> None:
    planned = await full.order("update-weights", {**begin(), "dry_run": True})
    assert planned.status_code == 200, planned.text
    early: httpx2.Response = await full.order("update-weights", {**chunk(0), "dry_run": True})
    assert (early.status_code, early.json()["reason"]) == (404, "SESSION_NOT_FOUND")
    operation_id = (await taken(full, begin()))["id"]
    plan = await full.order("update-weights", {**chunk(0), "dry_run": True})
    assert (plan.status_code, plan.json()["operation"]) == (200, operation_id)
    assert plan.json()["kind"] == OperationKind.UPDATE_WEIGHTS.value
    assert (await full.order("update-weights", chunk(0))).status_code == 202


async def test_an_engine_without_sessions_is_not_asked(full: Full) -> None:
    for body in (begin(), chunk(0)):
        refused = await full.gate.order("update-weights", body)
        assert (refused.status_code, refused.json()["reason"]) == (501, "UNSUPPORTED_OPERATION")
