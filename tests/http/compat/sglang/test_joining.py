"""A trainer that waits in its process group for the engine, before it sends anything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.doubles.sglang_trainers import GROUP, slime
from tests.doubles.trainers import Step, Wire
from tests.enginekit.client import until as settled
from tests.enginekit.joining_engine import JoiningEngine
from tests.http.compat.layered import Layered, LayeredEngine, layered

pytestmark = [pytest.mark.anyio, pytest.mark.long]


class Joining(LayeredEngine, JoiningEngine):
    pass


@pytest.fixture
async def sglang(tmp_path: Path) -> AsyncIterator[Layered]:
    async with layered(tmp_path, layer="sglang", engine=Joining) as made:
        yield made


def engine_of(sglang: Layered) -> Joining:
    assert isinstance(sglang.engine, Joining)
    return sglang.engine


async def test_init_is_answered_when_the_engine_is_in(sglang: Layered) -> None:
    engine = engine_of(sglang)
    calls = [
        asyncio.create_task(sglang.post("/init_weights_update_group", GROUP)) for _ in range(2)
    ]
    await settled(lambda: engine.joined)
    # What the engine does otherwise goes on.
    assert (await sglang.call("GET", "/ready")).status_code == 200
    engine.listening.set()
    answers = [await call for call in calls]
    assert [answer.json()["success"] for answer in answers] == [True, True]
    assert len(engine.joined) == 1
    assert await sglang.operations() == []
    audit = (await sglang.gate.get("/v1/audit")).json()["items"]
    joined = [one for one in audit if one["action"] == "join_group"]
    assert {one["outcome"] for one in joined} == {"accepted"}
    pieces: list[dict[str, Any]] = [{"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2]]}]
    steps = [Step(str(number), pieces) for number in (1, 2, 3)]
    async with httpx2.AsyncClient(
        base_url=f"{sglang.url}/", headers=sglang.gate.auth(), timeout=30
    ) as http:
        assert await slime(Wire(http), steps) == ["1", "2", "3"]
    # It destroys the group that it finds, and opens one for all of them.
    assert len(engine.joined) == 2


async def test_an_engine_that_will_not_join_is_told(sglang: Layered) -> None:
    engine_of(sglang).refuses = True
    refused = await sglang.post("/init_weights_update_group", GROUP)
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert (await sglang.post("/init_weights_update_group", GROUP)).status_code == 400
