"""Trainers whose base URL is all that changed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from tests.doubles.sglang_trainers import (
    areal,
    areal_by_group,
    nemo_rl,
    slime,
    slime_on_the_same_devices,
    slime_start,
    verl,
)
from tests.doubles.trainers import Step, Wire
from tests.enginekit.minimal_engine import fault
from tests.http.compat.layered import Layered

pytestmark = pytest.mark.anyio

BY_GROUP = [
    Step(
        version,
        [{"names": [name], "dtypes": ["torch.bfloat16"], "shapes": [[2, 2]]} for name in "ab"],
    )
    for version in ("1", "2")
]
BY_FILES = [Step(f"step-{n}", [{"model_path": f"/weights/step-{n}"}]) for n in (1, 2)]
AN_UPDATE = ["pause", "update_weights", "resume"]
AS_OFTEN = [1, pytest.param(2, marks=pytest.mark.long)]


@pytest.fixture
async def http(sglang: Layered) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(
        base_url=f"{sglang.url}/", headers=sglang.gate.auth(), timeout=30
    ) as client:
        yield client


@pytest.mark.parametrize("times", AS_OFTEN)
async def test_slime(sglang: Layered, http: httpx2.AsyncClient, times: int) -> None:
    wire = Wire(http, times)
    assert await slime_start(wire) == 2
    assert await slime(wire, BY_GROUP) == ["1", "2"]
    # What it destroys before it begins is not there, which it does not mind.
    assert sorted(set(wire.statuses)) == [200, 400]
    assert wire.statuses.count(400) == times
    kinds = ["pause", "flush_caches", "update_weights", "resume"]
    assert await sglang.kinds() == kinds * 2
    updates = [one for one in await sglang.operations() if one["kind"] == "update_weights"]
    assert {one["state"] for one in updates} == {"succeeded"}


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
async def test_slime_on_the_same_devices(
    sglang: Layered, http: httpx2.AsyncClient, times: int
) -> None:
    await slime_on_the_same_devices(Wire(http, times), BY_FILES[0])
    assert await sglang.reads("/get_weight_version") == {"weight_version": "step-1"}
    assert (await sglang.call("GET", "/ready")).status_code == 200


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
async def test_areal(sglang: Layered, http: httpx2.AsyncClient, times: int) -> None:
    await areal(Wire(http, times), BY_FILES)
    kinds = ["pause", *["update_weights"] * times, "resume"]
    assert await sglang.kinds() == kinds * 2
    await areal_by_group(Wire(http, times), BY_GROUP)
    assert await sglang.kinds() == kinds * 2 + AN_UPDATE * 2


@pytest.mark.parametrize("times", AS_OFTEN)
async def test_verl(sglang: Layered, http: httpx2.AsyncClient, times: int) -> None:
    assert await verl(Wire(http, times), BY_FILES[0]) == [403, 403]
    kinds = await sglang.kinds()
    assert [kind for kind in kinds if kind != "abort_requests"] == [
        *("pause", "release_resources", "restore_resources", "update_weights"),
        *("restore_resources", "resume", "flush_caches"),
    ]
    assert await sglang.reads("/get_weight_version") == {"weight_version": "step-1"}
    assert (await sglang.call("GET", "/ready")).status_code == 200


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
async def test_nemo_rl(sglang: Layered, http: httpx2.AsyncClient, times: int) -> None:
    await nemo_rl(Wire(http, times))
    restored = ["restore_resources"] * 3
    assert await sglang.kinds() == [
        *("flush_caches", "pause", "release_resources"), *restored, "resume",
    ]  # fmt: skip
    assert (await sglang.call("GET", "/ready")).status_code == 200


@pytest.mark.long
async def test_a_bucket_that_fails_is_the_end_of_the_update(
    sglang: Layered, http: httpx2.AsyncClient
) -> None:
    sglang.engine.script("stage", fault, 1)
    with pytest.raises(httpx2.HTTPStatusError):
        await slime(Wire(http), BY_GROUP[:1])
    assert await sglang.reads("/get_weight_version") == {"weight_version": "v1"}
    # It begins anew, as after a crash: by another group, and with a pause.
    sglang.engine.scripts.clear()
    assert await slime(Wire(http), BY_GROUP) == ["1", "2"]


@pytest.mark.long
async def test_a_trainer_that_ended_in_the_middle_does_not_leave_half_an_update(
    sglang: Layered, http: httpx2.AsyncClient
) -> None:
    wire = Wire(http)
    await slime(wire, [])
    await wire.checked("pause_generation", {})
    piece = {**BY_GROUP[0].pieces[0], "group_name": "slime-pp_0", "weight_version": "half"}
    await wire.checked("update_weights_from_distributed", piece)
    assert await slime(wire, BY_GROUP) == ["1", "2"]
    ended = [one["state"] for one in await sglang.operations() if one["kind"] == "update_weights"]
    assert ended == ["cancelled", "succeeded", "succeeded"]
