"""Adapters over HTTP and real gRPC, on two ranks: calls that have no keys at the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from app.domain.kinds import OperationKind
from app.enginekit.runtime import RuntimeFault
from tests.doubles.engine import Fault
from tests.enginekit.minimal_engine import Hook, fault, until
from tests.http.full import FULL, Full

pytestmark = pytest.mark.anyio

SQL = {"name": "org/sql", "path": "/loras/sql"}
LOADED = {"name": "org/sql", "id": 1, "path": "/loras/sql"}


async def unload(
    full: Full,
    name: str = "org/sql",
    *,
    body: dict[str, Any] | None = None,
    key: str | None = None,
) -> httpx2.Response:
    own = full.gate.key() if key is None else {"Idempotency-Key": key}
    sent = {**full.gate.auth(), **own, "Prefer": "wait=20"}
    path = f"/v1/engines/{FULL}/loras/{name}"
    if body is None:
        return await full.gate.http.delete(path, headers=sent)
    return await full.gate.http.request("DELETE", path, json=body, headers=sent)


async def loaded(full: Full) -> list[dict[str, Any]]:
    answer = await full.gate.get(f"/v1/engines/{FULL}/loras")
    assert answer.status_code == 200
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def reached(full: Full, kind: OperationKind) -> int:
    """How many orders of that kind the ranks have had."""
    return len({c.operation_id for c in full.double.calls if c.kind is kind})


async def test_loading_listing_and_unloading(full: Full) -> None:
    assert await loaded(full) == []
    load = await full.does("loras", SQL)
    assert (load["kind"], load["state"]) == ("load_lora", "succeeded")
    assert load["verification"] == "verified"
    assert load["result"] == {"changed": True, "lora": LOADED}
    assert await loaded(full) == [LOADED]
    facts = await full.facts()
    assert [lora["name"] for lora in facts["loras"]] == ["org/sql"]
    engine = (await full.gate.get(f"/v1/engines/{FULL}")).json()
    assert load["revision"] == engine["revision"]
    gone = (await unload(full, body={"reason": "old"})).json()
    assert (gone["kind"], gone["state"], gone["reason"]) == ("unload_lora", "succeeded", "old")
    assert gone["result"] == {"changed": True, "lora": LOADED}
    assert await loaded(full) == []


async def test_what_is_there_already_changes_nothing(full: Full) -> None:
    await full.does("loras", SQL)
    again = await full.does("loras", SQL)
    assert again["result"] == {"changed": False, "lora": LOADED}
    other = await full.order("loras", {**SQL, "path": "/loras/other"})
    assert (other.status_code, other.json()["reason"]) == (409, "LORA_ALREADY_LOADED")
    unknown = await unload(full, "nobody")
    assert (unknown.status_code, unknown.json()["reason"]) == (404, "LORA_NOT_FOUND")
    assert full.double.rpcs["UnloadLora"] == 0


async def test_the_key_stands_for_the_name_too(full: Full) -> None:
    await full.does("loras", SQL)
    await full.does("loras", {"name": "b", "path": "/loras/b"})
    first = await unload(full, key="mine")
    assert (await unload(full, key="mine")).json()["id"] == first.json()["id"]
    other = await unload(full, "b", key="mine")
    assert (other.status_code, other.json()["reason"]) == (409, "IDEMPOTENCY_KEY_REUSED")


@pytest.mark.parametrize("how", [Fault.LOSE_REPLY, Fault.REFUSE_CONNECTION])
async def test_a_lost_reply_is_made_good_by_looking(full: Full, how: Fault) -> None:
    full.double.fail_next("LoadLora", how)
    load = await full.does("loras", SQL)
    assert (load["state"], load["verification"]) == ("succeeded", "verified")
    assert load["result"]["lora"] == LOADED
    # Carried out and not heard of: whether this order changed it is not known.
    assert load["result"]["changed"] is (None if how is Fault.LOSE_REPLY else True)
    assert reached(full, OperationKind.LOAD_LORA) == 1
    full.double.fail_next("UnloadLora", how)
    gone = (await unload(full)).json()
    assert gone["state"] == "succeeded"
    assert reached(full, OperationKind.UNLOAD_LORA) == 1
    assert await loaded(full) == []


async def test_an_engine_that_is_still_at_it_is_waited_for(full: Full) -> None:
    let_go = asyncio.Event()
    full.engine.scripts["commit", 1] = until(let_go)
    full.double.fail_next("LoadLora", Fault.HANG)
    accepted = (await full.order("loras", {**SQL, "deadline_ms": 3000})).json()
    path = f"/v1/operations/{accepted['id']}"
    # Longer than the deadline: what the engine has taken on does not end by that.
    async with asyncio.timeout(60):
        while (await full.gate.get(path)).json()["state"] != "reconciling":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    let_go.set()
    ended = (await full.gate.get(path, Prefer="wait=25")).json()
    assert (ended["state"], ended["result"]) == ("succeeded", {"changed": None, "lora": LOADED})
    assert reached(full, OperationKind.LOAD_LORA) == 1


async def test_a_restarted_engine_leaves_the_outcome_unknown(full: Full) -> None:
    started = asyncio.Event()
    full.engine.scripts["commit", 1] = telling(started)
    accepted = (await full.order("loras", SQL)).json()
    async with asyncio.timeout(20):
        await started.wait()
    await full.double.restart()
    ended = (await full.gate.get(f"/v1/operations/{accepted['id']}", Prefer="wait=25")).json()
    assert (ended["state"], ended["error"]["reason"]) == ("failed", "ENGINE_RESTARTED")
    assert ended["error"]["effect"] == "unknown"


def telling(started: asyncio.Event) -> Hook:
    async def wait(_order: object, _rank: int) -> None:
        started.set()
        await asyncio.Event().wait()

    return wait


async def test_a_failure_at_the_engine_is_one_and_names_its_ranks(full: Full) -> None:
    full.engine.scripts["prepare", 1] = fault
    failed = await full.does("loras", SQL)
    assert (failed["state"], failed["error"]["reason"]) == ("failed", "RANK_BROKEN")
    assert failed["error"]["ranks"] == [1]
    assert failed["error"]["effect"] in ("none", "rolled_back")
    assert reached(full, OperationKind.LOAD_LORA) == 1
    assert await loaded(full) == []


async def test_the_engine_says_what_was_wrong(full: Full) -> None:
    """A status of the call alone would not."""

    async def refuse(_order: object, _rank: int) -> None:
        text = "use_dora: DoRA is not supported"
        raise RuntimeFault("ADAPTER_REFUSED", text, code="INVALID_ARGUMENT")

    full.engine.scripts["prepare", 0] = refuse
    failed = await full.does("loras", SQL)
    assert failed["state"] == "failed"
    assert (failed["error"]["code"], failed["error"]["reason"]) == (
        "INVALID_ARGUMENT",
        "ADAPTER_REFUSED",
    )
    assert failed["error"]["message"] == "use_dora: DoRA is not supported"


async def test_an_eviction_is_a_warning(full: Full) -> None:
    full.engine.most_loras = 1
    await full.does("loras", SQL)
    load = await full.does("loras", {"name": "b", "path": "/loras/b"})
    assert (load["state"], load["verification"]) == ("succeeded", "verified")
    assert [one["reason"] for one in load["warnings"]] == ["LORA_EVICTED"]
    assert "org/sql" in load["warnings"][0]["message"]
    assert [one["name"] for one in await loaded(full)] == ["b"]


async def test_a_revision_is_looked_at_before_the_call_that_can_not_carry_it(full: Full) -> None:
    revision = (await full.gate.get(f"/v1/engines/{FULL}")).json()["revision"]
    stale = await full.order("loras", {**SQL, "expected_revision": revision - 1})
    assert (stale.status_code, stale.json()["reason"]) == (409, "REVISION_MISMATCH")
    fresh = await full.does("loras", {**SQL, "expected_revision": revision})
    assert fresh["state"] == "succeeded"


@pytest.mark.parametrize(
    "body",
    [
        {"name": "sql"},
        {**SQL, "name": ""},
        {**SQL, "name": "a\nb"},
        {**SQL, "path": "/l\0"},
        {**SQL, "id": 0},
        {**SQL, "model": "echo"},
        {**SQL, "rank": 8},
    ],
)
async def test_senseless_orders_reach_no_engine(full: Full, body: dict[str, Any]) -> None:
    assert (await full.order("loras", body)).status_code == 422
    assert full.double.rpcs["LoadLora"] == 0


async def test_an_engine_without_adapters_says_so(full: Full) -> None:
    listed = await full.gate.get("/v1/engines/e1/loras")  # the scripted one
    assert (listed.status_code, listed.json()["reason"]) == (501, "UNSUPPORTED_OPERATION")
    refused = await full.gate.order("loras", SQL)
    assert (refused.status_code, refused.json()["reason"]) == (501, "UNSUPPORTED_OPERATION")


async def test_a_dry_run_says_what_would_happen(full: Full) -> None:
    assert await full.effect("loras", SQL) == "Loads the adapter org/sql on all ranks."
    await full.does("loras", SQL)
    plan = (await unload(full, body={"dry_run": True})).json()
    assert plan["effect"] == "Unloads the adapter org/sql from all ranks, unless requests use it."
    assert await loaded(full) == [LOADED]
