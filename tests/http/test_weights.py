"""New weights, over HTTP and real gRPC, on two ranks."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest

from app.domain.kinds import Component, OperationKind
from app.enginekit.runtime import Order
from tests.doubles.engine import Fault
from tests.enginekit.full_engine import checksum
from tests.enginekit.minimal_engine import fault
from tests.http.full import Full, full_engine
from tests.http.gateway import gateway

pytestmark = pytest.mark.anyio

DISK = {"disk": {"path": "/models/v2"}}
UPDATE = {"source": DISK, "weight_version": "v2", "pause": "drain"}
GROUP = {
    "backend": "gloo",
    "address": "127.0.0.1",
    "port": 29500,
    "world_size": 3,
    "rank_offset": 1,
    "group": "trainer",
    "tensors": [{"name": "w", "dtype": "float32", "shape": [2, 3]}],
}
MEMORY = {
    "object_name": "w",
    "size_bytes": 24,
    "tensors": [{"name": "w", "dtype": "float32", "shape": [2, 3], "offset_bytes": 0}],
}
CANARY = b"canary-canary-canary-24-"
DATA = base64.b64encode(CANARY).decode()
TENSOR = {"name": "w", "dtype": "float32", "shape": [2, 3], "data": DATA}
INLINE = {"tensors": {"inline": {"tensors": [TENSOR]}}}
SOURCES = [DISK, {"distributed": GROUP}, {"tensors": {"shared_memory": MEMORY}}, INLINE]


def inline(**changes: Any) -> dict[str, Any]:
    return {"source": {"tensors": {"inline": {"tensors": [{**TENSOR, **changes}]}}}}


def versions(full: Full) -> set[str]:
    return {full.engine.held[rank].version for rank in full.engine.ranks}


@pytest.mark.parametrize("source", SOURCES)
async def test_an_update_tells_the_evidence_of_each_rank_and_facts_follow(
    full: Full, source: dict[str, Any]
) -> None:
    updated = await full.does("update-weights", {**UPDATE, "source": source})
    assert (updated["state"], updated["verification"]) == ("succeeded", "verified")
    assert updated["result"] == {
        "changed": True,
        "weight_version": "v2",
        "previous_weight_version": "v1",
        "evidence": [
            {"rank": rank, "tensors": 7, "bytes": 1000, "sha256": checksum(rank, "v2").hex()}
            for rank in (0, 1)
        ],
        "confirmed": ["target"],
        "unconfirmed": [],
        "flushed": [{"kind": "prefix", "blocks_freed": 3, "blocks_in_use": 0}],
        "updates_since_flush": 0,
        "switched": [{"request_id": "frozen", "output_tokens": 5}],
    }
    assert {(r["rank"], r["state"]) for r in updated["ranks"]} == {
        (0, "committed"),
        (1, "committed"),
    }
    assert updated["warnings"] == []
    facts = await full.facts()
    assert facts["weights"] == {"version": "v2", "state": "valid", "updates_since_flush": 0}
    assert (facts["admission"], facts["pause"]) == ("open", None)
    assert versions(full) == {"v2"}


async def test_under_a_pause_nothing_is_resumed(full: Full) -> None:
    body = {"source": DISK, "weight_version": "v2", "under_pause": {}}
    early = await full.order("update-weights", body)
    assert (early.status_code, early.json()["reason"]) == (409, "NOT_PAUSED")
    epoch = (await full.does("pause", {"mode": "abort"}))["result"]["pause_epoch"]
    stale = await full.order("update-weights", {**body, "under_pause": {"pause_epoch": epoch + 1}})
    assert (stale.status_code, stale.json()["reason"]) == (409, "STALE_PAUSE_EPOCH")
    assert full.double.rpcs["UpdateWeights"] == 0
    latest = {**body, "under_pause": {"pause_epoch": epoch}}
    assert (await full.does("update-weights", latest))["state"] == "succeeded"
    facts = await full.facts()
    assert (facts["admission"], facts["pause_epoch"]) == ("paused", epoch)
    assert facts["weights"]["version"] == "v2"


async def test_warnings_and_what_is_not_confirmed_are_told(full: Full) -> None:
    full.engine.confirms = frozenset({Component.TARGET})
    updated = await full.does(
        "update-weights", {**UPDATE, "components": ["target", "draft"], "cache_policy": "keep"}
    )
    assert {"CACHE_KEPT", "COMPONENT_UNCONFIRMED"} <= {w["reason"] for w in updated["warnings"]}
    assert updated["verification"] == "unverified"
    result = updated["result"]
    assert (result["confirmed"], result["unconfirmed"]) == (["target"], ["draft"])
    assert (result["flushed"], result["updates_since_flush"]) == ([], 1)
    assert (await full.facts())["weights"]["updates_since_flush"] == 1


async def test_without_the_evidence_of_every_rank_it_is_unverified(full: Full) -> None:
    full.engine.silent = {1}
    updated = await full.does("update-weights", UPDATE)
    assert (updated["state"], updated["verification"]) == ("succeeded", "unverified")
    assert [one["rank"] for one in updated["result"]["evidence"]] == [0]


@pytest.mark.parametrize("phase", ["prepare", "commit"])
async def test_a_rank_that_fails_is_named_and_the_old_version_stays(full: Full, phase: str) -> None:
    async def fails(order: Order, rank: int) -> None:
        if order.command.kind is OperationKind.UPDATE_WEIGHTS:
            await fault(order, rank)

    full.engine.scripts[phase, 1] = fails
    failed = await full.does("update-weights", UPDATE)
    assert (failed["state"], failed["error"]["ranks"]) == ("failed", [1])
    assert failed["error"]["effect"] in ("none", "rolled_back")
    assert failed["result"] is None
    facts = await full.facts()
    assert (facts["weights"]["version"], facts["weights"]["state"]) == ("v1", "valid")
    assert facts["admission"] == "open"
    assert versions(full) == {"v1"}


async def test_a_lost_reply_does_not_update_twice(full: Full) -> None:
    full.double.fail_next("UpdateWeights", Fault.LOSE_REPLY)
    updated = await full.does("update-weights", UPDATE)
    assert updated["state"] == "succeeded"
    prepared = [
        call.rank
        for call in full.double.calls
        if (call.phase, call.kind) == ("prepare", OperationKind.UPDATE_WEIGHTS)
    ]
    assert sorted(prepared) == [0, 1]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"source": {}}, "/source"),
        ({"source": {**DISK, "distributed": GROUP}}, "/source"),
        ({"source": {"disk": {"path": ""}}}, "/source/disk/path"),
        ({"source": {"disk": {"path": "/m\0"}}}, "/source/disk/path"),
        ({"source": {"tensors": {}}}, "/source/tensors"),
        ({"source": {"tensors": {**INLINE["tensors"], "shared_memory": MEMORY}}}, None),
        ({"source": {"tensors": {"inline": {}}}}, "/source/tensors/inline/tensors"),
        (inline(data="####"), "/source/tensors/inline/tensors/0/data"),
        (inline(data="Y2FuYXJ5"), "/source/tensors/inline/tensors/0/data"),
        (inline(data=None), "/source/tensors/inline/tensors/0/data"),
        (inline(shape=[-1]), "/source/tensors/inline/tensors/0/shape/0"),
        (inline(dtype="int4"), "/source/tensors/inline/tensors/0/dtype"),
        ({"source": {"distributed": {**GROUP, "source_rank": 2}}}, None),
        ({"source": {"distributed": {**GROUP, "port": 0}}}, "/source/distributed/port"),
        ({"source": {"distributed": {**GROUP, "tensors": []}}}, "/source/distributed/tensors"),
        ({"weight_version": ""}, "/weight_version"),
        ({"cache_policy": "drop"}, "/cache_policy"),
        ({"components": []}, "/components"),
        ({"components": ["target", "target"]}, "/components"),
        ({"pause": None}, "/pause"),
        ({"under_pause": {}}, "/pause"),
        ({"pause": {"mode": "drain", "new_requests": "refuse", "hold_limit_ms": 5}}, None),
        ({"pause": {"new_requests": "hold"}}, None),
        ({"pauses": "drain"}, None),
    ],
)
async def test_senseless_updates_reach_no_engine(
    full: Full, change: dict[str, Any], pointer: str | None
) -> None:
    refused = await full.order("update-weights", {**UPDATE, **change})
    assert refused.status_code == 422, refused.text
    named = [error["pointer"] for error in refused.json()["errors"]]
    assert named
    if pointer is not None:
        assert pointer in named
    assert full.double.rpcs["UpdateWeights"] == 0


async def test_an_engine_without_it_is_not_asked(full: Full) -> None:
    refused = await full.gate.order("update-weights", UPDATE)  # the scripted one
    assert (refused.status_code, refused.json()["reason"]) == (501, "UNSUPPORTED_OPERATION")


async def test_a_dry_run_says_what_would_happen(full: Full) -> None:
    assert await full.effect("update-weights", UPDATE) == (
        "Prepares v2 beside v1, lets 0 running requests finish, exchanges them on all ranks, "
        "flushes what they have cached, and serves again."
    )
    await full.does("pause", {"mode": "abort"})
    assert await full.effect(
        "update-weights", {**UPDATE, "pause": {"mode": "abort"}, "cache_policy": "keep"}
    ) == (
        "Prepares v2 beside v1, exchanges them under the pause in force, and keeps what they "
        "have cached."
    )
    assert full.double.rpcs["UpdateWeights"] == 0


async def test_tensors_in_the_order_are_shown_by_their_digest_alone(
    full: Full, logged: io.StringIO
) -> None:
    key = full.gate.key()
    body = {**UPDATE, "source": INLINE}
    plan = await full.order("update-weights", {**body, "dry_run": True})
    updated = (await full.order("update-weights", body, **key, Prefer="wait=20")).json()
    assert updated["state"] == "succeeded"
    again = await full.order("update-weights", body, **key)
    assert (again.json()["id"], again.headers["idempotency-replayed"]) == (updated["id"], "true")
    changed = {**UPDATE, **inline(data=base64.b64encode(CANARY[::-1]).decode())}
    reused = await full.order("update-weights", changed, **key)
    assert (reused.status_code, reused.json()["reason"]) == (409, "IDEMPOTENCY_KEY_REUSED")
    sha256 = hashlib.sha256(CANARY).hexdigest()
    (tensor,) = updated["request"]["source"]["inline"]["tensors"]
    assert tensor == {"name": "w", "dtype": "float32", "shape": [2, 3], "sha256": sha256}
    malformed = await full.order("update-weights", {**UPDATE, **inline(data="canary-canary!")})
    assert malformed.status_code == 422
    pages = ("/v1/operations", f"/v1/operations/{updated['id']}/events", "/v1/audit")
    shown = [plan.text, again.text, reused.text, malformed.text, logged.getvalue()]
    shown += [(await full.gate.get(page, Accept="application/json")).text for page in pages]
    for text in shown:
        assert "canary" not in text
        assert DATA not in text
        assert "Y2FuYXJ5" not in text


async def test_an_update_has_a_limit_of_its_own_and_so_has_the_engine(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_body_bytes": 2048, "max_update_bytes": 7_000_000}
    async with (
        gateway(tmp_path / "data", **limits) as gate,
        full_engine(gate, tmp_path / "full") as full,
    ):
        size = 1_200_000  # beyond what gRPC lets through where nobody says otherwise
        data = base64.b64encode(b"x" * 4 * size).decode()
        large = {**UPDATE, **inline(shape=[size], data=data)}
        assert (await full.does("update-weights", large))["state"] == "succeeded"
        data = base64.b64encode(b"x" * 8 * size).decode()
        larger = {**UPDATE, **inline(shape=[2 * size], data=data)}
        for verb, body in (("update-weights", larger), ("flush-caches", large)):
            refused = await full.order(verb, body)
            assert (refused.status_code, refused.json()["reason"]) == (413, "BODY_TOO_LARGE")


async def test_a_label_needs_an_engine_that_can_be_told(full: Full) -> None:
    refused = await full.order("weight-version", {"weight_version": "v2"})
    assert (refused.status_code, refused.json()["reason"]) == (501, "UNSUPPORTED_OPERATION")
    for body in ({}, {"weight_version": ""}, {"weight_version": "a\nb"}):
        assert (await full.order("weight-version", body)).status_code == 422
    assert versions(full) == {"v1"}
