"""Trainers and controllers whose base URL is all that changed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from tests.doubles.trainers import (
    Step,
    Wire,
    colocated,
    fast_model_actuation,
    prime_rl,
    skyrl,
    skyrl_by_method,
    trl,
)
from tests.enginekit.minimal_engine import fault
from tests.http.compat.layered import Layered

pytestmark = pytest.mark.anyio

ONE = Step("step-1", [{"path": "/weights/step-1"}])
TWO = Step("step-2", [{"path": "/weights/step-2"}])
AN_UPDATE = ["pause", "update_weights", "resume"]


@pytest.fixture
async def http(vllm: Layered) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(
        base_url=f"{vllm.url}/", headers=vllm.gate.auth(), timeout=30
    ) as client:
        yield client


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_trl(vllm: Layered, http: httpx2.AsyncClient, times: int) -> None:
    wire = Wire(http, times)
    assert await trl(wire, [ONE, TWO]) == 2
    assert set(wire.statuses) == {200}
    assert await vllm.reads("/weight_info") == {"weight_version": "step-2"}
    assert await vllm.kinds() == AN_UPDATE * 2


@pytest.mark.long
async def test_trl_with_a_group(vllm: Layered, http: httpx2.AsyncClient) -> None:
    group = {"master_address": "::1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
    tensors = {"dtype_names": ["bfloat16"], "shapes": [[2]], "packed": True}
    step = Step(None, [{"names": [name], **tensors} for name in ("a", "b")])
    wire = Wire(http)
    await trl(wire, [step, step], group)
    assert set(wire.statuses) == {200}
    assert await vllm.kinds() == AN_UPDATE * 2


@pytest.mark.long
async def test_trl_looks_at_nothing_and_the_engine_is_whole(
    vllm: Layered, http: httpx2.AsyncClient
) -> None:
    """A piece fails, and all the calls behind it come as if it had not."""
    vllm.engine.script("stage", fault, 1)
    wire = Wire(http)
    await trl(wire, [ONE])
    assert [status for status in wire.statuses if status != 200] == [500, 409]
    assert await vllm.reads("/weight_info") == {"weight_version": "v1"}
    assert await vllm.reads("/is_paused") == {"is_paused": False}
    vllm.engine.scripts.clear()
    await trl(wire, [TWO])
    assert await vllm.reads("/weight_info") == {"weight_version": "step-2"}


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
async def test_skyrl(vllm: Layered, http: httpx2.AsyncClient, times: int) -> None:
    await skyrl(Wire(http, times))
    assert await vllm.reads("/is_sleeping") == {"is_sleeping": False}
    refused = await skyrl_by_method(Wire(http, times))
    assert refused.status_code == 403


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
async def test_prime_rl(vllm: Layered, http: httpx2.AsyncClient, times: int) -> None:
    await prime_rl(Wire(http, times), ONE)
    assert await vllm.kinds() == AN_UPDATE
    # What only its own server knows is refused, and it resumes all the same.
    own = Step("step-2", [])
    with pytest.raises(httpx2.HTTPStatusError):
        await prime_rl(Wire(http, times), own)
    assert await vllm.reads("/is_paused") == {"is_paused": False}
    assert await vllm.reads("/weight_info") == {"weight_version": "step-1"}


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
async def test_colocated(vllm: Layered, http: httpx2.AsyncClient, times: int) -> None:
    assert await colocated(Wire(http, times), ONE) == ["sleeping", "awake"]
    assert await vllm.reads("/weight_info") == {"weight_version": "step-1"}
    assert await vllm.reads("/is_paused") == {"is_paused": False}


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.long)])
async def test_fast_model_actuation(vllm: Layered, http: httpx2.AsyncClient, times: int) -> None:
    assert await fast_model_actuation(Wire(http, times)) == [True, False]
    assert await vllm.kinds() == ["pause", "release_resources", "restore_resources", "resume"]
