"""New weights of every kind, ordered of real SGLang by the gateway and the sidecar: afterwards it
says what an engine says that was started with them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.e2e.driving import Gateway
from tests.real.asking import Said, generate, streaming
from tests.real.gateway import ENGINE
from tests.real.orders import PATH
from tests.real.servers import Server, free_ports
from tests.reference_engine.trainers import GROUP
from tests.sglang.tensors import sending, specs, tensors_of

pytestmark = pytest.mark.anyio

Json = dict[str, Any]


def update(source: Json, version: str, **changes: Any) -> Json:
    known = {"weight_version": version, "cache_policy": "flush", "pause": {"mode": "drain"}}
    return {"source": source, **known, **changes}


def from_disk(path: Path) -> Json:
    return {"disk": {"path": str(path)}}


def inline(tensors: dict[str, Tensor]) -> Json:
    return {
        "tensors": {
            "inline": {
                "tensors": [
                    {**spec, "data": base64.b64encode(raw(tensors[spec["name"]])).decode()}
                    for spec in specs(tensors)
                ]
            }
        }
    }


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def distributed(port: int, tensors: dict[str, Tensor], **changes: Any) -> Json:
    place = {"address": "127.0.0.1", "port": port, "world_size": 2, "rank_offset": 1}
    told = {"backend": "gloo", "group": GROUP, "tensors": specs(tensors), **place, **changes}
    return {"distributed": told}


@pytest.fixture
async def of_a(bridge: Gateway, engine: Server, models: Path) -> Said:
    """Each test begins with these weights."""
    await bridge.does(ENGINE, "update-weights", update(from_disk(models / "a"), "a"))
    return generate(engine)


async def fails(bridge: Gateway, body: Json) -> Json:
    """The error of an update that touched nothing."""
    ended = await bridge.ended((await bridge.accepted(ENGINE, "update-weights", body))["id"])
    assert ended["state"] == "failed", ended
    assert ended["error"]["effect"] == "none", ended
    found: Json = ended["error"]
    return found


async def test_tensors_in_the_order(
    bridge: Gateway, engine: Server, models: Path, of_a: Said, of_b: Said
) -> None:
    ended = await bridge.does(
        ENGINE, "update-weights", update(inline(tensors_of(models / "b")), "in-1")
    )
    assert ended["result"]["weight_version"] == "in-1"
    assert of_a != generate(engine) == of_b
    assert (await bridge.get(PATH))["facts"]["weights"]["version"] == "in-1"


async def test_a_trainer(
    bridge: Gateway, engine: Server, models: Path, of_a: Said, of_b: Said
) -> None:
    tensors = tensors_of(models / "b")
    for step in ("t-1", "t-2"):  # a group of its own each time
        with sending(tensors) as sender:
            body = update(distributed(sender.port, tensors), step)
            ended = await bridge.does(ENGINE, "update-weights", body)
        assert ended["result"]["weight_version"] == step
    assert of_a != generate(engine) == of_b


async def test_under_a_request_that_goes_on(
    bridge: Gateway, engine: Server, models: Path, of_a: Said, of_b: Said
) -> None:
    kept = {"cache_policy": "keep", "pause": {"mode": "keep"}}
    with streaming(engine) as stream:
        body = update(from_disk(models / "b"), "kept", **kept)
        await bridge.does(ENGINE, "update-weights", body)
    assert (stream.finish, stream.error) == ("length", None)
    await bridge.does(ENGINE, "flush-caches", {"caches": ["prefix"]})
    assert of_a != generate(engine) == of_b


@pytest.mark.parametrize(
    "name",
    ["b-garbage", "b-cut-short", "b-other-shape", "b-other-dtype", "b-one-more", "b-without-one",
     "empty", "not-there", ".."],
)  # fmt: skip
async def test_checkpoints_that_are_not_sent(
    bridge: Gateway, engine: Server, models: Path, of_a: Said, name: str
) -> None:
    await fails(bridge, update(from_disk(models / name), "never"))
    assert generate(engine) == of_a


async def test_tensors_that_are_not_sent(
    bridge: Gateway, engine: Server, models: Path, of_a: Said
) -> None:
    tensors = tensors_of(models / "b")
    name = "model.norm.weight"
    for bad in (
        {**tensors, name: torch.zeros(3, 5, dtype=torch.bfloat16)},
        {**tensors, "model.nobody.weight": tensors[name].clone()},
    ):
        await fails(bridge, update(inline(bad), "never"))
    assert generate(engine) == of_a


async def test_nobody_listens(bridge: Gateway, engine: Server, models: Path, of_a: Said) -> None:
    """Sent there, SGLang's scheduler would wait for ever."""
    tensors = tensors_of(models / "b")
    (port,) = free_ports(1)
    body = update(distributed(port, tensors), "never", deadline_ms=8000)
    await fails(bridge, body)
    unnamed = update(distributed(port, tensors, group=""), "never")
    assert (await bridge.order(ENGINE, "update-weights", unnamed)).status_code == 422
    assert generate(engine) == of_a


async def test_one_order_sent_again_is_one_update(
    bridge: Gateway, engine: Server, models: Path, of_a: Said, of_b: Said
) -> None:
    """A payload that SGLang reads a second time may end it."""
    before = engine.log.read_text(errors="replace").count("POST /update_weights_from_tensor")
    body = update(inline(tensors_of(models / "b")), "once")
    answers = [await bridge.order(ENGINE, "update-weights", body, key="once") for _ in range(3)]
    (one,) = {answer.json()["id"] for answer in answers}
    assert (await bridge.ended(one))["state"] == "succeeded"
    again = await bridge.order(ENGINE, "update-weights", body, key="once")
    assert again.json()["id"] == one
    after = engine.log.read_text(errors="replace").count("POST /update_weights_from_tensor")
    assert after - before == 1
    assert of_a != generate(engine) == of_b
