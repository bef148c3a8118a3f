"""A trainer's process group, joined before any update."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, client_of
from tests.enginekit.client import until as settled
from tests.enginekit.joining_engine import JoiningEngine
from tests.enginekit.minimal_engine import until
from tests.enginekit.session_engine import Sender

pytestmark = pytest.mark.anyio

Code = grpc.StatusCode
GROUP = pb.NcclTransfer(address="::1", port=1, world_size=2, rank_offset=1, group="g")
OTHER = pb.NcclTransfer(address="::1", port=2, world_size=2, rank_offset=1, group="g")


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    async with running_engine(tmp_path / "engine", make_engine=JoiningEngine) as running:
        yield running


@pytest.fixture
async def client(double: EngineDouble) -> AsyncIterator[Client]:
    async with client_of(double) as made:
        yield made


@pytest.fixture
def engine(double: EngineDouble) -> JoiningEngine:
    assert isinstance(double.engine, JoiningEngine)
    return double.engine


async def join(client: Client, group: pb.NcclTransfer = GROUP) -> Any:
    return await client.admin.JoinGroup(pb.JoinGroupRequest(group=group), timeout=20)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def test_it_is_in_when_the_trainer_is_there_and_stays(
    client: Client, engine: JoiningEngine
) -> None:
    first, again = [asyncio.create_task(join(client)) for _ in range(2)]
    await settled(lambda: engine.joined)
    assert await code_of(join(client, OTHER)) is Code.FAILED_PRECONDITION
    first.cancel()  # its caller goes, and it is joined all the same
    engine.listening.set()
    await again
    assert len(engine.joined) == 1
    for version in ("v2", "v3"):
        sender = Sender(client, f"session-{version}")
        begun = await sender.begun(version=version, transfer={"nccl": GROUP})
        tensors = [pb.TensorSpec(name="w", dtype=pb.TENSOR_DTYPE_FLOAT32, shape=[2])]
        await sender.sent(sender.chunk(0, payload={"nccl": pb.NcclChunk(tensors=tensors)}))
        await sender.sent(sender.abort())
        assert (await begun.end()).HasField("cancelled")
    assert len(engine.joined) == 1
    await join(client)  # opened anew
    assert len(engine.joined) == 2


async def test_what_can_not_be_joined(client: Client, engine: JoiningEngine) -> None:
    for group in (pb.NcclTransfer(), pb.NcclTransfer(address="::1", port=1, world_size=2)):
        assert await code_of(join(client, group)) is Code.INVALID_ARGUMENT
    missing = client.admin.JoinGroup(pb.JoinGroupRequest(), timeout=20)
    assert await code_of(missing) is Code.INVALID_ARGUMENT
    assert engine.joined == []
    engine.refuses = True
    assert await code_of(join(client)) is Code.INVALID_ARGUMENT
    engine.refuses = False
    engine.listening.set()
    await join(client)


async def test_not_in_the_middle_of_an_order(client: Client, engine: JoiningEngine) -> None:
    goes = asyncio.Event()
    engine.script("commit", until(goes))
    pausing = await client.begin(client.pause())
    assert await code_of(join(client)) is Code.ABORTED
    assert engine.joined == []
    goes.set()
    await pausing.end()


async def test_other_engines_join_with_the_session(tmp_path: Path) -> None:
    async with running_engine(tmp_path / "engine") as double, client_of(double) as client:
        assert await code_of(join(client)) is Code.UNIMPLEMENTED
