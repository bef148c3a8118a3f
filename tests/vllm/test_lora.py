"""Adapters over `vllm.Control`, with the front end 0.33.0: that of 0.32.0 fails every load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driving import Gateway
from tests.real.asking import generate, post
from tests.real.gateway import ENGINE, gateway, register
from tests.real.servers import Server
from tests.vllm.servers import serving

pytestmark = pytest.mark.anyio

PATH = f"/v1/engines/{ENGINE}"


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[Server]:
    with serving(models / "a", rust=True, version="0.33.0") as server:
        yield server


@pytest.fixture(scope="module")
async def bridge(
    engine: Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway")) as serving_:
        async with serving_.client:
            await register(serving_, engine.control, "vllm")
            yield serving_


async def load(bridge: Gateway, name: str, path: Path) -> dict[str, Any]:
    taken = await bridge.accepted(ENGINE, "loras", {"name": name, "path": str(path)})
    return await bridge.ended(taken["id"])


async def names(bridge: Gateway) -> list[str]:
    return [item["name"] for item in (await bridge.get(f"{PATH}/loras"))["items"]]


async def test_it_comes_is_used_and_goes(bridge: Gateway, engine: Server, models: Path) -> None:
    base = generate(engine)
    loaded = await load(bridge, "one", models / "lora-one")
    assert loaded["state"] == "succeeded", loaded
    assert await names(bridge) == ["one"]
    with_one = generate(engine, model="one")
    assert with_one != base
    assert generate(engine) == base
    gone = await bridge.client.delete(
        f"{PATH}/loras/one", headers={"idempotency-key": "unload-one"}
    )
    assert gone.status_code == 202, gone.text
    assert (await bridge.ended(gone.json()["id"]))["state"] == "succeeded"
    assert await names(bridge) == []


async def test_no_room_is_made_in_silence(bridge: Gateway, engine: Server, models: Path) -> None:
    """vLLM would push out the one that was used longest ago."""
    for name in ("one", "two"):
        assert (await load(bridge, name, models / f"lora-{name}"))["state"] == "succeeded"
    third = await bridge.order(ENGINE, "loras", {"name": "three", "path": str(models / "lora-one")})
    if third.status_code == 202:
        ended = await bridge.ended(third.json()["id"])
        assert (ended["state"], ended["error"]["effect"]) == ("failed", "none"), ended
    else:
        assert third.status_code == 409, third.text
    assert await names(bridge) == ["one", "two"]
    for name in ("one", "two"):
        generate(engine, model=name)


async def test_one_that_does_not_fit_is_no_success(
    bridge: Gateway, engine: Server, models: Path
) -> None:
    gone = await bridge.client.delete(
        f"{PATH}/loras/two", headers={"idempotency-key": "unload-two"}
    )
    assert (await bridge.ended(gone.json()["id"]))["state"] == "succeeded"
    for name, path in (("big", models / "lora-rank-64"), ("none", models / "b")):
        ended = await load(bridge, name, path)
        assert ended["state"] == "failed", ended
    assert await names(bridge) == ["one"]
    assert engine.is_alive()


async def test_0_33_turns_new_requests_away(bridge: Gateway, engine: Server) -> None:
    """Also told with the pause: the caller asked for them to be held."""
    ended = await bridge.does(ENGINE, "pause", {"mode": "drain"})
    assert [warning["reason"] for warning in ended["warnings"]] == ["NEW_REQUESTS_REFUSED"]
    body = {"model": "tiny", "prompt": "stand by", "max_tokens": 2}
    assert post(engine, "/v1/completions", body).status_code == 503
    epoch = ended["result"]["pause_epoch"]
    await bridge.does(ENGINE, "resume", {"pause_epoch": epoch})
    assert engine.is_alive()
