"""Weights that a trainer broadcasts to an engine's ranks: through the kit, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
import torch
from torch import Tensor

from app.reference_engine.change_orders import SharedTensor
from app.reference_engine.errors import TransferFailed
from app.reference_engine.limits import CoreSettings
from app.reference_engine.rendezvous import RendezvousRule
from app.reference_engine.serving import EngineSettings, ServedEngine, served
from app.reference_engine.sources import SourcePolicy, discard
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.reference_engine.transfer import transfer_by
from app.reference_engine.transfer_messages import GroupBackend, JoinGroup
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.reference_engine.calling import Clients, clients_of
from tests.reference_engine.ranks import nursery
from tests.reference_engine.serving import PATIENCE_S, eventually
from tests.reference_engine.trainers import GROUP, Trainer, half, tensors_of, trainer

pytestmark = pytest.mark.anyio

FLOAT32, BFLOAT16 = pb.TENSOR_DTYPE_FLOAT32, pb.TENSOR_DTYPE_BFLOAT16
GATE = "model.layers.1.mlp.gate_proj.weight"
PREFIX = f"chadburn-test-{uuid4().hex}-"  # other engines are tried at the same time


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another version of the small model."""
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("other"), 1)


@pytest.fixture(scope="module")
def new(other: Path) -> dict[str, Tensor]:
    return tensors_of(other)


def settings(checkpoint: Path, data_dir: Path, ranks: int, *roots: Path) -> EngineSettings:
    return EngineSettings(
        nursery=nursery(),
        data_dir=data_dir,
        checkpoint=checkpoint,
        weight_version="v1",
        weights_roots=roots,
        shared_prefix=PREFIX,
        rendezvous_rules=(RendezvousRule.parse("127.0.0.1:1024-65535"),),
        insecure_loopback=True,
        core=CoreSettings(torch_threads=1, kv_blocks=64, tensor_parallel_size=ranks),
        stop_grace_s=0.0,
    )


@pytest.fixture(scope="module", params=[2])
async def engine(
    request: pytest.FixtureRequest,
    tiny: Path,
    other: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ServedEngine]:
    data_dir = tmp_path_factory.mktemp("engine")
    async with served(settings(tiny, data_dir, request.param, tiny, other)) as running:
        yield running


@pytest.fixture
async def clients(engine: ServedEngine, tiny: Path) -> AsyncIterator[Clients]:
    """Every test leaves the engine with the first version, and nothing behind."""
    before = segments()
    async with clients_of(engine) as connected:
        yield connected
        if (await connected.profile()).state.weights.version != "v1":
            await connected.update("v1", disk=pb.DiskWeights(path=str(tiny))).completed()
    assert segments() == before
    assert not receivers()


async def said(clients: Clients) -> str:
    heard = await clients.generate(uuid4().hex, 24, seed=3).whole()
    assert heard.finished is not None, heard
    return heard.text


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"{PREFIX}*")}


def receivers() -> list[int]:
    """Processes of this one that receive weights."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"transfer_process" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("engine", [1, 2, pytest.param(4, marks=pytest.mark.long)], indirect=True)
async def test_weights_of_a_trainer(
    clients: Clients, engine: ServedEngine, other: Path, new: dict[str, Tensor]
) -> None:
    """The same as from disk, proved by the checksum of each rank."""
    before = await said(clients)
    assert pb.WEIGHT_SOURCE_KIND_DISTRIBUTED in (await clients.profile()).weight_sources
    with trainer(len(engine.rank_pids), lambda one: one.send(*new.values())) as sender:
        told = clients.update("v2", distributed=sender.source(new, FLOAT32))
        sent = await told.completed()
    assert [one.rank for one in sent.update_weights.evidence] == list(range(sender.ranks))
    assert sent.verification == pb.VERIFICATION_VERIFIED
    assert not sender.said
    progress = [event.progress for event in told.events if event.HasField("progress")]
    assert ("receiving", "tensors") in {(one.phase, one.unit) for one in progress}
    after = await said(clients)
    assert after != before
    read = await clients.update("v3", disk=pb.DiskWeights(path=str(other))).completed()
    assert read.update_weights.evidence == sent.update_weights.evidence
    assert await said(clients) == after


async def test_another_type_is_converted_and_checked(
    clients: Clients, new: dict[str, Tensor]
) -> None:
    sent = half(new)
    sent[GATE] = sent[GATE].clone()
    sent[GATE][3, 5] = float("nan")
    for version, check in (("v2", True), ("v3", False)):
        with trainer(2, lambda one: one.send(*sent.values())) as sender:
            told = clients.update(
                version, distributed=sender.source(sent, BFLOAT16), check_finite=check
            )
            end = await told.end()
        if check:
            assert GATE in end.failed.message
            assert end.failed.effect == pb.FAILURE_EFFECT_NONE
        else:
            assert end.completed.update_weights.weight_version == version


async def test_what_is_refused_before_anything_is_joined(
    clients: Clients, new: dict[str, Tensor]
) -> None:
    before = await said(clients)
    missing = {name: one for name, one in new.items() if name != GATE}
    cut = {**new, GATE: new[GATE][:-1]}
    empty = {**new, GATE: new[GATE][:0]}
    foreign = {**new, "model.layers.9.mlp.gate_proj.weight": new[GATE]}
    sender = Trainer(2, Trainer.stay)
    orders: list[tuple[dict[str, Tensor], pb.TensorDtype.ValueType, dict[str, Any]]] = [
        (new, FLOAT32, {"port": 80}),
        (new, FLOAT32, {"address": "127.0.0.2"}),
        (new, FLOAT32, {"address": "trainer.invalid"}),
        (new, pb.TENSOR_DTYPE_INT32, {}),
        *((wrong, FLOAT32, {}) for wrong in (missing, cut, empty, foreign)),
    ]
    for tensors, dtype, fields in orders:
        end = await clients.update("v2", distributed=sender.source(tensors, dtype, **fields)).end()
        assert end.failed.reason == "SOURCE_REFUSED", end
        assert ("rendezvous" if fields else "tensor") in end.failed.message
    assert await said(clients) == before


async def test_trainer_that_never_comes(clients: Clients, new: dict[str, Tensor]) -> None:
    before = await said(clients)
    source = Trainer(2, Trainer.stay).source(new, FLOAT32)
    end = await clients.update("v2", distributed=source, deadline_ms=5000).end()
    assert end.failed.reason == "TRANSFER_FAILED", end
    assert "rank 0" in end.failed.message
    assert "in time" in end.failed.message
    assert end.failed.retryable
    assert end.failed.effect == pb.FAILURE_EFFECT_NONE
    assert await said(clients) == before
    assert (await clients.profile()).state.admission == pb.ADMISSION_STATE_OPEN


async def test_trainer_that_dies_half_way(clients: Clients, new: dict[str, Tensor]) -> None:
    before = await said(clients)
    names = list(new)
    with trainer(2, lambda one: one.send(*list(new.values())[:5])) as sender:
        end = await clients.update("v2", distributed=sender.source(new, FLOAT32)).end()
    assert end.failed.reason == "TRANSFER_FAILED", end
    assert f"tensor {names[5]!r}" in end.failed.message
    assert list(end.failed.ranks) == [0, 1]
    assert await said(clients) == before


async def test_update_is_cancelled_while_the_trainer_is_silent(
    clients: Clients, new: dict[str, Tensor]
) -> None:
    before = await said(clients)
    with trainer(2, Trainer.stay) as sender:
        told = clients.update("v2", distributed=sender.source(new, FLOAT32))
        accepted = await told.until("accepted")
        await asyncio.to_thread(sender.joined.wait, PATIENCE_S)
        await clients.cancel(accepted.operation_id)
        assert (await told.end()).WhichOneof("event") == "cancelled"
        assert not receivers()
    assert await said(clients) == before


async def test_without_rules_it_is_not_offered(tiny: Path, tmp_path: Path) -> None:
    bare = EngineSettings(
        nursery=nursery(),
        data_dir=tmp_path,
        checkpoint=tiny,
        insecure_loopback=True,
        core=CoreSettings(torch_threads=1, kv_blocks=64),
        stop_grace_s=0.0,
    )
    async with served(bare) as engine, clients_of(engine) as clients:
        profile = await clients.profile()
        assert pb.WEIGHT_SOURCE_KIND_DISTRIBUTED not in profile.weight_sources
        source = pb.DistributedWeights(
            backend=pb.COLLECTIVE_BACKEND_GLOO,
            address="127.0.0.1",
            port=29500,
            world_size=2,
            rank_offset=1,
            group=GROUP,
            tensors=[pb.TensorSpec(name="a", dtype=FLOAT32, shape=[1])],
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await clients.update("v2", distributed=source).end()
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
async def test_rank_that_is_lost_while_weights_come(
    tiny: Path, tmp_path: Path, new: dict[str, Tensor], blow: signal.Signals
) -> None:
    chosen = replace(settings(tiny, tmp_path, 2), rank_timeout_s=3.0)
    async with served(chosen) as engine, clients_of(engine) as clients:
        before = await said(clients)
        with trainer(2, Trainer.stay) as sender:
            told = clients.update("v2", distributed=sender.source(new, FLOAT32))
            await asyncio.to_thread(sender.joined.wait, PATIENCE_S)
            os.kill(engine.rank_pids[1], blow)
            end = await told.end()
        assert end.failed.reason == "RANK_LOST", end
        assert "rank 1 was lost" in end.failed.message
        assert 1 in end.failed.ranks
        assert not receivers()
        if blow is signal.SIGSTOP:  # ranks that are back serve what they served

            async def back() -> bool:
                return (await clients.profile()).state.weights.state == pb.WEIGHTS_STATE_VALID

            await eventually(back)
            assert await said(clients) == before


@pytest.mark.long
async def test_engine_that_stops_while_weights_come(
    tiny: Path, tmp_path: Path, new: dict[str, Tensor]
) -> None:
    before = segments()
    with trainer(1, Trainer.stay) as sender:
        async with served(settings(tiny, tmp_path, 1)) as engine, clients_of(engine) as clients:
            told = clients.update("v2", distributed=sender.source(new, FLOAT32))
            await asyncio.to_thread(sender.joined.wait, PATIENCE_S)
            assert segments() != before
            told.rpc.cancel()
        assert not receivers()
        assert segments() == before


# ---- the transfer itself, without an engine ----


def joining(sender: Trainer, **fields: object) -> JoinGroup:
    given: dict[str, object] = {
        "backend": GroupBackend.GLOO,
        "address": "127.0.0.1",
        "port": sender.port,
        "world_size": sender.ranks + 1,
        "rank_offset": 1,
        "source_rank": 0,
        "group": GROUP,
        "ranks": sender.ranks,
        "patience_s": PATIENCE_S,
        **fields,
    }
    return JoinGroup(**given)  # type: ignore[arg-type]


WANTED = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.full((5,), 7.0), "c": torch.ones(4)}


async def received(sender: Trainer, patience_s: float = PATIENCE_S) -> dict[str, Tensor]:
    tensors = [SharedTensor(name, "F32", tuple(one.shape), 0) for name, one in WANTED.items()]
    own = SourcePolicy(shared_prefix=f"chadburn-test-{uuid4().hex}").room(
        tensors, [one.nbytes for one in WANTED.values()]
    )
    loop = asyncio.get_running_loop()
    try:
        async with transfer_by(joining(sender)) as transfer:
            await transfer.join(loop.time() + PATIENCE_S)
            await transfer.receive(own.path, own.tensors, loop.time() + patience_s)
        content = bytearray(await asyncio.to_thread(Path(own.path).read_bytes))
        return {
            one.name: torch.frombuffer(
                content, dtype=torch.float32, count=one.shape[0], offset=one.offset
            )
            for one in own.tensors
        }
    finally:
        discard(own)


@pytest.mark.parametrize(
    ("sent", "tensor", "cause"),
    [
        ([WANTED["a"], torch.ones(6)], "b", "more bytes were sent than it has"),
        ([WANTED["a"], WANTED["b"], torch.ones(3)], "c", "fewer bytes were sent than it has"),
        pytest.param(
            [WANTED["a"], WANTED["b"]],
            "c",
            "it was not sent in time (2 of 3 tensors came)",
            marks=pytest.mark.long,
        ),
    ],
    ids=["longer", "shorter", "missing"],
)
async def test_trainer_that_is_wrong_about_a_tensor(
    sent: list[Tensor], tensor: str, cause: str
) -> None:
    def act(one: Trainer) -> None:
        one.send(*sent)
        one.stay()

    with trainer(2, act) as sender:
        with pytest.raises(TransferFailed, match=f"rank [01], tensor '{tensor}': ") as failed:
            await received(sender, PATIENCE_S if "bytes" in cause else 1.0)
        assert failed.value.cause == cause
    assert not receivers()


@pytest.mark.long
async def test_nccl_needs_devices() -> None:
    if torch.cuda.is_available():
        return
    group = joining(Trainer(1, Trainer.stay), backend=GroupBackend.NCCL)
    with pytest.raises(TransferFailed, match="CUDA"):
        async with transfer_by(group) as transfer:
            await transfer.join(asyncio.get_running_loop().time() + PATIENCE_S)


@pytest.mark.long
async def test_process_that_receives_is_killed() -> None:
    with trainer(2, Trainer.stay) as sender:
        task = asyncio.ensure_future(received(sender))
        await asyncio.to_thread(sender.joined.wait, PATIENCE_S)
        (receiver,) = receivers()
        os.kill(receiver, signal.SIGKILL)
        with pytest.raises(TransferFailed, match=r"rank 0.*ended .signal 9.") as failed:
            await task
        assert failed.value.rank == 0


@pytest.mark.long
async def test_caller_that_leaves_takes_the_process_with_it() -> None:
    with trainer(2, Trainer.stay) as sender:
        task = asyncio.ensure_future(received(sender))
        await asyncio.to_thread(sender.joined.wait, PATIENCE_S)
        task.cancel()
        await asyncio.wait({task})

        async def gone() -> bool:
            return not receivers()

        await eventually(gone)
