"""A gateway with a policy: what each caller sees, may do, and cannot tell from nothing."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.domain.scopes import Scope
from app.http.route import EdgeRoute
from app.startup import StartupRefused
from tests.http.gateway import Gateway, gateway
from tests.streams.reading import Heard, Reader, watching

pytestmark = pytest.mark.anyio

NOBODY = "0198c5f1-0000-7000-8000-000000000000"
SEARCH = {"team": "search", "env": "prod"}
ADS = {"team": "ads", "env": "prod"}
FLUSH = {"caches": ["prefix"]}
SETTLED = {"outcome": "failed", "reason": "seen"}


def policy(issuer: str, search: str = "search") -> str:
    """`ada` may do everything; who is in `search` much with that team's engines, and with its
    development ones a little more."""
    return f"""
require_reason = ["pause"]
[[rules]]
name = "root"
who = {{ issuer = "{issuer}", subject = "ada" }}
scopes = "as_granted"
engines = "all"
[[rules]]
name = "search"
who = {{ issuer = "{issuer}", group = "search" }}
scopes = ["admin:read", "admin:cache", "admin:pause", "admin:cancel", "admin:engines",
          "admin:audit", "admin:profile", "admin:settle"]
engines = {{ labels = {{ team = "{search}" }} }}
[[rules]]
name = "search, development"
who = {{ issuer = "{issuer}", group = "search" }}
scopes = ["admin:abort"]
engines = {{ labels = {{ team = "{search}", env = "dev" }} }}
"""


@pytest.fixture
async def ruled(tmp_path: Path) -> AsyncIterator[Gateway]:
    """Two engines: `ads-1`, and `search-1`, which alone `bob` may see."""
    async with gateway(tmp_path / "data", registered=False, policy=policy) as gate:
        for engine_id, labels in (("ads-1", ADS), ("search-1", SEARCH)):
            assert (await gate.register(engine_id, labels=labels)).status_code == 201
            await gate.rooms.fleet.discover(engine_id)
        yield gate


def bob(gate: Gateway, *scopes: str, **more: Any) -> dict[str, str]:
    return gate.auth(*scopes, subject="bob", groups=["search"], **more)


async def flush(gate: Gateway, engine: str, headers: dict[str, str] | None = None) -> str:
    sent = {"Prefer": "wait=20", **(headers or {})}
    answer = await gate.order("flush-caches", FLUSH, sent, engine=engine)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def told(answer: httpx2.Response) -> tuple[int, dict[str, Any], dict[str, str]]:
    """All of a refusal that does not change from call to call."""
    own = ("instance", "request_id", "trace_id")
    body = {name: value for name, value in answer.json().items() if name not in own}
    varying = ("x-request-id", "date")
    headers = {name: value for name, value in answer.headers.items() if name not in varying}
    return answer.status_code, body, headers


def replace_policy(gate: Gateway, text: str) -> None:
    path = gate.server.lifespan.state["gate"].policy._path
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


async def test_an_engine_out_of_sight_is_as_one_that_is_not_there(ruled: Gateway) -> None:
    """On every route that names an engine or an operation, without a call to the engine."""
    operation = await flush(ruled, "ads-1")
    before = dict(ruled.engine.calls)
    compared = 0
    for route in ruled.app.routes:
        assert isinstance(route, EdgeRoute)
        if "{engine}" not in route.path and "{operation}" not in route.path:
            continue
        for method in sorted(route.methods or ()):
            answers = []
            for engine, known in (("ads-1", operation), ("nothing-1", NOBODY)):
                path = route.path_format.replace("{engine}", engine).replace("{operation}", known)
                path = path.replace("{profile}", known).replace("{name}", "sql")
                body = SETTLED if path.endswith("/settle") else None  # which is judged first
                answer = await ruled.http.request(method, path, headers=bob(ruled), json=body)
                answers.append(told(answer))
            assert answers[0] == answers[1], (method, route.path)
            if "abort" not in route.path:  # its scope is left on engines of other labels only
                assert answers[0][0] in (403, 404), (method, route.path)
            compared += 1
    assert compared > 25
    assert dict(ruled.engine.calls) == before


async def test_lists_hold_what_is_in_sight(ruled: Gateway) -> None:
    seen = [await flush(ruled, "search-1") for _ in range(3)]
    await flush(ruled, "ads-1")
    seen.append(await flush(ruled, "search-1"))
    who = bob(ruled)
    engines = (await ruled.http.get("/v1/engines", headers=who)).json()["items"]
    assert [engine["id"] for engine in engines] == ["search-1"]
    assert (await ruled.http.get("/v1/engines?label=team=ads", headers=who)).json()["items"] == []

    found, path = [], "/v1/operations?page_size=3"
    while path:
        answer = await ruled.http.get(path, headers=who)
        found += [operation["id"] for operation in answer.json()["items"]]
        path = answer.links["next"]["url"] if "next" in answer.links else ""
    assert found == seen[::-1]
    named = await ruled.http.get("/v1/operations?engine=ads-1", headers=who)
    assert named.json() == {"items": [], "next_page_token": None}

    as_csv = {**who, "Accept": "text/csv"}
    rows = csv.DictReader(
        io.StringIO((await ruled.http.get("/v1/operations", headers=as_csv)).text)
    )
    assert [row["id"] for row in rows] == seen[::-1]
    for path in ("/v1/audit", "/v1/audit?engine=ads-1"):
        text = (await ruled.http.get(path, headers=as_csv)).text
        assert "ads-1" not in text
        entries = (await ruled.http.get(path, headers=who)).json()["items"]
        assert {entry["engine"] for entry in entries} <= {"search-1"}
    assert entries == []

    page = await ruled.http.get("/v1/events?after=0", headers={**who, "Accept": "application/json"})
    assert {event["operation"] for event in page.json()["items"]} == set(seen)
    figures = (await ruled.http.get("/metrics", headers=who)).text
    assert 'engine="search-1"' in figures
    assert "ads-1" not in figures
    assert "chadburn_http_requests_total" in figures


async def test_what_is_left_on_one_engine_is_refused_on_another(ruled: Gateway) -> None:
    assert (await ruled.register("search-2", labels={**SEARCH, "env": "dev"})).status_code == 201
    await ruled.rooms.fleet.discover("search-2")
    body, who = {"request_ids": ["r"]}, bob(ruled)
    refused = await ruled.order("abort-requests", body, who, engine="search-1")
    assert (refused.status_code, refused.json()["reason"]) == (403, "REFUSED_BY_POLICY")
    assert "www-authenticate" not in refused.headers  # no other token would do
    allowed = await ruled.order("abort-requests", body, who, engine="search-2")
    assert allowed.status_code == 202
    lacking = await ruled.order("abort-requests", body, bob(ruled, "admin:read"), engine="search-2")
    assert (lacking.status_code, lacking.json()["reason"]) == (403, "INSUFFICIENT_SCOPE")
    frozen = {**FLUSH, "override_freeze": True}
    assert (await ruled.order("flush-caches", frozen, who, engine="search-1")).status_code == 202


async def test_who_meets_no_rule_may_do_nothing(ruled: Gateway) -> None:
    eve = ruled.auth(subject="eve")
    for path in ("/v1/me", "/v1/engines", "/v1/operations", "/v1/audit", "/v1/events", "/metrics"):
        answer = await ruled.http.get(path, headers=eve)
        assert (answer.status_code, answer.json()["reason"]) == (403, "REFUSED_BY_POLICY"), path
    rows = (await ruled.get("/v1/audit?action=read_me")).json()["items"]
    assert [(row["outcome"], row["principal"]["subject"]) for row in rows] == [("denied", "eve")]


async def test_who_asks_is_told_what_is_left_where(ruled: Gateway) -> None:
    me = (await ruled.http.get("/v1/me", headers=bob(ruled, "admin:read", "admin:abort"))).json()
    assert me["groups"] == ["search"]
    assert me["scopes"] == ["admin:abort", "admin:read"]
    team = {"id": None, "labels": {"team": ["search"]}, "without": {}}
    dev = {"id": None, "labels": {"env": ["dev"], "team": ["search"]}, "without": {}}
    assert me["permissions"] == [
        {"scopes": ["admin:read"], "engines": team},
        {"scopes": ["admin:abort"], "engines": dev},
    ]
    root = (await ruled.http.get("/v1/me", headers=ruled.auth("admin:read"))).json()
    everything: dict[str, Any] = {"id": None, "labels": {}, "without": {}}
    assert root["permissions"] == [{"scopes": ["admin:read"], "engines": everything}]


async def test_engines_are_registered_within_the_own_labels(ruled: Gateway) -> None:
    who = bob(ruled)

    async def register(engine_id: str, labels: dict[str, str], address: str) -> httpx2.Response:
        members = [{"rank": 0, "admin": address, "control": address}]
        return await ruled.register(engine_id, who, labels=labels, members=members)

    for labels in ({}, ADS, {"team": "Search"}):
        answer = await register("mine", labels, "127.0.0.1:9")
        assert (answer.status_code, answer.json()["reason"]) == (403, "REFUSED_BY_POLICY")
    # Another's engine does not become one's own by another name.
    answer = await register("mine", SEARCH, ruled.engine.address)
    assert (answer.status_code, answer.json()["reason"]) == (403, "REFUSED_BY_POLICY")
    assert (await register("mine", SEARCH, "127.0.0.1:9")).status_code == 201


async def test_other_labels_neither_take_an_engine_away_nor_give_more(ruled: Gateway) -> None:
    who = bob(ruled)

    async def change(body: dict[str, Any], generation: int) -> httpx2.Response:
        headers = {**who, "If-Match": f'"g{generation}"'}
        return await ruled.http.patch("/v1/engines/search-1", json=body, headers=headers)

    for labels in ({}, ADS, {"team": "search", "env": "dev"}):  # away, away, and to more scopes
        answer = await change({"labels": labels}, 1)
        assert (answer.status_code, answer.json()["reason"]) == (403, "REFUSED_BY_POLICY")
    assert (await change({"labels": {"team": "search", "row": "7"}}, 7)).status_code == 412
    elsewhere = [{"rank": 0, "admin": "127.0.0.1:9", "control": "127.0.0.1:9"}]
    moved = await change({"labels": {"team": "search", "row": "7"}, "members": elsewhere}, 1)
    assert (moved.status_code, moved.json()["generation"]) == (200, 2)
    taken = [{"rank": 0, "admin": ruled.engine.address, "control": ruled.engine.address}]
    answer = await change({"members": taken}, 2)
    assert (answer.status_code, answer.json()["reason"]) == (403, "REFUSED_BY_POLICY")


async def test_a_key_is_no_way_to_an_engine_out_of_sight(ruled: Gateway) -> None:
    sent = {**bob(ruled), **ruled.key()}
    await flush(ruled, "search-1", sent)
    again = await ruled.order("flush-caches", FLUSH, sent, engine="search-1")
    assert again.headers["idempotency-replayed"] == "true"
    moved = {**ruled.auth(), "If-Match": '"g1"'}
    body = {"labels": ADS}
    assert (await ruled.http.patch("/v1/engines/search-1", json=body, headers=moved)).is_success
    gone = await ruled.order("flush-caches", FLUSH, sent, engine="search-1")
    never = await ruled.order("flush-caches", FLUSH, sent, engine="nothing-1")
    assert told(gone) == told(never)
    assert gone.status_code == 404


async def test_a_reason_where_the_policy_demands_one(ruled: Gateway) -> None:
    for reason in ({}, {"reason": " "}, {"reason": " ", "dry_run": True}):
        answer = await ruled.order("pause", {"mode": "drain", **reason}, engine="search-1")
        assert (answer.status_code, answer.json()["reason"]) == (422, "REASON_REQUIRED")
        assert answer.json()["errors"][0]["pointer"] == "/reason"
    body = {"mode": "drain", "reason": "new weights"}
    assert (await ruled.order("pause", body, engine="search-1")).status_code == 202


async def test_the_policy_says_whether_programs_settle(tmp_path: Path) -> None:
    """And where it says nothing the setting does."""
    for said, setting, status in (
        ("", True, 404),
        ("", False, 403),
        ("clients_may_settle = false\n", True, 403),
        ("clients_may_settle = true\n", False, 404),
    ):
        folder = tmp_path / f"{len(said)}-{setting}"
        folder.mkdir()
        async with gateway(
            folder / "data",
            registered=False,
            policy=lambda issuer, said=said: said + policy(issuer),  # type: ignore[misc]
            clients_may_settle=setting,
        ) as gate:
            program = gate.auth(subject="console", groups=["search"])
            path = f"/v1/operations/{NOBODY}/settle"
            assert (await gate.http.post(path, json=SETTLED, headers=program)).status_code == status


async def next_of(reader: Reader, events: AsyncIterator[Heard], *types: str) -> Heard:
    async for event in events:
        if event.type in types:
            return event
    raise AssertionError(f"the stream ended without {types}")


async def test_a_stream_tells_of_what_is_in_sight_and_begins_anew_when_that_changes(
    ruled: Gateway,
) -> None:
    async with watching(ruled, "/v1/events", headers=bob(ruled)) as reader:
        events = aiter(reader)
        snapshot = await next_of(reader, events, "snapshot")
        assert [engine["id"] for engine in snapshot.data["engines"]] == ["search-1"]
        hidden, shown = await flush(ruled, "ads-1"), await flush(ruled, "search-1")
        heard = [await anext(events)]
        while heard[-1].type != "completed":
            heard.append(await anext(events))
        assert {event.data["operation"] for event in heard} == {shown}
        assert [event.data["sequence"] for event in heard] == list(range(1, len(heard) + 1))

        # An engine that is registered while the stream is open has no past to be told.
        assert (await ruled.register("search-2", labels=SEARCH)).status_code == 201
        await ruled.rooms.fleet.discover("search-2")
        fresh = await flush(ruled, "search-2")
        completed = await next_of(reader, events, "completed", "reset")
        assert (completed.type, completed.data["operation"]) == ("completed", fresh)

        replace_policy(ruled, policy(ruled.issuer.issuer, search="ads"))
        reset = await next_of(reader, events, "reset")
        assert reset.data["reason"] == "sight_changed"
        snapshot = await next_of(reader, events, "snapshot")
        assert [engine["id"] for engine in snapshot.data["engines"]] == ["ads-1"]
        assert (
            await ruled.http.get(f"/v1/operations/{shown}", headers=bob(ruled))
        ).status_code == 404
        assert (await ruled.http.get(f"/v1/operations/{hidden}", headers=bob(ruled))).is_success

        replace_policy(ruled, policy(ruled.issuer.issuer).replace('"search"', '"nobody"'))
        goodbye = await next_of(reader, events, "goodbye", "reset")
        assert (goodbye.type, goodbye.data["reason"]) == ("goodbye", "permission_lost")


async def test_a_broken_file_changes_nothing_but_what_is_said_of_it(ruled: Gateway) -> None:
    good = policy(ruled.issuer.issuer)
    replace_policy(ruled, good.replace("admin:read", "admin:reed"))
    assert await ready_says(ruled, "degraded")
    figures = (await ruled.get("/metrics")).text
    assert "chadburn_policy_refused 1.0" in figures
    assert 'chadburn_policy_reads_total{outcome="refused"} 1.0' in figures
    assert (await ruled.http.get("/v1/engines", headers=bob(ruled))).status_code == 200
    replace_policy(ruled, good)
    assert await ready_says(ruled, "ready")
    assert "chadburn_policy_refused 0.0" in (await ruled.get("/metrics")).text
    entries = await entries_of(ruled, "load_policy", 3)
    assert [entry["outcome"] for entry in entries] == ["accepted", "refused", "accepted"]
    whole, broken, first = (entry["detail"] for entry in entries)
    assert whole["sha256"] == first["sha256"] == hashlib.sha256(good.encode()).hexdigest()
    assert broken["sha256"] != whole["sha256"]
    assert entries[1]["reason"] == "POLICY_REFUSED"
    assert [fault.partition(":")[0] for fault in broken["faults"]] == ["rules[2].scopes[1]"]
    assert whole["gateway"] == first["gateway"]


async def entries_of(gate: Gateway, action: str, count: int) -> list[dict[str, Any]]:
    """Newest first, once there are so many."""
    async with asyncio.timeout(60):
        while True:
            answer = await gate.get(f"/v1/audit?action={action}")
            items: list[dict[str, Any]] = answer.json()["items"]
            if len(items) >= count:
                return items
            await asyncio.sleep(0.1)


async def ready_says(gate: Gateway, status: str) -> bool:
    """Once the file was looked at."""
    async with asyncio.timeout(60):
        while True:
            answer = await gate.http.get("/readyz")
            assert answer.status_code == 200
            if answer.json() == {"status": status}:
                return True
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "rules: there are none"),
        ("[[rules]]\nname = 'a'\nwho = 'anyone'\nscopes = '*'\nengines = 'all'", "rules[1].scopes"),
        (policy("https://other.example"), "rules[1].who.issuer"),
    ],
)
async def test_a_gateway_does_not_start_with_a_policy_that_has_a_fault(
    tmp_path: Path, text: str, place: str
) -> None:
    with pytest.raises(StartupRefused) as refused:
        async with gateway(tmp_path / "data", policy=lambda issuer: text):
            pass
    assert place in refused.value.line
    assert refused.value.exit_code == 2


async def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(StartupRefused, match=r"policy_file .*gone\.toml: file: can't be read"):
        async with gateway(tmp_path / "data", policy_file=tmp_path / "gone.toml"):
            pass


async def test_without_a_policy_tokens_hold_on_every_engine(gate: Gateway) -> None:
    assert (await gate.register("e2", labels=ADS)).status_code == 201
    answer = await gate.http.get("/v1/engines", headers=gate.auth(Scope.READ, groups=["x"]))
    assert [engine["id"] for engine in answer.json()["items"]] == ["e1", "e2"]
