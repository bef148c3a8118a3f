"""Lost ranks come back by themselves: with what was committed, at a measured pace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from safetensors.torch import load_file

from app.reference_engine.limits import CoreSettings
from app.reference_engine.messages import Gate
from app.reference_engine.nursery import Nursery
from app.reference_engine.recovery import Pace, Pacing, Recovery
from app.reference_engine.serving import EngineSettings, ServedEngine, served
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import error_pb2, lifecycle_pb2
from tests.reference_engine.calling import Clients, clients_of
from tests.reference_engine.ranks import nursery, ranks
from tests.reference_engine.serving import PATIENCE_S, ask, eventually, serving

pytestmark = pytest.mark.anyio

SERVING = health_pb2.HealthCheckResponse.SERVING
RANK_TIMEOUT_S = 6.0


def test_each_loss_in_a_row_waits_longer_and_calm_forgets() -> None:
    pacing = Pacing(Pace(first_s=1.0, longest_s=10.0, calm_s=60.0))
    waits = [pacing.wait_s(lived) for lived in (0.0, 59.0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert [pacing.wait_s(lived) for lived in (60.0, 0.0)] == [0.0, 1.0]


@pytest.mark.parametrize("given", [{"first_s": 0.0}, {"longest_s": 0.5}, {"calm_s": -1.0}])
def test_a_pace_that_is_none(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="pace"):
        Pace(**given)


async def test_starts_that_fail_do_not_follow_each_other_at_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No interpreter can begin for a while: tried again at a pace, and back once one can."""
    slept: list[float] = []
    own = Nursery()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(own.close)
        engine = await stack.enter_async_context(serving(tiny, ranks_from=own))

        async def sleep(wait_s: float) -> None:
            slept.append(wait_s)
            if len(slept) == 4:
                monkeypatch.delenv("PYTHONHOME")

        recovery = Recovery(engine, lambda: Gate.OPEN, now=lambda: 0.0, sleep=sleep)
        own.close()
        monkeypatch.setenv("PYTHONHOME", "/nowhere")
        running = asyncio.create_task(recovery.run())
        os.kill(engine.pids[0], signal.SIGKILL)

        async def back() -> bool:
            return len(slept) == 4 and not engine.lost

        await eventually(back)
        running.cancel()
        await asyncio.wait({running})
        assert slept == [0.0, 1.0, 2.0, 4.0]
        assert len((await ask(engine, "a", max_tokens=5).whole()).ids) == 5


def settings(checkpoint: Path, data_dir: Path, ranks: int) -> EngineSettings:
    return EngineSettings(
        nursery=nursery(),
        data_dir=data_dir,
        checkpoint=checkpoint,
        weight_version="v1",
        weights_roots=(checkpoint,),
        insecure_loopback=True,
        core=CoreSettings(
            torch_threads=1, step_delay_ms=2, kv_blocks=256, tensor_parallel_size=ranks
        ),
        rank_timeout_s=RANK_TIMEOUT_S,
        recovery=Pace(calm_s=0.0),
        stop_grace_s=0.0,
    )


@pytest.fixture(scope="module")
async def engine(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServedEngine]:
    async with served(settings(tiny, tmp_path_factory.mktemp("engine"), 2)) as running:
        yield running


@pytest.fixture
async def clients(engine: ServedEngine) -> AsyncIterator[Clients]:
    async with clients_of(engine) as connected:
        yield connected


async def readiness(clients: Clients) -> int:
    request = health_pb2.HealthCheckRequest(service="openengine.v1.Inference")
    return int((await clients.health.Check(request, timeout=PATIENCE_S)).status)


async def back_again(clients: Clients) -> None:
    async def ready() -> bool:
        return await readiness(clients) == int(SERVING)

    await eventually(ready)


async def watched(clients: Clients) -> list[int]:
    """Readiness as a watcher is told it, from SERVING to SERVING."""
    request = health_pb2.HealthCheckRequest(service="openengine.v1.Inference")
    told: list[int] = []
    async for response in clients.health.Watch(request, timeout=PATIENCE_S):
        told.append(response.status)
        if len(told) > 1 and told[-1] == SERVING:
            break
    return told


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_is_told_and_comes_back_with_what_was_committed(
    clients: Clients, how: signal.Signals
) -> None:
    """Nobody gives an order: health and facts say it all the same, and what ran ends with it."""
    await back_again(clients)
    expected = (await clients.generate("before", 24).whole()).text
    before = await clients.profile()
    call = await clients.generate("long", 1500).after(3)
    watching = asyncio.create_task(watched(clients))
    pids = ranks()
    os.kill(pids[1], how)
    heard = await call.whole()
    assert heard.error is not None
    assert heard.error.code == error_pb2.ERROR_CODE_INTERNAL
    assert heard.error.retryable
    assert "rank 1 of the engine was lost" in heard.error.message

    seen: list[Any] = []

    async def noticed() -> bool:
        # At once: on a busy machine the ranks are back before a second question is asked.
        asked = lifecycle_pb2.HealthRequest()
        health = clients.control.Health(asked, timeout=PATIENCE_S)
        seen[:] = await asyncio.gather(clients.profile(), health)
        return bool(seen[0].state.ranks)

    await eventually(noticed)
    during, health = seen
    assert during.revision == before.revision + 1
    named = {one.rank: one.message for one in during.state.ranks}
    assert named.keys() == {0, 1}
    assert "rank 1" in named[0]
    assert all(one.state == pb.RANK_STATE_FAILED for one in during.state.ranks)
    assert during.state.weights.state == pb.WEIGHTS_STATE_UNKNOWN
    assert health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY
    assert any("rank 1" in check.message for check in health.checks)

    statuses = await asyncio.wait_for(watching, PATIENCE_S)
    assert [one == SERVING for one in statuses] == [True, False, True]
    after = await clients.profile()
    assert after.revision == during.revision + 1
    assert not after.state.ranks
    assert after.state.weights == before.state.weights
    assert after.instance_id == before.instance_id
    assert (await clients.generate("after", 24).whole()).text == expected
    assert len(ranks()) == 2
    assert set(ranks()).isdisjoint(pids)


async def test_weights_that_can_not_be_had_again_are_missing_until_a_full_update(
    clients: Clients, tiny: Path
) -> None:
    """They came through memory: no rank has them any more, and nobody else."""
    await back_again(clients)
    expected = (await clients.generate("before", 24).whole()).text
    tensors = {name: one.float() for name, one in load_file(tiny / "model.safetensors").items()}
    inline = [
        pb.InlineTensor(
            spec=pb.TensorSpec(name=name, dtype=pb.TENSOR_DTYPE_FLOAT32, shape=list(one.shape)),
            data=one.contiguous().numpy().tobytes(),
        )
        for name, one in tensors.items()
    ]
    source = pb.TensorWeights(inline=pb.InlineWeights(tensors=inline))
    await clients.update("v2", tensors=source).completed()
    os.kill(ranks()[1], signal.SIGKILL)

    async def missing() -> bool:
        state = (await clients.profile()).state
        return not state.ranks and state.weights.state == pb.WEIGHTS_STATE_MISSING

    await eventually(missing)
    assert await readiness(clients) != SERVING
    refused = await clients.generate("refused", 5).whole()
    assert "weights" in refused.detail
    end = await clients.update("v3", tensors=pb.TensorWeights(inline=_without_one(inline))).end()
    assert end.WhichOneof("event") == "failed"
    completed = await clients.update("v1", disk=pb.DiskWeights(path=str(tiny))).completed()
    assert completed.verification == pb.VERIFICATION_VERIFIED
    await back_again(clients)
    assert (await clients.generate("after", 24).whole()).text == expected


def _without_one(tensors: list[pb.InlineTensor]) -> pb.InlineWeights:
    return pb.InlineWeights(tensors=tensors[1:])


async def test_a_pause_outlives_the_ranks(clients: Clients) -> None:
    await back_again(clients)
    paused = await clients.pause(pb.PAUSE_MODE_KEEP).completed()
    os.kill(ranks()[0], signal.SIGKILL)

    async def whole() -> bool:
        state = (await clients.profile()).state
        return not state.ranks and state.weights.state == pb.WEIGHTS_STATE_VALID

    async def broken() -> bool:
        return bool((await clients.profile()).state.ranks)

    await eventually(broken)
    await eventually(whole)
    profile = await clients.profile()
    assert profile.state.admission == pb.ADMISSION_STATE_PAUSED
    assert profile.pause_epoch == paused.pause.pause_epoch
    call = clients.generate("held", 5)
    await clients.resume()
    assert (await call.whole()).finished is not None


async def test_an_update_that_loses_a_rank_is_undone_by_ranks_that_are_proved(
    clients: Clients, tiny: Path
) -> None:
    """Inconsistent only until the ranks that nobody can vouch for are replaced."""
    await back_again(clients)
    expected = (await clients.generate("before", 24).whole()).text
    state = (await clients.profile()).state
    pids = ranks()
    os.kill(pids[1], signal.SIGSTOP)
    told = clients.update("v2", disk=pb.DiskWeights(path=str(tiny)))
    end = await told.end()
    assert end.WhichOneof("event") == "failed", end
    assert 1 in end.failed.ranks
    await back_again(clients)
    again = (await clients.profile()).state
    assert again.weights == state.weights
    assert not again.ranks
    assert (await clients.generate("after", 24).whole()).text == expected
