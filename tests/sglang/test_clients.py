"""Trainers of SGLang over the layer and the sidecar, whose base URL is all that changed.

On a CPU SGLang gives no memory back; the states and the answers of a release are its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from torch import Tensor

import tests.doubles.sglang_trainers as clients
from tests.doubles.trainers import Step, Wire
from tests.e2e.driving import Gateway
from tests.real.asking import Said, generate, post
from tests.real.gateway import ENGINE
from tests.real.servers import Server
from tests.reference_engine.trainers import GROUP, Trainer
from tests.sglang.tensors import sending, tensors_of

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def http(bridge: Gateway) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(
        base_url=f"{bridge.url}/compat/sglang/{ENGINE}/",
        headers=bridge.client.headers,
        timeout=300,
    ) as client:
        yield client


@pytest.fixture
def of_a(engine: Server, models: Path) -> Said:
    """Each test begins with these weights."""
    body = {"model_path": str(models / "a")}
    assert post(engine, "/update_weights_from_disk", body).json()["success"]
    return generate(engine)


def buckets(tensors: dict[str, Tensor], size: int = 8) -> list[dict[str, Any]]:
    names = list(tensors)
    return [
        {
            "names": some,
            "dtypes": [str(tensors[name].dtype).removeprefix("torch.") for name in some],
            "shapes": [list(tensors[name].shape) for name in some],
        }
        for some in (names[at : at + size] for at in range(0, len(names), size))
    ]


def group(sender: Trainer) -> dict[str, Any]:
    own = {"master_port": sender.port, "world_size": 2, "group_name": GROUP}
    return {**clients.GROUP, **own}


async def test_slime(
    http: httpx2.AsyncClient, engine: Server, models: Path, of_a: Said, of_b: Said
) -> None:
    assert await clients.slime_start(Wire(http)) == 1
    a, b = tensors_of(models / "a"), tensors_of(models / "b")
    with sending(b, a, b) as sender:
        steps = [Step("s-1", buckets(b)), Step("s-2", buckets(a)), Step("s-3", buckets(b))]
        assert await clients.slime(Wire(http), steps, group(sender)) == ["s-1", "s-2", "s-3"]
    assert of_a != generate(engine) == of_b
    # The trainer is started anew, and opens a group of that name again.
    with sending(a, b) as anew:
        steps = [Step("s-4", buckets(a)), Step("s-5", buckets(b))]
        assert await clients.slime(Wire(http), steps, group(anew)) == ["s-4", "s-5"]
    assert generate(engine) == of_b


async def test_slime_on_the_same_devices(
    http: httpx2.AsyncClient, engine: Server, models: Path, of_a: Said, of_b: Said
) -> None:
    step = Step("same-1", [{"model_path": str(models / "b")}])
    await clients.slime_on_the_same_devices(Wire(http), step)
    assert of_a != generate(engine) == of_b


@pytest.mark.parametrize("times", [1, 2])
async def test_areal(
    http: httpx2.AsyncClient, engine: Server, models: Path, of_a: Said, of_b: Said, times: int
) -> None:
    steps = [Step(None, [{"model_path": str(models / name)}]) for name in ("b", "a", "b")]
    await clients.areal(Wire(http, times), steps)
    assert of_a != generate(engine) == of_b


async def test_areal_by_group(
    http: httpx2.AsyncClient, engine: Server, models: Path, of_a: Said, of_b: Said
) -> None:
    a, b = tensors_of(models / "a"), tensors_of(models / "b")
    # Of slime's. AReaL itself relies on a server that has none of that name.
    await http.post("destroy_weights_update_group", json={"group_name": GROUP})
    with sending(b, a, b) as sender:
        steps = [Step(None, buckets(each)) for each in (b, a, b)]
        await clients.areal_by_group(Wire(http), steps, group(sender))
    assert of_a != generate(engine) == of_b


@pytest.mark.parametrize("times", [1, 2])
async def test_verl(
    http: httpx2.AsyncClient, engine: Server, models: Path, of_a: Said, of_b: Said, times: int
) -> None:
    step = Step(f"verl-{times}", [{"model_path": str(models / "b")}])
    refused = await clients.verl(Wire(http, times), step)
    assert all(status >= 400 for status in refused), refused
    assert of_a != generate(engine) == of_b


@pytest.mark.parametrize("times", [1, 2])
async def test_nemo_rl(http: httpx2.AsyncClient, engine: Server, of_a: Said, times: int) -> None:
    await clients.nemo_rl(Wire(http, times))
    assert generate(engine) == of_a
