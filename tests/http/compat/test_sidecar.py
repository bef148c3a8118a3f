"""The endpoints in front of a sidecar that speaks vLLM's own HTTP: the same words on both sides,
and the ledger in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.sidecars.allowed import Allowed
from tests.doubles.trainers import Step, Wire, fast_model_actuation, prime_rl, skyrl, trl
from tests.doubles.vllm_http import VllmDouble, running_vllm
from tests.http.compat.calling import Calling, registered
from tests.http.gateway import ENGINE_ID, gateway
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.sidecar import asked, running_sidecar

pytestmark = pytest.mark.anyio


@dataclass
class Beside(Calling):
    vllm: VllmDouble
    weights: Path


@pytest.fixture
async def beside(tmp_path: Path) -> AsyncIterator[Beside]:
    compat = {"layer": "vllm", "engines": (ENGINE_ID,), "flavour": "0.32"}
    weights = tmp_path / "weights"
    weights.mkdir()
    first = checkpoint(weights / "first", 1)
    async with (
        running_vllm(first) as vllm,
        running_sidecar(
            vllm, tmp_path / "sidecar", allowed=Allowed(weights_roots=(weights,))
        ) as sidecar,
        gateway(tmp_path / "data", registered=False, compat=(compat,)) as gate,
        registered(gate, "vllm", sidecar.admin_address) as http,
    ):
        yield Beside(gate, http, vllm, weights)


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
async def test_trainers(beside: Beside, times: int) -> None:
    steps = [
        Step(f"step-{n}", [{"path": str(checkpoint(beside.weights / str(n), n))}]) for n in (2, 3)
    ]
    wire = Wire(beside.http, times)
    assert await trl(wire, steps) == 1
    assert set(wire.statuses) == {200}
    assert await beside.reads("weight_info") == {"weight_version": "step-3"}
    await prime_rl(Wire(beside.http, times), steps[0])
    assert await beside.reads("weight_info") == {"weight_version": "step-2"}
    await skyrl(Wire(beside.http, times))
    assert await fast_model_actuation(Wire(beside.http, times)) == [True, False]


@pytest.mark.long
async def test_requests_end_by_name_and_all_of_them(beside: Beside) -> None:
    streams = [await asked(beside.vllm, name) for name in ("a", "b", "c")]
    told = await beside.does("abort_requests", {"request_ids": ["cmpl-a"]})
    assert told["status"] == "aborted"
    assert await streams[0] == "abort"
    told = await beside.does("abort_requests", {})
    assert told["status"] == "aborted"
    assert [await stream for stream in streams[1:]] == ["abort", "abort"]


@pytest.mark.long
async def test_caches_and_what_it_is(beside: Beside) -> None:
    assert await beside.does("reset_prefix_cache") == {"success": True}
    assert await beside.reads("is_sleeping") == {"is_sleeping": False}
    assert (await beside.http.get("health")).status_code == 200
    assert "version" in await beside.reads("version")


async def test_a_sidecar_does_not_answer_for_an_engine_that_has_ended(beside: Beside) -> None:
    assert (await beside.http.get("health")).status_code == 200
    await beside.vllm.stop()
    health = await beside.http.get("health")
    assert (health.status_code, health.content) == (503, b"")
    for path in ("is_paused", "is_sleeping", "weight_info"):
        assert (await beside.http.get(path)).status_code == 503, path
    await beside.vllm.start()
    assert (await beside.http.get("health")).status_code == 200
    assert await beside.reads("is_paused") == {"is_paused": False}
