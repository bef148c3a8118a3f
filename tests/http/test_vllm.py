"""Engines of dialect `vllm` over HTTP: what is offered, what is not, and an update in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.doubles.vllm_control import RunningControl, running_controls
from tests.http.gateway import Gateway, gateway

pytestmark = pytest.mark.anyio

V = "llm"
WAIT = {"Prefer": "wait=20"}


@pytest.fixture
async def members() -> AsyncIterator[list[RunningControl]]:
    async with running_controls(2) as running:
        yield running


@pytest.fixture
async def gate(tmp_path: Path, members: list[RunningControl]) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path / "data") as made:
        answer = await made.http.post(
            "/v1/engines",
            json={
                "id": V,
                "dialect": "vllm",
                "members": [
                    {"rank": rank, "admin": one.address, "control": one.address}
                    for rank, one in enumerate(members)
                ],
            },
            headers=made.auth(),
        )
        assert answer.status_code == 201, answer.text
        await made.rooms.fleet.discover(V)
        yield made


async def carried_out(gate: Gateway, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await gate.order(verb, body, WAIT, V)
    assert answer.status_code == 200, answer.text
    ended = cast("dict[str, Any]", answer.json())
    assert ended["state"] == "succeeded", ended
    return ended


async def test_an_engine_is_driven_over_http(gate: Gateway, members: list[RunningControl]) -> None:
    engine = (await gate.get(f"/v1/engines/{V}")).json()
    assert (engine["dialect"], engine["revision"]) == ("vllm", 1)
    assert engine["revision_source"] == "gateway"
    info = (await gate.get(f"/v1/engines/{V}/info")).json()["info"]
    assert [member["rank"] for member in info["members"]] == [0, 1]
    paused = await carried_out(gate, "pause", {"mode": "keep"})
    assert paused["result"] == {"changed": True, "pause_epoch": 1}
    begun = await gate.order(
        "update-weights",
        {
            "source": {
                "session": {
                    "session_id": "s",
                    "begin": {
                        "nccl": {
                            "address": "127.0.0.1",
                            "port": 29500,
                            "world_size": 3,
                            "rank_offset": 1,
                        }
                    },
                }
            },
            "weight_version": "v7",
            "cache_policy": "flush",
            "under_pause": {"pause_epoch": 1},
        },
        engine=V,
    )
    assert begun.status_code == 202, begun.text
    tensor = {"name": "w", "dtype": "bfloat16", "shape": [2, 3]}
    piece = {"session": {"session_id": "s", "chunk": {"index": 0, "nccl": {"tensors": [tensor]}}}}
    staged = await gate.order("update-weights", {"source": piece}, WAIT, V)
    assert staged.status_code == 200, staged.text
    await carried_out(
        gate,
        "update-weights",
        {"source": {"session": {"session_id": "s", "commit": {"chunks": 1}}}},
    )
    version = (await gate.get(f"/v1/engines/{V}/weight-version")).json()
    assert (version["version"], version["state"]) == ("v7", "valid")
    await carried_out(gate, "resume", {"pause_epoch": 1})
    assert all(one.control.generate() == "tokens" for one in members)
    named = {"source": {"disk": {"path": "/m"}}, "weight_version": "v8", "cache_policy": "flush"}
    answer = await gate.order("update-weights", {**named, "pause": "drain"}, engine=V)
    assert answer.status_code == 501
    ended = await carried_out(gate, "shutdown", {})
    assert ended["result"] == {"changed": True}
    await gate.rooms.fleet.reread(V, 5.0)
    assert (await gate.get(f"/v1/engines/{V}")).json()["health"]["state"] == "unreachable"


@pytest.mark.long
async def test_what_vllm_has_no_call_for_is_not_offered(
    gate: Gateway, members: list[RunningControl]
) -> None:
    orders: list[tuple[str, dict[str, Any]]] = [
        ("flush-caches", {"caches": ["prefix"]}),
        ("profiles", {"profiler": "torch"}),
        ("reconfigure", {"role": "prefill", "drain": "wait"}),
        ("abort-requests", {"all": True}),
        ("release-resources", {"resources": ["kv_cache"], "content": "discard", "drain": "abort"}),
    ]
    for verb, body in orders:
        answer = await gate.order(verb, body, engine=V)
        assert answer.status_code == 501, (verb, answer.text)
        assert answer.json()["reason"] == "UNSUPPORTED_OPERATION"
    assert (await gate.get(f"/v1/engines/{V}/load")).status_code == 501
    plan = await gate.order("pause", {"mode": "drain", "dry_run": True}, engine=V)
    assert plan.json()["revision_source"] == "gateway"
    assert all(one.control.orders == [] for one in members)
    # An engine of the other dialect can't be ended this way.
    assert (await gate.order("shutdown", {})).status_code == 501


@pytest.mark.long
async def test_members_have_ranks_without_a_gap(gate: Gateway) -> None:
    body: dict[str, Any] = {
        "id": "other",
        "dialect": "vllm",
        "members": [{"rank": 1, "admin": "127.0.0.1:1", "control": "127.0.0.1:1"}],
    }
    answer = await gate.http.post("/v1/engines", json=body, headers=gate.auth())
    assert answer.status_code in (400, 422)
    assert answer.json()["errors"][0]["pointer"] == "/members"
    body["members"] = [
        {"rank": 0, "admin": "127.0.0.1:1", "control": "127.0.0.1:1"},
        {"rank": 1, "admin": "127.0.0.1:1", "control": "192.0.2.1:1"},
    ]
    answer = await gate.http.post("/v1/engines", json=body, headers=gate.auth())
    assert answer.json()["errors"][0]["pointer"] == "/members"
    body["members"][1]["admin"] = "127.0.0.1:2"
    answer = await gate.http.post("/v1/engines", json=body, headers=gate.auth())
    assert answer.json()["errors"][0]["pointer"] == "/members/1/control"


@pytest.mark.long
async def test_one_process_is_no_two_members(gate: Gateway, members: list[RunningControl]) -> None:
    for one in members:
        one.control.instance_id = "the-same"
    await gate.rooms.fleet.reread(V, 5.0)
    assert (await gate.get(f"/v1/engines/{V}")).json()["health"]["state"] == "degraded"
