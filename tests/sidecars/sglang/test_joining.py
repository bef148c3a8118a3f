"""A trainer's group that the engine joins before any update, and stays in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.domain.weight_sessions import NcclTransfer
from app.enginekit.rendezvous import RendezvousRule
from app.enginekit.runtime import RuntimeFault
from app.sidecars.allowed import Allowed
from app.sidecars.notes import Notes
from app.sidecars.sglang.dialect import SglangDialect
from app.sidecars.sglang.engine import SglangEngine
from app.sidecars.sglang.joining import join_group
from tests.doubles.sglang_http import SglangDouble, running_sglang
from tests.enginekit.client import pb, until
from tests.enginekit.session_engine import Sender
from tests.sidecars.checkpoints import checkpoint, weights
from tests.sidecars.sglang.running import PATIENCE, Served, served, trainer

pytestmark = pytest.mark.anyio

INIT = "/init_weights_update_group"
UNDER: dict[str, Any] = {"under_pause": pb.UnderPause()}


def group(port: int, name: str = "g") -> pb.NcclTransfer:
    return pb.NcclTransfer(
        address="127.0.0.1",
        port=port,
        world_size=2,
        rank_offset=1,
        group=name,
        backend=pb.COLLECTIVE_BACKEND_GLOO,
    )


async def join(it: Served, way: pb.NcclTransfer) -> Any:
    return await it.client.admin.JoinGroup(pb.JoinGroupRequest(group=way), timeout=20)


def whole() -> pb.NcclChunk:
    return pb.NcclChunk(
        tensors=[
            pb.TensorSpec(name=one.name, dtype=pb.TENSOR_DTYPE_FLOAT32, shape=one.shape)
            for one in weights(2)
        ]
    )


async def step(it: Served, way: pb.NcclTransfer, version: str) -> Any:
    """Under a pause, as trainers make it."""
    paused = await it.client.completed(it.client.pause("abort"))
    sender = Sender(it.client, f"session-{version}")
    begun = await sender.begun(version=version, transfer={"nccl": way}, **UNDER)
    await sender.sent(sender.chunk(0, payload={"nccl": whole()}))
    await sender.sent(sender.commit(1))
    ended = await begun.end()
    await it.client.completed(it.client.resume(paused.pause.pause_epoch))
    return ended


async def test_updates_come_by_it_one_after_the_other(tmp_path: Path) -> None:
    async with served(tmp_path) as it, trainer(it.sglang) as port:
        await join(it, group(port))
        for version in ("v2", "v3"):
            assert (await step(it, group(port), version)).HasField("completed")
        assert len(it.sglang.bodies(INIT)) == 1
        assert it.model.groups == {"g"}
        assert it.model.version == "v3"
        await join(it, group(port))  # its trainer has opened it anew
        assert len(it.sglang.bodies(INIT)) == 2
        assert it.model.groups == {"g"}
        assert await it.generates()


async def test_another_group_is_joined_and_left_with_its_order(tmp_path: Path) -> None:
    async with served(tmp_path) as it, trainer(it.sglang) as port, trainer(it.sglang) as other:
        await join(it, group(port))
        assert (await step(it, group(other, "h"), "v2")).HasField("completed")
        assert it.model.groups == set()
        assert await it.generates()


async def test_after_an_update_that_failed_it_is_left(tmp_path: Path) -> None:
    async with served(tmp_path) as it, trainer(it.sglang) as port:
        await join(it, group(port))
        await it.client.completed(it.client.pause("abort"))
        sender = Sender(it.client, "session-v2")
        begun = await sender.begun(version="v2", transfer={"nccl": group(port)}, **UNDER)
        await sender.sent(sender.abort())
        ended = await begun.end()
        assert not ended.HasField("completed")
        assert it.model.groups == set()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"group": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"source_rank": 1}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"address": "10.0.0.1"}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_is_not_joined(
    tmp_path: Path, changes: dict[str, Any], code: grpc.StatusCode
) -> None:
    async with served(tmp_path) as it, trainer(it.sglang) as port:
        way = group(port)
        for name, value in changes.items():
            setattr(way, name, value)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await join(it, way)
        assert raised.value.code() is code
        assert it.sglang.bodies(INIT) == []
        assert await it.generates()


@asynccontextmanager
async def attached(tmp_path: Path, sglang: SglangDouble) -> AsyncIterator[SglangEngine]:
    dialect = SglangDialect()
    http = dialect.connect(sglang.url, PATIENCE)
    allowed = Allowed(rendezvous=(RendezvousRule.parse("127.0.0.0/8:1-65535"),))
    found = await dialect.discover(http, allowed)
    (tmp_path / "data").mkdir()
    yield await SglangEngine.attach(http, found, allowed, Notes(tmp_path / "data"))
    await http.close()


def transfer(port: int) -> NcclTransfer:
    return NcclTransfer(address="127.0.0.1", port=port, world_size=2, rank_offset=1, group="g")


async def test_a_trainer_that_never_listens_keeps_no_other_away_for_long(tmp_path: Path) -> None:
    async with (
        running_sglang(checkpoint(tmp_path / "model", 1)) as sglang,
        attached(tmp_path, sglang) as engine,
    ):
        with pytest.raises(RuntimeFault) as refused:
            await join_group(engine, transfer(1), meet_s=2.5)
        assert refused.value.reason == "TRAINER_NOT_THERE"
        assert engine.group is None
        assert not sglang.bodies(INIT)


async def test_an_engine_that_waits_for_a_trainer_is_not_excused_for_good(tmp_path: Path) -> None:
    """Else it would be called ready for half an hour, while it answers nobody."""
    async with (
        running_sglang(checkpoint(tmp_path / "model", 1)) as sglang,
        attached(tmp_path, sglang) as engine,
        trainer(sglang) as port,
    ):
        sglang.model.members.clear()
        joining = asyncio.create_task(join_group(engine, transfer(port), gather_s=0.1))
        await until(lambda: bool(sglang.bodies(INIT)) and not engine.occupied)
        with pytest.raises(RuntimeFault) as refused:
            await engine.same()
        assert refused.value.reason == "SCHEDULER_SILENT"
        joining.cancel()
        await asyncio.wait({joining})
