"""Orders over HTTP, as a caller sees them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.domain.scopes import Scope
from tests.http.gateway import Gateway, gateway

pytestmark = pytest.mark.anyio

PREFIX = {"caches": ["prefix"]}


async def audited(gate: Gateway, **where: str) -> list[dict[str, Any]]:
    answer = await gate.http.get("/v1/audit", params=where, headers=gate.auth())
    assert answer.status_code == 200
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


async def test_an_order_is_taken_on_at_once_and_told_where_to_follow_it(gate: Gateway) -> None:
    gate.engine.go.clear()
    answer = await gate.order("pause", {"mode": "drain"})
    operation = answer.json()
    path = f"/v1/operations/{operation['id']}"
    assert answer.status_code == 202
    assert answer.headers["location"] == path
    assert answer.headers["link"] == f'<{path}/events>; rel="monitor"; type="text/event-stream"'
    assert answer.headers["vary"] == "Prefer"
    assert operation["kind"] == "pause"
    assert operation["done"] is False
    gate.engine.go.set()
    ended = (await gate.get(path, Prefer="wait=20")).json()
    assert ended["state"] == "succeeded"
    assert ended["result"]["pause_epoch"] == 1


async def test_pause_resume_and_what_the_engine_says_after_each(gate: Gateway) -> None:
    wait = {"Prefer": "wait=20"}
    paused = await gate.order("pause", {"mode": "drain", "reason": "new weights"}, wait)
    assert paused.status_code == 200
    assert paused.headers["preference-applied"] == "wait=20"
    engine = await gate.get("/v1/engines/e1")
    assert engine.json()["facts"]["admission"] == "paused"
    assert engine.headers["etag"] == f'"r{paused.json()["revision"]}"'
    resumed = await gate.order("resume", {"pause_epoch": 1}, wait)
    assert (resumed.status_code, resumed.json()["state"]) == (200, "succeeded")
    stale = await gate.order("resume", {"pause_epoch": 7})
    assert (stale.status_code, stale.json()["reason"]) == (409, "STALE_PAUSE_EPOCH")
    assert gate.engine.orders == 2


async def test_waiting_ends_with_202_when_the_time_is_up(gate: Gateway) -> None:
    gate.engine.go.clear()
    answer = await gate.order("pause", {"mode": "drain"}, {"Prefer": "wait=1"})
    assert (answer.status_code, answer.json()["done"]) == (202, False)
    assert answer.headers["preference-applied"] == "wait=1"


async def test_one_key_sent_fifty_times_at_once_is_one_order(gate: Gateway) -> None:
    key = {"Idempotency-Key": "once", "Prefer": "wait=20"}
    answers = await asyncio.gather(*(gate.order("flush-caches", PREFIX, key) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert gate.engine.keys == [answers[0].json()["id"]]  # the engine sees our id as its key


async def test_a_key_stands_for_one_request(gate: Gateway) -> None:
    key = {"Idempotency-Key": "mine"}
    first = await gate.order("flush-caches", PREFIX, key)
    spelt = {**gate.auth(), "Idempotency-Key": '"mine"', "Content-Type": "application/json"}
    again = await gate.http.post(
        "/v1/engines/e1/flush-caches", content=b'{ "caches" : ["prefix"] }', headers=spelt
    )
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["idempotency-replayed"] == "true"
    for verb, body, more in (
        ("flush-caches", {**PREFIX, "reason": "other"}, {}),
        ("pause", {"mode": "drain"}, {}),
        ("flush-caches", PREFIX, {"If-Match": '"r3"'}),
    ):
        other = await gate.order(verb, body, {**key, **more})
        assert (other.status_code, other.json()["reason"]) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert other.json()["operation"] == first.json()["id"]
    prefers = await gate.order("flush-caches", PREFIX, {**key, "Prefer": "wait=5"})
    assert prefers.json()["id"] == first.json()["id"]  # Prefer is not part of the request


async def test_keys_of_different_callers_have_nothing_to_do_with_each_other(
    gate: Gateway,
) -> None:
    key = {"Idempotency-Key": "same", "Prefer": "wait=20"}
    ids = []
    for subject in ("ada", "grace"):
        answer = await gate.order(
            "flush-caches", PREFIX, {**key, **gate.auth(Scope.CACHE, subject=subject)}
        )
        ids.append(answer.json()["id"])
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("key", "status", "reason"),
    [
        (None, 400, "IDEMPOTENCY_KEY_MISSING"),
        ("", 400, "IDEMPOTENCY_KEY_MISSING"),
        ("k" * 128, 202, None),
        ("k" * 129, 400, "IDEMPOTENCY_KEY_MALFORMED"),
        ('"half', 400, "MALFORMED_REQUEST"),
        ('"a\\"b"', 202, None),
        ('" "', 400, "IDEMPOTENCY_KEY_MALFORMED"),
        ("caf\xe9".encode("latin-1"), 400, "IDEMPOTENCY_KEY_MALFORMED"),
    ],
)
async def test_the_form_of_a_key(
    gate: Gateway, key: str | bytes | None, status: int, reason: str | None
) -> None:
    headers: dict[str, Any] = gate.auth()
    if key is not None:
        headers["Idempotency-Key"] = key
    answer = await gate.http.post("/v1/engines/e1/flush-caches", json=PREFIX, headers=headers)
    assert (answer.status_code, answer.json().get("reason")) == (status, reason)


async def test_two_keys_are_refused(gate: Gateway) -> None:
    headers = [*gate.auth().items(), ("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    answer = await gate.http.post("/v1/engines/e1/flush-caches", json=PREFIX, headers=headers)
    assert (answer.status_code, answer.json()["reason"]) == (400, "MALFORMED_REQUEST")


@pytest.mark.parametrize(
    ("if_match", "in_body", "status", "reason"),
    [
        ('"r3"', None, 202, None),
        ('"r3"', 3, 202, None),
        (None, 3, 202, None),
        ("*", None, 202, None),
        ("*", 3, 202, None),
        ('"r2"', None, 412, "REVISION_MISMATCH"),
        (None, 2, 409, "REVISION_MISMATCH"),
        ("*", 2, 409, "REVISION_MISMATCH"),
        ('"r3"', 2, 400, "CONFLICTING_REVISIONS"),
        ('"r2"', 3, 400, "CONFLICTING_REVISIONS"),
        ('W/"r3"', None, 412, "PRECONDITION_FAILED"),
        ('"g3"', None, 412, "PRECONDITION_FAILED"),
        ('"anything"', None, 412, "PRECONDITION_FAILED"),
        ("r3", None, 400, "MALFORMED_PRECONDITION"),
        ('"r2", "r3"', None, 400, "MALFORMED_PRECONDITION"),
        ("", None, 400, "MALFORMED_PRECONDITION"),
        ('"r99999999999999999999"', None, 412, "PRECONDITION_FAILED"),
    ],
)
async def test_what_an_order_may_expect_of_the_revision(
    gate: Gateway, if_match: str | None, in_body: int | None, status: int, reason: str | None
) -> None:
    body = {**PREFIX, **({} if in_body is None else {"expected_revision": in_body})}
    headers = {} if if_match is None else {"If-Match": if_match}
    answer = await gate.order("flush-caches", body, headers)
    assert (answer.status_code, answer.json().get("reason")) == (status, reason)
    if status != 202:
        assert gate.engine.orders == 0


async def test_a_dry_run_answers_a_plan_and_does_nothing(gate: Gateway) -> None:
    body = {"mode": "drain", "dry_run": True}
    answer = await gate.http.post("/v1/engines/e1/pause", json=body, headers=gate.auth())
    assert answer.status_code == 200
    plan = answer.json()
    assert (plan["engine"], plan["kind"], plan["would"]) == ("e1", "pause", "accept")
    assert plan["facts_observed_at"].endswith("Z")
    assert gate.engine.orders == 0
    assert (await gate.get("/v1/operations")).json()["items"] == []
    refused = await gate.http.post(
        "/v1/engines/e1/resume", json={"pause_epoch": 4, "dry_run": True}, headers=gate.auth()
    )
    assert (refused.status_code, refused.json()["reason"]) == (409, "STALE_PAUSE_EPOCH")


async def test_a_second_exclusive_order_is_told_which_one_runs(gate: Gateway) -> None:
    gate.engine.go.clear()
    first = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    answer = await gate.order("flush-caches", PREFIX)
    assert (answer.status_code, answer.json()["reason"]) == (409, "ENGINE_BUSY")
    assert answer.json()["operation"] == first
    assert answer.json()["retryable"] is True
    assert int(answer.headers["retry-after"]) >= 1
    assert first in answer.headers["link"]


async def test_cancel_asks_and_the_end_comes_by_itself(gate: Gateway) -> None:
    gate.engine.go.clear()
    operation = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    path = f"/v1/operations/{operation}"
    async with asyncio.timeout(20):
        while (await gate.get(path)).json()["started_at"] is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    both = gate.auth(Scope.CANCEL, Scope.PAUSE)
    answer = await gate.http.post(f"{path}/cancel", json={"reason": "mistake"}, headers=both)
    assert answer.status_code == 202
    assert answer.headers["location"] == path
    ended = (await gate.get(path, Prefer="wait=20")).json()
    assert ended["state"] == "cancelled"
    again = await gate.http.post(f"{path}/cancel", headers=both)
    assert (again.status_code, again.json()["reason"]) == (409, "OPERATION_ENDED")
    actions = {(row["action"], row["outcome"]) for row in await audited(gate)}
    assert {("cancel", "accepted"), ("cancel", "refused"), ("pause", "cancelled")} <= actions


async def test_every_order_and_refusal_stands_in_the_audit(gate: Gateway) -> None:
    who = gate.auth(Scope.CACHE, Scope.READ, subject="grace")
    done = await gate.order(
        "flush-caches", {**PREFIX, "reason": "new corpus"}, {**who, "Prefer": "wait=20"}
    )
    await gate.order("flush-caches", {**PREFIX, "typo": 1}, who)  # the edge refuses it
    await gate.order("flush-caches", {**PREFIX, "expected_revision": 99}, who)  # the use case
    await gate.order("pause", {"mode": "drain"}, who)  # no scope
    rows = await audited(gate, principal="grace")
    told = [(row["action"], row["outcome"], row["reason"]) for row in reversed(rows)]
    assert told == [
        ("flush_caches", "accepted", None),
        ("flush_caches", "succeeded", None),
        ("flush_caches", "refused", "SCHEMA_VIOLATION"),
        ("flush_caches", "refused", "REVISION_MISMATCH"),
        ("pause", "denied", "INSUFFICIENT_SCOPE"),
    ]
    assert [row["scopes"] for row in rows] == [["admin:pause"], *[["admin:cache"]] * 4]
    accepted = rows[-1]
    assert accepted["operation"] == done.json()["id"]
    assert accepted["note"] == "new corpus"
    assert accepted["engine"] == "e1"
    assert accepted["source"] == "127.0.0.1"
    assert accepted["trace_id"] == done.json()["trace_id"]
    reads = await audited(gate, action="read_audit")
    assert reads[0]["outcome"] == "allowed"


async def test_a_caller_who_leaves_does_not_take_the_order_along(gate: Gateway) -> None:
    gate.engine.go.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await gate.order("pause", {"mode": "drain"}, {"Prefer": "wait=20"})
    gate.engine.go.set()
    operation = (await gate.get("/v1/operations")).json()["items"][0]["id"]
    ended = (await gate.get(f"/v1/operations/{operation}", Prefer="wait=20")).json()
    assert ended["state"] == "succeeded"


async def test_who_waits_when_the_gateway_ends_is_answered(tmp_path: Path) -> None:
    async with gateway(tmp_path / "data") as gate:
        gate.engine.go.clear()
        waiting = asyncio.create_task(gate.order("pause", {"mode": "drain"}, {"Prefer": "wait=25"}))
        async with asyncio.timeout(20):
            while not gate.engine.calls["Pause"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        gate.server.should_exit = True
        answer = await waiting
    assert (answer.status_code, answer.json()["done"]) == (202, False)


async def test_discovery_goes_to_the_engine(gate: Gateway) -> None:
    can = (await gate.get("/v1/engines/e1/capabilities")).json()
    assert can["pause_modes"] == ["abort", "drain"]
    assert can["operations"] == ["abort_requests", "flush_caches", "pause", "resume"]
    assert (await gate.get("/v1/engines/e1/models")).status_code == 200
    assert (await gate.get("/v1/engines/e1/info")).json()["engine"] == "e1"
    load = (await gate.get("/v1/engines/e1/load")).json()
    assert "running_requests" in load["load"]
    history = await gate.get("/v1/engines/e1/load?since=2026-01-01T00:00:00Z")
    assert history.status_code == 200


async def test_the_register(gate: Gateway) -> None:
    made = await gate.register("e2", labels={"team": "search"})
    assert made.status_code == 201
    assert made.headers["location"] == "/v1/engines/e2"
    assert made.json()["generation"] == 1
    again = await gate.register("e2")
    assert (again.status_code, again.json()["reason"]) == (409, "ENGINE_ALREADY_EXISTS")
    found = (await gate.get("/v1/engines?label=team%3Dsearch")).json()["items"]
    assert [engine["id"] for engine in found] == ["e2"]

    async def change(if_match: str | None, body: dict[str, Any]) -> tuple[int, str | None]:
        headers = {**gate.auth(), **({} if if_match is None else {"If-Match": if_match})}
        answer = await gate.http.patch("/v1/engines/e2", json=body, headers=headers)
        return answer.status_code, answer.json().get("reason")

    unlike = await gate.get("/v1/engines?label=search")
    assert unlike.json()["errors"] == [
        {"parameter": "label", "detail": "A label is written name=value."}
    ]
    relabel = {"labels": {"team": "ads"}}
    assert await change(None, relabel) == (428, "PRECONDITION_MISSING")
    assert await change('"g9"', relabel) == (412, "GENERATION_MISMATCH")
    assert await change('"r1"', relabel) == (412, "PRECONDITION_FAILED")
    assert await change("g1", relabel) == (400, "MALFORMED_PRECONDITION")
    assert await change("*", relabel) == (400, "MALFORMED_PRECONDITION")
    assert await change('"g1"', relabel) == (200, None)
    assert await change('"g1"', relabel) == (412, "GENERATION_MISMATCH")
    assert (await gate.get("/v1/engines/e2")).json()["labels"] == {"team": "ads"}

    async def remove(if_match: str) -> tuple[int, str]:
        headers = {**gate.auth(), "If-Match": if_match}
        answer = await gate.http.delete("/v1/engines/e2?reason=retired", headers=headers)
        return answer.status_code, answer.text

    gate.engine.go.clear()
    await gate.order("pause", {"mode": "drain"}, engine="e2")
    status, text = await remove('"g2"')
    assert status == 409
    assert "ENGINE_HAS_OPEN_OPERATION" in text
    gate.engine.go.set()
    (operation,) = (await gate.get("/v1/operations?engine=e2")).json()["items"]
    await gate.get(f"/v1/operations/{operation['id']}", Prefer="wait=20")
    assert await remove('"g2"') == (204, "")
    assert (await gate.get("/v1/engines/e2")).status_code == 404
    assert (await gate.register("e2")).status_code == 409
    assert len((await gate.get("/v1/operations?engine=e2")).json()["items"]) == 1


async def test_an_engine_is_not_registered_twice_unawares(gate: Gateway) -> None:
    at, elsewhere = gate.engine.address, "127.0.0.1:9"

    async def register(
        engine_id: str, admin: str, control: str, **more: Any
    ) -> tuple[int, list[str], str]:
        member = {"rank": 0, "admin": admin, "control": control}
        made = await gate.register(engine_id, members=[member], **more)
        faults = [] if made.is_success else made.json()["errors"]
        return made.status_code, [one["pointer"] for one in faults], made.text

    no = {"allow_shared_address": False}
    for admin, control, places in (
        (at, elsewhere, ["/members/0/admin"]),
        (elsewhere, at, ["/members/0/control"]),
        (at, at, ["/members/0/admin"]),
        (at.replace("127.0.0.1", "LOCALHOST"), at, ["/members/0/control"]),
    ):
        status, pointers, text = await register("twin", admin, control, **no)
        assert (status, pointers) == (409, places)
        assert "ENGINE_ADDRESS_TAKEN" in text
        assert "the engine e1" in text
    refused = (await gate.get("/v1/audit?action=register_engine&engine=twin")).json()["items"]
    assert {one["reason"] for one in refused} == {"ENGINE_ADDRESS_TAKEN"}
    # Whoever may not read it is not told which one it is.
    may_not_read = gate.auth(Scope.ENGINES)
    status, _, text = await register("twin", at, at, headers=may_not_read, **no)
    assert (status, "ENGINE_ADDRESS_TAKEN" in text, "the engine e1" in text) == (409, True, False)
    assert (await register("alone", elsewhere, elsewhere, **no))[0] == 201
    assert (await register("twin", at, at))[0] == 201, "it was said that they share it"

    async def change(engine_id: str, generation: int, body: dict[str, Any]) -> tuple[int, str]:
        headers = {**gate.auth(), "If-Match": f'"g{generation}"'}
        answer = await gate.http.patch(f"/v1/engines/{engine_id}", json=body, headers=headers)
        return answer.status_code, answer.json().get("reason", "")

    there = {"members": [{"rank": 0, "admin": at, "control": at}]}
    assert await change("alone", 1, there) == (409, "ENGINE_ADDRESS_TAKEN")
    assert await change("twin", 1, there) == (200, ""), "it has that address already"
    assert await change("alone", 1, {"labels": {"row": "7"}}) == (200, "")
    assert await change("alone", 2, {**there, "allow_shared_address": True}) == (200, "")


async def test_an_engine_outside_the_reach_is_not_registered(gate: Gateway) -> None:
    member = {"rank": 0, "admin": "169.254.169.254:80", "control": gate.engine.address}
    body = {"id": "e9", "members": [member]}
    answer = await gate.http.post("/v1/engines", json=body, headers=gate.auth())
    assert (answer.status_code, answer.json()["reason"]) == (422, "ADDRESS_NOT_ALLOWED")
    assert answer.json()["errors"][0]["pointer"] == "/members/0/admin"
    assert "169.254" not in answer.text
