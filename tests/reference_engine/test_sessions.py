"""Weights in pieces on two ranks: from files, from shared memory, and broadcast by a trainer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.enginekit.server import EngineServer, KitSettings
from app.reference_engine import change_orders as c
from app.reference_engine.engine import Engine
from app.reference_engine.intake import Intake
from app.reference_engine.rendezvous import RendezvousRule
from app.reference_engine.runtime import ReferenceRuntime
from app.reference_engine.sources import SourcePolicy
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.enginekit.client import Client, client_of
from tests.enginekit.session_engine import Sender, told
from tests.reference_engine.serving import serving
from tests.reference_engine.trainers import GROUP, Trainer, trainer

pytestmark = pytest.mark.anyio

FILE = "model.safetensors"
PREFIX = f"chadburn-test-{uuid4().hex[:8]}-"  # others test at the same time
SHARED = Path("/dev/shm")
RANKS = (0, 1)
DTYPES = {torch.float32: pb.TENSOR_DTYPE_FLOAT32, torch.bfloat16: pb.TENSOR_DTYPE_BFLOAT16}
Weights = dict[str, torch.Tensor]


@dataclass
class Served:
    """`admin_address` and `inference_address` as `client_of` wants them."""

    engine: Engine
    admin_address: str
    inference_address: str

    async def sums(self) -> tuple[str, ...]:
        """SHA-256 of the live weights of each rank, computed by it now."""
        found = []
        for rank in RANKS:
            undone = self.engine.issue(c.UndoChange(uuid4().hex))
            answer = await self.engine.ack(undone, rank)
            assert isinstance(answer, c.ChangeUndone)
            found.append(answer.weights_sha256)
        return tuple(found)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another version of the small model, in three files below one root."""
    root = tmp_path_factory.mktemp("parts")
    whole = load_file(ensure_tiny_checkpoint(tmp_path_factory.mktemp("other"), 1) / FILE)
    names = sorted(whole)
    for number in range(3):
        part = {name: whole[name] for name in names[number::3]}
        save_file(part, root / f"part-{number}.safetensors", {"format": "pt"})
    damaged = root / "damaged"
    damaged.mkdir()
    raw = (root / "part-1.safetensors").read_bytes()
    (damaged / "part-1.safetensors").write_bytes(raw[:-4])
    return root


@pytest.fixture(scope="module")
def whole(parts: Path) -> Weights:
    files = sorted(parts.glob("*.safetensors"))
    return {name: one for file in files for name, one in load_file(file).items()}


@pytest.fixture(scope="module")
async def served(
    tiny: Path, parts: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    async with serving(tiny, tensor_parallel_size=2, kv_blocks=256, watch_interval_s=0.2) as engine:
        intake = Intake(
            tokenizer=engine.tokenizer,
            vocab_size=engine.config.vocab_size,
            max_model_len=engine.ready.max_model_len,
            draw_seed=lambda: 1,
        )
        policy = SourcePolicy(
            roots=(tiny, parts),
            shared_prefix=PREFIX,
            rendezvous_rules=(RendezvousRule.parse("127.0.0.1:1-65535"),),
        )
        runtime = ReferenceRuntime(
            engine,
            intake,
            model_name="tiny",
            engine_version="0",
            weight_version="v1",
            sources=policy,
        )
        settings = KitSettings(
            data_dir=tmp_path_factory.mktemp("kit"),
            insecure_loopback=True,
            observe_interval_s=0.1,
        )
        server = EngineServer(runtime, settings)
        await server.start()
        try:
            yield Served(engine, server.admin_address, server.inference_address)
        finally:
            await server.stop(0)


@pytest.fixture
async def client(served: Served, tiny: Path) -> AsyncIterator[Client]:
    """Every test begins with the first version, and leaves nothing in shared memory."""
    async with client_of(served) as connected:
        await served.engine.restart()
        back = connected.update("v1", pause="drain", disk=pb.DiskWeights(path=str(tiny)))
        assert (await connected.completed(back)).changed
        yield connected
    left = await asyncio.to_thread(lambda: [*SHARED.glob(f"{PREFIX}*")])
    assert left == []


@pytest.fixture
def sender(client: Client) -> Sender:
    return Sender(client, f"session-{uuid4().hex[:8]}")


def on_disk(parts: Path) -> dict[str, Any]:
    return {"disk": pb.DiskTransfer(path=str(parts))}


def specs(weights: Weights) -> list[pb.TensorSpec]:
    return [
        pb.TensorSpec(name=name, dtype=DTYPES[one.dtype], shape=list(one.shape))
        for name, one in weights.items()
    ]


def group_of(port: int) -> pb.NcclTransfer:
    return pb.NcclTransfer(
        address="127.0.0.1",
        port=port,
        world_size=1 + len(RANKS),
        rank_offset=1,
        backend=pb.COLLECTIVE_BACKEND_GLOO,
        group=GROUP,
    )


def halves(weights: Weights) -> list[Weights]:
    names = list(weights)
    return [{name: weights[name] for name in names[at::2]} for at in (0, 1)]


@pytest.fixture
def segments() -> Iterator[Any]:
    """Puts tensors into shared memory of this user, and tells them as a chunk."""
    made: list[Path] = []

    def put(weights: Weights) -> dict[str, pb.IpcChunk]:
        path = Path("/dev/shm") / f"{PREFIX}{uuid4().hex}"
        made.append(path)
        handles, at = [], 0
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            for one in weights.values():
                handle = pb.IpcHandle(handle=path.name.encode(), offset_bytes=at)
                handles.append(handle)
                at += file.write(one.contiguous().view(torch.uint8).numpy().tobytes())
        return {"ipc": pb.IpcChunk(tensors=specs(weights), handles=handles)}

    def remove() -> None:
        for path in made:
            path.unlink(missing_ok=True)

    put.remove = remove  # type: ignore[attr-defined]
    yield put
    remove()


async def test_it_says_by_what_ways_pieces_may_come(client: Client) -> None:
    profile = await client.profile()
    assert list(profile.weight_sessions) == [
        pb.WEIGHT_TRANSFER_BACKEND_NCCL,
        pb.WEIGHT_TRANSFER_BACKEND_IPC,
        pb.WEIGHT_TRANSFER_BACKEND_DISK,
    ]


async def test_from_disk_and_back_again(
    client: Client, sender: Sender, served: Served, parts: Path, tiny: Path
) -> None:
    before = await served.sums()
    begun = await sender.begun(transfer=on_disk(parts))
    for number in range(3):
        await sender.sent(sender.chunk(number, f"part-{number}.safetensors"))
        await told(begun, "staged", number + 1)
        # Beside the live ones, on every rank.
        assert await served.sums() == before
    result = (await client.completed(sender.commit(3))).update_weights
    after = await served.sums()
    assert [one.sha256.hex() for one in result.evidence] == list(after)
    assert not set(before) & set(after)
    # What came from files alone is found there again after a loss.
    os.kill(served.engine.pids[1], signal.SIGKILL)
    await asyncio.wait_for(served.engine.until_lost(), 60)
    await served.engine.restart()
    assert not served.engine.holdings.weights_missing
    assert await served.sums() == after


async def test_from_shared_memory(
    client: Client, sender: Sender, served: Served, whole: Weights, segments: Any
) -> None:
    begun = await sender.begun(transfer={"ipc": pb.IpcTransfer()})
    for number, half in enumerate(halves(whole)):
        await sender.sent(sender.chunk(number, payload=segments(half)))
        await told(begun, "staged", number + 1)
        # What is staged is a copy: whoever lent the memory may take it back.
        segments.remove()
    result = (await client.completed(sender.commit(2))).update_weights
    assert [one.sha256.hex() for one in result.evidence] == list(await served.sums())
    assert (await client.profile()).state.weights.version == "v2"


async def test_as_a_trainer_broadcasts_them(
    client: Client, sender: Sender, served: Served, whole: Weights, parts: Path
) -> None:
    pieces = halves(whole)

    def send(one: Trainer) -> None:
        for half in pieces:
            one.send(*half.values())
        one.stay()

    with trainer(len(RANKS), send) as sending:
        begun = await sender.begun(transfer={"nccl": group_of(sending.port)})
        for number, half in enumerate(pieces):
            payload = {"nccl": pb.NcclChunk(tensors=specs(half))}
            await sender.sent(sender.chunk(number, payload=payload))
            await told(begun, "staged", number + 1)
        result = (await client.completed(sender.commit(2))).update_weights
    by_broadcast = [one.sha256.hex() for one in result.evidence]
    assert by_broadcast == list(await served.sums())
    # The same, from disk in one go, has the same sums.
    other = Sender(client, "from-disk")
    begun = await other.begun(transfer=on_disk(parts))
    files = [f"part-{number}.safetensors" for number in range(3)]
    await other.sent(other.chunk(0, *files))
    result = (await client.completed(other.commit(1))).update_weights
    assert [one.sha256.hex() for one in result.evidence] == by_broadcast


async def test_a_trainer_that_never_joins_is_given_up_at_the_end_of_the_lease(
    client: Client, sender: Sender, served: Served
) -> None:
    before = await served.sums()
    absent = Trainer(len(RANKS), lambda _: None)  # a place to meet, and nobody there
    group = group_of(absent.port)
    begun = await client.begin(sender.begin(transfer={"nccl": group}, lease_ms=1500))
    failed = (await begun.end()).failed
    assert (failed.reason, failed.effect) == ("SESSION_LEASE_EXPIRED", pb.FAILURE_EFFECT_NONE)
    assert await served.sums() == before


def last_of(events: list[Any]) -> dict[int, str]:
    """The last that was told of each rank."""
    states: dict[int, str] = {}
    for event in events:
        if event.HasField("rank"):
            states[event.rank.rank] = pb.RankState.Name(event.rank.state)
    return states


PIECES = {
    "abort": ("part-0.safetensors",),
    "missing": ("part-0.safetensors", "part-1.safetensors"),
    "twice": ("part-0.safetensors", "part-0.safetensors"),
    "not-there": ("part-0.safetensors", "gone.safetensors"),
    "damaged": ("part-0.safetensors", "damaged/part-1.safetensors"),
}


@pytest.mark.parametrize("how", PIECES)
async def test_what_ends_a_session_leaves_every_rank_as_it_was(
    how: str, client: Client, sender: Sender, served: Served, parts: Path
) -> None:
    before = await served.sums()
    begun = await sender.begun(transfer=on_disk(parts))
    for number, name in enumerate(PIECES[how]):
        await sender.sent(sender.chunk(number, name))
    if how == "abort":
        await sender.sent(sender.abort())
    if how == "missing":
        await sender.sent(sender.commit(2))
    events = await begun.rest()
    end = events[-1]
    if how == "abort":
        assert end.HasField("cancelled")
    else:
        assert end.failed.effect == pb.FAILURE_EFFECT_NONE
        assert end.failed.reason in ("SOURCE_REFUSED", "RANK_REJECTED")
        if how in ("missing", "twice"):
            assert ".weight'" in end.failed.message  # which tensor
    # A rank says so only after it has computed the sum of its live weights again.
    assert last_of(events) == dict.fromkeys(RANKS, "RANK_STATE_ROLLED_BACK")
    assert await served.sums() == before
    state = (await client.profile()).state
    assert (state.weights.version, state.admission) == ("v1", pb.ADMISSION_STATE_OPEN)


async def test_values_that_are_no_numbers_are_refused_by_the_piece_that_has_them(
    client: Client, sender: Sender, served: Served, whole: Weights, segments: Any
) -> None:
    before = await served.sums()
    name, tensor = next(iter(whole.items()))
    poisoned = tensor.clone()
    poisoned.view(-1)[0] = torch.nan
    begun = await sender.begun(transfer={"ipc": pb.IpcTransfer()}, check_finite=True)
    await sender.sent(sender.chunk(0, payload=segments({name: poisoned})))
    failed = (await begun.end()).failed
    assert failed.reason == "RANK_REJECTED"
    assert (failed.code, failed.retryable) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], False)
    assert name in failed.message
    assert await served.sums() == before


@pytest.mark.parametrize(
    "handle",
    [
        pb.IpcHandle(handle=b"etc-passwd"),
        pb.IpcHandle(handle=f"{PREFIX}not-there".encode()),
        pb.IpcHandle(handle=b"\xff\xfe"),
        pb.IpcHandle(device_uuid="GPU-1", handle=b"x" * 64),
    ],
)
async def test_memory_that_is_not_lent_to_the_engine(
    handle: pb.IpcHandle, client: Client, sender: Sender, whole: Weights
) -> None:
    name, tensor = next(iter(whole.items()))
    begun = await sender.begun(transfer={"ipc": pb.IpcTransfer()})
    chunk = pb.IpcChunk(tensors=specs({name: tensor}), handles=[handle])
    await sender.sent(sender.chunk(0, payload={"ipc": chunk}))
    assert (await begun.end()).failed.reason == "SOURCE_REFUSED"


async def test_a_rank_that_dies_between_two_pieces(
    client: Client, sender: Sender, served: Served, parts: Path
) -> None:
    before = await served.sums()
    begun = await sender.begun(transfer=on_disk(parts))
    await sender.sent(sender.chunk(0, "part-0.safetensors"))
    await told(begun, "staged", 1)
    os.kill(served.engine.pids[1], signal.SIGKILL)
    failed = (await begun.end()).failed
    assert failed.reason == "RANK_LOST"
    assert (failed.code, failed.retryable) == (grpc.StatusCode.UNAVAILABLE.value[0], True)
    assert 1 in failed.ranks
    await served.engine.restart()
    assert await served.sums() == before
