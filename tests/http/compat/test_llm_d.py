"""llm-d's launcher and fast model actuation, with Chadburn where its engines were."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from tests.doubles.llm_d import Controller, Later, Launcher
from tests.enginekit.minimal_engine import fault
from tests.http.compat.layered import Layered

pytestmark = pytest.mark.anyio

SLEPT, WOKEN = ["pause", "release_resources"], ["restore_resources", "resume"]
LLM = "llm"


@pytest.fixture
async def controller(vllm: Layered) -> AsyncIterator[Controller]:
    """Whoever makes the instances gives the secret base path along: the controller has no token."""
    async with httpx2.AsyncClient(base_url=f"{vllm.url}/", headers=vllm.gate.auth()) as http:

        async def make(_: str) -> httpx2.AsyncClient:
            return http

        yield Controller(Launcher(make))


async def test_bound_unbound_and_bound_again(vllm: Layered, controller: Controller) -> None:
    await controller.bind(LLM)
    assert await vllm.kinds() == []  # it was awake
    await controller.unbind(LLM)
    await controller.bind(LLM)
    assert controller.ready == {LLM}
    assert await vllm.kinds() == SLEPT + WOKEN
    assert await vllm.reads("/is_paused") == {"is_paused": False}


@pytest.mark.long
async def test_a_controller_that_has_forgotten_everything(
    vllm: Layered, controller: Controller
) -> None:
    """It puts to sleep what sleeps, and asks before it wakes."""
    await controller.bind(LLM)
    await controller.unbind(LLM)
    controller.restart()
    await controller.unbind(LLM)
    assert await vllm.reads("/is_sleeping") == {"is_sleeping": True}
    controller.restart()
    await controller.bind(LLM)
    assert await vllm.reads("/is_sleeping") == {"is_sleeping": False}
    kinds = await vllm.kinds()
    assert [kind for kind in kinds if kind != "pause"][-2:] == WOKEN


@pytest.mark.long
async def test_a_sleep_that_fails_is_not_told_as_one(vllm: Layered, controller: Controller) -> None:
    await controller.bind(LLM)
    vllm.engine.script("prepare", fault, 1)
    with pytest.raises(Later):
        await controller.unbind(LLM)
    assert not controller.sleeping[LLM]
    vllm.engine.scripts.clear()
    await controller.unbind(LLM)
    assert await vllm.reads("/is_sleeping") == {"is_sleeping": True}
    await controller.bind(LLM)


@pytest.mark.long
async def test_what_sleeps_is_collected_and_what_serves_is_not(
    vllm: Layered, controller: Controller
) -> None:
    await controller.bind(LLM)
    assert not await controller.collect(LLM)
    await controller.unbind(LLM)
    assert await controller.collect(LLM)
    assert controller.launcher.deleted == [LLM]
    assert await controller.launcher.create(LLM) == 201
    assert await controller.launcher.create(LLM) == 409
