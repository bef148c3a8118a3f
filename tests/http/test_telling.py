"""What is told of orders, of callers and of engines: lines of the log, and figures."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.auth.principal import Principal
from app.auth.tokens.errors import TokenMissing
from app.domain.scopes import Scope
from tests.backends.scripted_engine import ScriptedEngine, failed, paused, status_with_info
from tests.http.gateway import Gateway, gateway
from tests.http.test_observability import figures

pytestmark = pytest.mark.anyio

TRACES = ("1" * 32, "2" * 32)
WHO = ("request_id", "trace_id", "operation_id", "subject", "client_id", "issuer")


def lines(logged: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in logged.getvalue().splitlines()]


async def until(seen: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not seen():  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.02)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    scripted = ScriptedEngine()
    await scripted.start()
    try:
        yield scripted
    finally:
        await scripted.stop()


@pytest.fixture
async def gate(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Gateway]:
    """A gateway that looks at `e1`, an engine that can be ended, twenty times a second."""
    async with gateway(tmp_path / "data", registered=False, observe_interval_s=0.05) as made:
        member = {"rank": 0, "admin": f"127.0.0.1:{engine.port}"}
        member["control"] = member["admin"]
        body = {"id": "e1", "members": [member]}
        answer = await made.http.post("/v1/engines", json=body, headers=made.auth())
        assert answer.status_code == 201, answer.text
        await made.rooms.fleet.discover("e1")
        yield made


async def test_a_line_of_an_operation_says_whose_it_is(
    logged: io.StringIO, gate: Gateway, engine: ScriptedEngine
) -> None:
    """Also of the second, which is driven by what the first one's request has begun."""
    given = {}
    for subject, trace, verb, body in (
        ("ada", TRACES[0], "pause", {"mode": "drain"}),
        ("grace", TRACES[1], "flush-caches", {"caches": ["prefix"], "when_busy": "queue"}),
    ):
        answer = await gate.order(
            verb,
            body,
            {**gate.auth(subject=subject), "traceparent": f"00-{trace}-{'3' * 16}-01"},
        )
        assert answer.status_code == 202, answer.text
        given[answer.json()["id"]] = {
            "request_id": answer.headers["x-request-id"],
            "trace_id": trace,
            "operation_id": answer.json()["id"],
            "subject": subject,
            "client_id": "console",
            "issuer": gate.issuer.issuer,
        }
    first, _ = given
    await until(lambda: first in engine.orders)
    await engine.stop()
    await until(lambda: f"{first}: no answer" in logged.getvalue())
    await gate.http.post(f"/v1/operations/{first}/cancel", headers=gate.auth())
    told = [line for line in lines(logged) if line.get("operation_id") in given]
    assert any(first in line["event"] and "no answer" in line["event"] for line in told)
    for line in told:
        assert {name: line.get(name) for name in WHO} == given[line["operation_id"]]
    # And nothing that names one of them comes without.
    named = [line for line in lines(logged) if line["event"].startswith("operation ")]
    assert named
    assert all(line.get("operation_id") in given for line in named)


async def test_a_line_of_a_request_says_whose_it_is(
    logged: io.StringIO, gate: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_more(token: str) -> Principal:
        raise TokenMissing

    headers = {**gate.auth(subject="grace"), "Accept": "text/event-stream"}
    rooms, state = gate.rooms, gate.server.lifespan.state
    quick = replace(rooms, edge=replace(rooms.edge, stream_look_s=0.01))
    monkeypatch.setitem(state, "rooms", quick)
    async with gate.http.stream("GET", "/v1/events", headers=headers) as stream:
        heard = stream.aiter_lines()
        await anext(heard)
        monkeypatch.setattr(state["gate"].verifier, "verify", no_more)
        async for _ in heard:
            pass
    mine = [
        line for line in lines(logged) if line.get("request_id") == stream.headers["x-request-id"]
    ]
    assert "stream_ended" in {line["event"] for line in mine}
    whose = {(line["subject"], line["client_id"], line["issuer"]) for line in mine}
    assert whose == {("grace", "console", gate.issuer.issuer)}


async def test_an_engine_that_is_away_is_a_line_and_not_one_for_each_look(
    logged: io.StringIO, gate: Gateway, engine: ScriptedEngine
) -> None:
    port = engine.port
    await engine.stop()

    def vain() -> float:
        samples = [
            sample.value
            for family in gate.rooms.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "chadburn_engine_calls_total"
            and sample.labels["code"] == "UNAVAILABLE"
        ]
        return sum(samples)

    await until(lambda: vain() > 30)
    events = [line["event"] for line in lines(logged)]
    said = [event for event in events if event.startswith("engine ")]
    # One for each of its two addresses, and one that its health is another.
    assert 1 <= len(said) <= 3, said
    await engine.start(port)
    await until(lambda: "it answers again" in logged.getvalue())


async def test_calls_to_engines_are_counted_by_how_they_ended(
    gate: Gateway, engine: ScriptedEngine
) -> None:

    done = await gate.order("pause", {"mode": "drain"})
    await until(lambda: done.json()["id"] in engine.orders)
    engine.orders[done.json()["id"]].tell(paused())
    await ended(gate, done.json()["id"])
    engine.script.refusals = [status_with_info(grpc.StatusCode.INTERNAL, "X")]
    # A reply that says nothing certain: it is asked, and sent again.
    again = await gate.order("flush-caches", {"caches": ["prefix"]})
    await until(lambda: again.json()["id"] in engine.orders)
    engine.orders[again.json()["id"]].tell(failed())
    await ended(gate, again.json()["id"])
    found = await figures(gate)
    for method, code in (
        ("GetAdminProfile", "OK"),
        ("Pause", "OK"),
        ("FlushCaches", "INTERNAL"),
    ):
        of = f'dialect="openengine",method="OpenEngineAdmin/{method}"'
        (counted,) = [
            value
            for name, value in found.items()
            if name.startswith("chadburn_engine_calls_total") and method in name and code in name
        ]
        assert counted >= 1
        assert found[f"chadburn_engine_call_duration_seconds_count{{{of}}}"] >= counted


async def ended(gate: Gateway, operation_id: str) -> None:
    answer = await gate.get(f"/v1/operations/{operation_id}")
    while not answer.json()["done"]:
        await asyncio.sleep(0.02)
        answer = await gate.get(f"/v1/operations/{operation_id}")


async def test_a_lease_is_held_as_long_as_there_is_something_to_drive(
    gate: Gateway, engine: ScriptedEngine
) -> None:
    assert (await figures(gate))["chadburn_leases_held"] == 0
    given = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    await until(lambda: given in engine.orders)
    assert (await figures(gate))["chadburn_leases_held"] == 1
    engine.orders[given].tell(paused())
    while (await figures(gate))["chadburn_leases_held"]:  # noqa: ASYNC110 - nor have figures
        await asyncio.sleep(0.02)
    found = await figures(gate)
    assert found["chadburn_leases_lost_total"] == found["chadburn_leases_taken_over_total"] == 0


async def test_what_a_stream_sends_is_counted_with_how_late_it_was(
    gate: Gateway, engine: ScriptedEngine
) -> None:
    given = (await gate.order("pause", {"mode": "drain"})).json()["id"]
    await until(lambda: given in engine.orders)
    headers = {**gate.auth(), "Accept": "text/event-stream"}
    async with gate.http.stream("GET", f"/v1/operations/{given}/events", headers=headers) as stream:
        heard = stream.aiter_lines()
        await anext(heard)
        before = (await figures(gate))["chadburn_stream_lag_seconds_count"]
        engine.orders[given].tell(paused())
        said = [line async for line in heard if line.startswith("event: ")]
    assert said[-1] == "event: completed"
    counted = (await figures(gate))["chadburn_stream_lag_seconds_count"]
    # Those of before the stream was there are no lag of it.
    assert 1 <= counted - before < len(said)


async def test_callers_who_may_are_counted_by_what_it_takes(gate: Gateway) -> None:
    await gate.http.get("/v1/engines", headers=gate.auth(Scope.READ))
    before = await figures(gate)
    await gate.http.get("/v1/engines", headers=gate.auth(Scope.READ))
    refused = await gate.order("pause", {"mode": "drain"}, gate.auth(Scope.READ))
    assert refused.status_code == 403
    found = await figures(gate)
    read = 'chadburn_auth_admitted_total{scope="admin:read"}'
    assert found[read] == before[read] + 2  # the figures themselves take it too
    assert 'chadburn_auth_admitted_total{scope="admin:pause"}' not in found
