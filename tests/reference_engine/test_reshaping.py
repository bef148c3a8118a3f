"""Other limits and other numbers of ranks, under real orders; and back where that fails."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from safetensors.torch import load_file

from app.reference_engine.limits import CoreSettings
from app.reference_engine.serving import EngineSettings, Pace, ServedEngine, served
from app.reference_engine.tiny_model import ensure_tiny_checkpoint
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import server_pb2
from tests.reference_engine.calling import Clients, Heard, Told, clients_of
from tests.reference_engine.ranks import nursery, ranks
from tests.reference_engine.serving import PATIENCE_S, eventually

pytestmark = pytest.mark.anyio

FILE = "model.safetensors"
VALID = pb.WEIGHTS_STATE_VALID
OPEN = pb.ADMISSION_STATE_OPEN
FIRST_LIMITS = {"max_running_requests": 4, "max_batched_tokens": 64}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another version of the small model."""
    return ensure_tiny_checkpoint(tmp_path_factory.mktemp("other"), 1)


@pytest.fixture(scope="module")
async def engine(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServedEngine]:
    settings = EngineSettings(
        nursery=nursery(),
        data_dir=tmp_path_factory.mktemp("engine"),
        checkpoint=tiny,
        weight_version="v1",
        weights_roots=(tiny,),
        insecure_loopback=True,
        core=CoreSettings(
            torch_threads=1, step_delay_ms=2, kv_blocks=256, max_running=4, max_batched_tokens=64
        ),
        recovery=Pace(calm_s=0.0),
        stop_grace_s=0.0,
    )
    async with served(settings) as running:
        yield running


@pytest.fixture
async def clients(engine: ServedEngine, tiny: Path) -> AsyncIterator[Clients]:
    """Every test leaves one rank, the first version and limits, open and idle."""
    async with clients_of(engine) as connected:
        yield connected
        await whole(connected)
        if await sizes(connected) != (1, 4, 64):
            target = {"tensor_parallel_size": 1, **FIRST_LIMITS}
            await reconfigure(connected, **target).completed()
        if (await connected.profile()).state.weights.version != "v1":
            disk = pb.DiskWeights(path=str(tiny))
            await connected.update("v1", disk=disk).completed()
        await connected.flush()


def reconfigure(clients: Clients, **target: Any) -> Told:
    drain = target.pop("drain", pb.DRAIN_RULE_WAIT)
    request = pb.ReconfigureServingRequest(
        idempotency_key=uuid4().hex, drain=drain, whole_engine=pb.WholeEngine(), **target
    )
    return Told(clients.admin.ReconfigureServing(request, timeout=PATIENCE_S))


async def sizes(clients: Clients) -> tuple[int, int, int]:
    info = await clients.control.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=10)
    capacity = info.capacity
    return (
        info.parallelism.tensor_parallel_size,
        capacity.max_running_requests,
        capacity.max_batched_tokens,
    )


async def said(clients: Clients) -> Heard:
    """Sampled, with a seed."""
    heard = await clients.generate(uuid4().hex, 24, seed=3).whole()
    assert heard.finished is not None, heard
    return heard


async def ranks_are(count: int) -> None:
    async def reached() -> bool:
        return len(ranks()) == count

    await eventually(reached)


async def whole(clients: Clients) -> None:
    async def reached() -> bool:
        state = (await clients.profile()).state
        return not state.ranks and state.weights.state == VALID

    await eventually(reached)


async def test_limits_change_in_the_ranks_that_are_there(clients: Clients) -> None:
    """They hold for what comes, and the prefix cache stays."""
    await said(clients)
    pids, before = ranks(), await clients.profile()
    completed = await reconfigure(
        clients, max_running_requests=1, max_batched_tokens=16
    ).completed()
    assert completed.changed
    assert completed.verification == pb.VERIFICATION_VERIFIED
    result = completed.reconfigure_serving
    assert (result.max_running_requests, result.max_batched_tokens) == (1, 16)
    assert await sizes(clients) == (1, 1, 16)
    assert ranks() == pids
    assert (await clients.profile()).revision > before.revision
    assert (await said(clients)).cached > 0
    calls = [clients.generate(f"limited{n}", 50) for n in range(3)]
    await calls[0].after(1)

    async def waiting() -> bool:
        load = await clients.load()
        assert load.running_requests <= 1
        return load.queued_requests == 2

    await eventually(waiting)
    for call in calls:
        await call.whole()
    again = await reconfigure(clients, max_running_requests=1).completed()
    assert not again.changed


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ({"tensor_parallel_size": 3}, "tensor parallel size"),
        ({"tensor_parallel_size": 1024}, "tensor parallel size"),
        ({"max_batched_tokens": 3}, "max_batched_tokens"),
        ({"max_running_requests": 65}, "max_batched_tokens"),
    ],
)
async def test_what_is_not_possible_changes_nothing(
    clients: Clients, target: dict[str, int], cause: str
) -> None:
    end = await reconfigure(clients, **target).end()
    assert end.failed.reason == "SHAPE_NOT_POSSIBLE"
    assert cause in end.failed.message
    assert end.failed.effect == pb.FAILURE_EFFECT_NONE
    assert await sizes(clients) == (1, 4, 64)
    assert (await clients.profile()).state.admission == OPEN
    await said(clients)


async def test_from_one_rank_to_two_to_four_and_back(
    clients: Clients, engine: ServedEngine, other: Path
) -> None:
    """The same tokens in each shape, also of weights that no disk has; each shape comes back from
    a loss; facts and revision follow."""
    first = await said(clients)
    before = await clients.profile()
    call = await clients.generate("runs", 60).after(1)
    told = reconfigure(clients, tensor_parallel_size=2, max_running_requests=8)
    await told.until("accepted")
    same = reconfigure(clients, tensor_parallel_size=2, max_running_requests=8)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reconfigure(clients, tensor_parallel_size=4).end()
    assert refused.value.code() == grpc.StatusCode.ABORTED
    completed = await told.completed()
    assert (await same.end()).operation_id == told.events[0].operation_id
    assert completed.reconfigure_serving.tensor_parallel_size == 2
    assert completed.verification == pb.VERIFICATION_VERIFIED
    heard = await call.whole()
    assert heard.finished is not None  # it was waited for
    assert heard.tokens == 60
    await ranks_are(2)
    profile = await clients.profile()
    assert profile.world_size == 2
    assert profile.revision == completed.revision > before.revision
    assert profile.state.weights == before.state.weights
    assert await sizes(clients) == (2, 8, 64)
    now = await said(clients)
    assert (now.text, now.cached) == (first.text, 0)  # caches begin empty
    assert (await said(clients)).cached > 0

    os.kill(ranks()[1], signal.SIGKILL)
    await ranks_are(0)
    await whole(clients)
    assert await sizes(clients) == (2, 8, 64)
    assert (await said(clients)).text == first.text

    tensors = {name: one.float().contiguous() for name, one in load_file(other / FILE).items()}
    inline = [
        pb.InlineTensor(
            spec=pb.TensorSpec(name=name, dtype=pb.TENSOR_DTYPE_FLOAT32, shape=list(one.shape)),
            data=one.numpy().tobytes(),
        )
        for name, one in tensors.items()
    ]
    source = pb.TensorWeights(inline=pb.InlineWeights(tensors=inline))
    await clients.update("v2", tensors=source).completed()
    second = await said(clients)
    assert second.text != first.text
    for size in (4, 1):
        await reconfigure(clients, tensor_parallel_size=size).completed()
        await ranks_are(size)
        assert (await said(clients)).text == second.text
        assert (await clients.profile()).state.weights.version == "v2"


@pytest.mark.parametrize("victim", ["new", "old"])
async def test_a_rank_killed_in_the_middle_leaves_the_old_shape(
    clients: Clients, victim: str
) -> None:
    """A new one: nobody notices but the order. An old one: all come back in the old shape."""
    text = (await said(clients)).text
    before, old = await clients.profile(), ranks()
    told = reconfigure(clients, tensor_parallel_size=2)
    await ranks_are(3)
    os.kill(ranks()[-1] if victim == "new" else old[0], signal.SIGKILL)
    end = await told.end()
    assert end.WhichOneof("event") == "failed", end
    assert "rank" in end.failed.message
    assert end.failed.reason == ("RANKS_NOT_STARTED" if victim == "new" else "RANK_LOST")
    await whole(clients)
    await ranks_are(1)
    assert (ranks() == old) is (victim == "new")
    profile = await clients.profile()
    assert profile.world_size == 1
    assert profile.state.weights == before.state.weights
    assert profile.state.role == before.state.role
    if profile.state.admission != OPEN:
        await clients.resume()
    assert (await said(clients)).text == text


async def test_a_reconfiguration_can_be_cancelled(clients: Clients) -> None:
    told = reconfigure(clients, tensor_parallel_size=2)
    accepted = await told.until("accepted")
    await ranks_are(3)
    await clients.cancel(accepted.operation_id)
    assert (await told.end()).WhichOneof("event") == "cancelled"
    await ranks_are(1)
    assert (await clients.profile()).state.admission == OPEN
    await said(clients)


async def test_drain_rules_as_they_are_said(clients: Clients) -> None:
    call = await clients.generate("runs", 1500).after(1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reconfigure(clients, max_running_requests=2, drain=pb.DRAIN_RULE_REFUSE).end()
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert not call.over
    await reconfigure(clients, max_running_requests=2, drain=pb.DRAIN_RULE_ABORT).completed()
    assert (await call.whole()).tokens < 1500
    assert await sizes(clients) == (1, 2, 64)


async def test_a_pause_is_kept_and_held_requests_are_served_by_the_new_ranks(
    clients: Clients,
) -> None:
    await clients.pause(pb.PAUSE_MODE_DRAIN).completed()
    held = clients.generate("held", 5)
    await reconfigure(clients, tensor_parallel_size=2).completed()
    assert (await clients.profile()).state.admission == pb.ADMISSION_STATE_PAUSED
    assert not held.over
    await clients.resume()
    heard = await held.whole()
    assert heard.finished is not None
