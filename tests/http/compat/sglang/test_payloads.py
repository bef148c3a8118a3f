"""Tensors that a trainer has pickled: passed on where the gateway and the sidecar both allow it and
the caller has the scope, once each, and shown nowhere."""

from __future__ import annotations

import asyncio
import io
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.domain.engine_payloads import SGLANG_TENSORS
from app.domain.scopes import Scope
from app.observability.log import configure_logging
from tests.doubles.engine_http import Hang
from tests.doubles.sglang_http import SglangDouble
from tests.doubles.sglang_payloads import in_base64, pickled
from tests.doubles.sglang_trainers import (
    by_tensors_in_bounds,
    slime_by_tensors,
    verl_by_tensors,
)
from tests.doubles.trainers import Wire
from tests.enginekit.client import until
from tests.http.compat.calling import Calling, registered
from tests.http.gateway import ENGINE_ID, EVERYTHING, gateway
from tests.sidecars.checkpoints import NAMES
from tests.sidecars.sglang.running import served

pytestmark = pytest.mark.anyio

TENSOR = "/update_weights_from_tensor"
MARK = "canary0weights0yranac"
NAMED: dict[str, Any] = {"engine_payloads": ({"engines": (ENGINE_ID,)},)}
SAFE = tuple(one for one in EVERYTHING if one is not Scope.WEIGHTS_UNSAFE)


def buckets(step: str) -> list[list[str]]:
    return [[in_base64(pickled({name: (2, 2)}, f"/{MARK}_{step}_{name}"))] for name in NAMES]


@dataclass
class Passing(Calling):
    sglang: SglangDouble
    data: Path

    @property
    def sent(self) -> list[list[str]]:
        found = self.sglang.bodies(TENSOR)
        return [one["serialized_named_tensors"] for one in found]

    async def updates(self) -> list[dict[str, Any]]:
        page = await self.gate.get("/v1/operations?kind=update_weights&page_size=100")
        return list(reversed(page.json()["items"]))


@asynccontextmanager
async def passing(
    tmp_path: Path, *, pickled: bool = True, **settings: Any
) -> AsyncIterator[Passing]:
    compat = {"layer": "sglang", "engines": (ENGINE_ID,)}
    data = tmp_path / "gateway"
    async with (
        served(tmp_path, pickled=pickled) as it,
        gateway(data, registered=False, compat=(compat,), **settings) as gate,
        registered(gate, "sglang", it.sidecar.admin_address) as http,
    ):
        yield Passing(gate, http, it.sglang, data)


@pytest.fixture
async def on(tmp_path: Path) -> AsyncIterator[Passing]:
    async with passing(tmp_path, **NAMED) as made:
        yield made


@pytest.mark.parametrize("times", [2, pytest.param(1, marks=pytest.mark.long)])
async def test_trainers(on: Passing, times: int) -> None:
    """Each in its own sequence, with every call sent again; each bucket reaches the engine once."""
    wire = Wire(on.http, times)
    await verl_by_tensors(wire, "verl-1", buckets("verl"))
    assert await slime_by_tensors(wire, "slime-1", buckets("slime")) == "slime-1"
    await by_tensors_in_bounds(Wire(on.http), "bounds-1", buckets("bounds"))
    expected = [one for step in ("verl", "slime", "bounds") for one in buckets(step)]
    assert on.sent == expected
    told = [(one["state"], one["result"]["weight_version"]) for one in await on.updates()
            if one["state"] == "succeeded"]  # fmt: skip
    assert told == [("succeeded", f"{name}-1") for name in ("verl", "slime", "bounds")]
    assert (await on.http.get("ready")).status_code == 200
    assert not on.sglang.model.dead


async def test_calls_at_once_and_late_repetitions_reach_the_engine_once(on: Passing) -> None:
    await on.does("pause_generation", {})
    first, *others = [{"serialized_named_tensors": one} for one in buckets("x")]
    done = await asyncio.gather(*(on.http.post(TENSOR[1:], json=first) for _ in range(3)))
    assert [one.status_code for one in done] == [200] * 3, [one.text for one in done]
    for body in (*others, first, *others):  # a repetition that others have overtaken
        assert await on.does(TENSOR[1:], body) == {"success": True, "message": "Success"}
    assert on.sent == buckets("x")
    await on.does("continue_generation", {})
    # And in another update, where the same handles would be gone.
    await on.does("pause_generation", {})
    again = await on.http.post(TENSOR[1:], json=first)
    assert (again.status_code, again.json()["success"]) == (400, False)
    await on.does("continue_generation", {})
    assert on.sent == buckets("x")
    assert not on.sglang.model.dead


async def test_a_lost_reply_leaves_weights_that_serve_nobody(on: Passing) -> None:
    """Until an update has gone well as a whole. The same bucket is not tried again."""
    await on.does("pause_generation", {})
    body = {"serialized_named_tensors": buckets("lost")[0], "weight_version": "lost"}
    on.sglang.next(TENSOR, Hang())
    calling = asyncio.create_task(on.http.post(TENSOR[1:], json=body))
    await until(lambda: bool(on.sent), 20)
    (update,) = await on.updates()
    await on.gate.http.post(
        f"/v1/operations/{update['id']}/cancel", headers=on.gate.auth(), json={}
    )
    assert (await calling).status_code == 400
    assert (await on.http.post("continue_generation", json={})).status_code == 400
    facts = (await on.gate.get(f"/v1/engines/{ENGINE_ID}")).json()["facts"]
    assert facts["weights"]["state"] == "inconsistent"
    assert (await on.http.post(TENSOR[1:], json=body)).status_code == 400
    assert on.sent == [buckets("lost")[0]]
    for bucket in buckets("anew"):
        await on.does(TENSOR[1:], {"serialized_named_tensors": bucket, "weight_version": "anew"})
    await on.does("continue_generation", {})
    latest = (await on.updates())[-1]
    # That it was all of them is the caller's word.
    assert (latest["state"], latest["verification"]) == ("succeeded", "unverified")
    assert "PAYLOAD_NOT_READ" in [one["reason"] for one in latest["warnings"]]
    assert (await on.http.get("ready")).status_code == 200


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({}, 400),
        ({"serialized_named_tensors": []}, 400),
        ({"serialized_named_tensors": [""]}, 400),
        ({"serialized_named_tensors": ["!"]}, 400),
        ({"serialized_named_tensors": ["gASV"]}, 400),
        ({"serialized_named_tensors": [*buckets("a")[0], *buckets("b")[0]]}, 400),
        ({"serialized_named_tensors": buckets("a")[0], "load_format": "bogus"}, 400),
    ],
)
async def test_what_would_end_the_engine_is_not_sent(
    on: Passing, wrong: dict[str, Any], status: int
) -> None:
    await on.does("pause_generation", {})
    refused = await on.http.post(TENSOR[1:], json=wrong)
    assert refused.status_code == status, refused.text
    assert on.sent == []
    await on.does("continue_generation", {})
    assert (await on.http.get("ready")).status_code == 200


@pytest.mark.long
async def test_without_a_pause_or_a_begin_nothing_is_sent(on: Passing) -> None:
    refused = await on.http.post(TENSOR[1:], json={"serialized_named_tensors": buckets("a")[0]})
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert on.sent == []


def begin(**more: Any) -> dict[str, Any]:
    way = {"engine_payload": {"format": SGLANG_TENSORS}}
    return {
        "source": {"session": {"session_id": "s", "begin": way}},
        "weight_version": "v2",
        "under_pause": {},
        **more,
    }


def chunk(*parts: str) -> dict[str, Any]:
    own = {"parts": list(parts)}
    return {
        "source": {"session": {"session_id": "s", "chunk": {"index": 0, "engine_payload": own}}}
    }


async def test_a_caller_without_the_scope_sends_nothing(on: Passing) -> None:
    lacking = on.gate.auth(*SAFE)
    body = {"serialized_named_tensors": buckets("a")[0]}
    await on.does("pause_generation", {})
    refused = await on.http.post(TENSOR[1:], json=body, headers=lacking)
    assert refused.status_code == 403
    assert Scope.WEIGHTS_UNSAFE in refused.json()["error"]
    for order in (begin(), chunk(*body["serialized_named_tensors"])):
        headers = {**lacking, **on.gate.key()}
        path = f"/v1/engines/{ENGINE_ID}/update-weights"
        native = await on.gate.http.post(path, json=order, headers=headers)
        assert (native.status_code, native.json()["reason"]) == (403, "INSUFFICIENT_SCOPE")
        assert Scope.WEIGHTS_UNSAFE in native.headers["www-authenticate"]
    assert on.sent == []
    assert await on.updates() == []


@pytest.mark.parametrize("setting", ["gateway", "sidecar"])
async def test_each_setting_that_is_missing_is_named(tmp_path: Path, setting: str) -> None:
    settings: Any = NAMED if setting == "sidecar" else {}
    async with passing(tmp_path, pickled=setting == "gateway", **settings) as it:
        body = {"serialized_named_tensors": buckets("a")[0]}
        refused = await it.http.post(TENSOR[1:], json=body)
        named = {"gateway": "engine_payloads", "sidecar": "--allow-pickled"}[setting]
        assert refused.status_code == 403
        assert named in refused.json()["error"]
        native = await it.gate.order("update-weights", begin(), it.gate.key())
        expected = {
            "gateway": (403, "ENGINE_PAYLOADS_OFF"),
            "sidecar": (501, "UNSUPPORTED_OPERATION"),
        }
        assert (native.status_code, native.json()["reason"]) == expected[setting]
        assert it.sent == []


async def test_it_is_never_shown_and_gone_with_the_end(tmp_path: Path, logged: io.StringIO) -> None:
    configure_logging("debug", "json", logged)
    async with passing(tmp_path, **NAMED) as it:
        await it.does("pause_generation", {})
        for bucket in buckets("a"):
            await it.does(TENSOR[1:], {"serialized_named_tensors": bucket})
        bad = {"serialized_named_tensors": [*buckets("b")[0], *buckets("c")[0]]}
        assert MARK not in (await it.http.post(TENSOR[1:], json={"x": MARK})).text
        await it.does("continue_generation", {})
        await it.does("pause_generation", {})
        told = [(await it.http.post(TENSOR[1:], json=bad)).text]
        await it.does("continue_generation", {})
        for path in ("/v1/operations", "/v1/audit?page_size=200", f"/v1/engines/{ENGINE_ID}"):
            told.append((await it.gate.get(path)).text)
        for one in await it.updates():
            accept = {"Accept": "application/json"}
            events = f"/v1/operations/{one['id']}/events"
            answer = await it.gate.http.get(events, headers={**it.gate.auth(), **accept})
            told.append(answer.raise_for_status().text)
        sealed = (await it.gate.get("/v1/audit?page_size=200")).json()["items"]
        digests = [one["detail"]["payload_sha256"] for one in sealed
                   if "payload_sha256" in one["detail"]]  # fmt: skip
        assert len(digests) >= len(NAMES)
        kept = sqlite3.connect(it.data / "chadburn.db").execute("SELECT count(*) FROM stages")
        assert kept.fetchone() == (0,)
    told.append(logged.getvalue())
    # In base64 as it came, or read.
    spelled = {MARK, *(part[:40] for bucket in buckets("a") for part in bucket)}
    for text in told:
        assert not any(one in text for one in spelled)
