"""Giving memory back and taking it again, over HTTP and real gRPC, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from app.domain.kinds import ResourceKind
from tests.doubles.engine import Fault
from tests.enginekit.full_engine import BYTES
from tests.enginekit.minimal_engine import fault
from tests.http.full import Full

pytestmark = pytest.mark.anyio

KV = {"resources": ["kv_cache"], "content": "discard", "drain": "wait"}
WEIGHTS = {"resources": ["weights"], "content": "preserve", "drain": "abort"}


def bytes_of(resource: str, *, given_back: bool) -> list[dict[str, Any]]:
    held = BYTES[ResourceKind(resource)]
    before, after = (held, 0) if given_back else (0, held)
    return [
        {"rank": rank, "resource": resource, "bytes_before": before, "bytes_after": after}
        for rank in (0, 1)
    ]


async def test_a_release_tells_what_each_rank_gave_back_and_facts_follow(full: Full) -> None:
    before = await full.facts()
    released = await full.does("release-resources", KV)
    assert released["state"] == "succeeded"
    assert released["verification"] == "verified"
    assert released["request"] == KV
    assert released["result"] == {
        "changed": True,
        "release_epoch": before["release_epoch"] + 1,
        "released": ["kv_cache"],
        "memory": bytes_of("kv_cache", given_back=True),
        "requests_finished": 0,
        "requests_aborted": 0,
    }
    assert [(r["rank"], r["state"]) for r in released["ranks"]] == [
        (0, "committed"),
        (1, "committed"),
    ]
    facts = await full.facts()
    assert facts["released"] == ["kv_cache"]
    assert facts["release_epoch"] == released["result"]["release_epoch"]
    assert facts["admission"] == "paused"
    assert facts["pause"]["by"] == released["id"]
    assert all(held.released == {ResourceKind.KV_CACHE} for held in full.engine.held.values())


async def test_restoring_in_stages_and_then_resuming(full: Full) -> None:
    await full.does("release-resources", KV)
    both = await full.does("release-resources", WEIGHTS)
    assert both["result"]["released"] == ["weights", "kv_cache"]
    epoch = both["result"]["release_epoch"]
    part = await full.does("restore-resources", {"resources": ["weights"], "release_epoch": epoch})
    assert part["result"] == {
        "changed": True,
        "release_epoch": epoch,
        "released": ["kv_cache"],
        "memory": bytes_of("weights", given_back=False),
    }
    pause_epoch = (await full.facts())["pause_epoch"]
    early = await full.order("resume", {"pause_epoch": pause_epoch})
    assert (early.status_code, early.json()["reason"]) == (409, "RESOURCES_RELEASED")
    await full.does("restore-resources", {"resources": ["kv_cache"], "release_epoch": epoch})
    facts = await full.facts()
    assert (facts["released"], facts["admission"]) == ([], "paused")
    resumed = await full.does("resume", {"pause_epoch": pause_epoch})
    assert resumed["state"] == "succeeded"
    assert (await full.facts())["admission"] == "open"


async def test_what_is_so_already_changes_nothing_and_touches_no_rank(full: Full) -> None:
    first = await full.does("release-resources", KV)
    touched = len(full.double.orders)
    again = await full.does("release-resources", KV)
    assert (again["state"], again["result"]["changed"]) == ("succeeded", False)
    assert again["revision"] == first["revision"]
    assert len(full.double.orders) == touched


async def test_only_the_latest_release_is_restored(full: Full) -> None:
    latest = (await full.does("release-resources", KV))["result"]["release_epoch"]
    for epoch in (latest - 1, latest + 1):
        stale = await full.order(
            "restore-resources", {"resources": ["kv_cache"], "release_epoch": epoch}
        )
        assert (stale.status_code, stale.json()["reason"]) == (409, "STALE_RELEASE_EPOCH")
    assert full.double.rpcs["RestoreResources"] == 0


async def test_a_rank_that_fails_is_named_and_nothing_is_released(full: Full) -> None:
    full.engine.scripts["prepare", 1] = fault
    failed = await full.does("release-resources", KV)
    assert (failed["state"], failed["error"]["reason"]) == ("failed", "RANK_BROKEN")
    assert failed["error"]["ranks"] == [1]
    assert failed["error"]["effect"] in ("none", "rolled_back")
    facts = await full.facts()
    assert (facts["released"], facts["admission"]) == ([], "open")


async def test_a_reply_that_is_lost_is_asked_for_and_heard(full: Full) -> None:
    full.double.fail_next("ReleaseResources", Fault.DROP_AFTER_ACCEPTANCE)
    released = await full.does("release-resources", KV)
    assert (released["state"], released["result"]["released"]) == ("succeeded", ["kv_cache"])
    assert {key for name, key in full.double.received if name == "ReleaseResources"} == {
        released["id"]
    }
    assert full.double.orders.count(full.double.orders[-1]) == 1


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("release-resources", {**KV, "resources": []}),
        ("release-resources", {**KV, "resources": ["kv_cache", "disk"]}),
        ("release-resources", {"resources": ["kv_cache"], "content": "discard"}),
        ("release-resources", {"resources": ["kv_cache"], "drain": "wait"}),
        ("release-resources", {**KV, "drain": "WAIT"}),
        ("release-resources", {**KV, "release_epoch": 1}),
        ("restore-resources", {"resources": ["kv_cache"]}),
        ("restore-resources", {"resources": ["kv_cache"], "release_epoch": 0}),
        ("restore-resources", {"resources": ["kv_cache"], "release_epoch": "1"}),
    ],
)
async def test_senseless_orders_reach_no_engine(
    full: Full, verb: str, body: dict[str, Any]
) -> None:
    refused = await full.order(verb, body)
    assert (refused.status_code, refused.json()["reason"]) == (422, "SCHEMA_VIOLATION")
    assert full.double.orders == []


async def test_an_engine_without_it_is_not_asked(full: Full) -> None:
    refused = await full.gate.order("release-resources", KV)  # the scripted one
    assert (refused.status_code, refused.json()["reason"]) == (501, "UNSUPPORTED_OPERATION")
    twice = await full.order("release-resources", {**KV, "resources": ["kv_cache"] * 2})
    assert (twice.status_code, twice.json()["reason"]) == (422, "INVALID_ARGUMENT")
    assert full.double.orders == []


async def test_a_dry_run_says_what_would_happen(full: Full) -> None:
    assert await full.effect("release-resources", KV) == (
        "Closes admission and lets 0 running requests finish, then gives back the memory of "
        "kv_cache, its content dropped."
    )
    gone = {**WEIGHTS, "resources": ["weights", "kv_cache"], "content": "discard"}
    assert await full.effect("release-resources", gone) == (
        "Closes admission and ends 0 running requests, then gives back the memory of "
        "kv_cache, weights, its content dropped; only an update brings weights back."
    )
    both = await full.does("release-resources", {**gone, "content": "preserve"})
    epoch = both["result"]["release_epoch"]
    kept = {**KV, "content": "preserve"}
    assert await full.effect("release-resources", kept) == "Changes nothing: kv_cache is released."
    assert await full.effect("release-resources", KV) == (
        "Drops what the host keeps of kv_cache, if it keeps any."
    )
    assert await full.effect(
        "release-resources", {**kept, "resources": ["kv_cache", "execution_graphs"]}
    ) == (
        "Leaves admission closed as it is, then gives back the memory of execution_graphs, "
        "its content kept on the host."
    )
    restore = {"resources": ["weights"], "release_epoch": epoch}
    assert await full.effect("restore-resources", restore) == (
        "Takes memory for weights again; kv_cache is released still. Admission is not opened."
    )
    await full.does("restore-resources", restore)
    assert await full.effect("restore-resources", restore) == (
        "Changes nothing: weights are in place."
    )
    assert full.double.rpcs["ReleaseResources"] == full.double.rpcs["RestoreResources"] == 1
