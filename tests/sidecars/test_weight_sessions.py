"""Weights by a trainer's broadcast: the calls of a session, and what is left of one that ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.enginekit.rendezvous import RendezvousRule
from app.sidecars.allowed import Allowed
from tests.doubles.engine_http import Answer
from tests.doubles.vllm_http import VllmDouble, running_vllm
from tests.enginekit.client import Client, pb, refused, until
from tests.sidecars.checkpoints import checkpoint
from tests.sidecars.sidecar import administered

pytestmark = pytest.mark.anyio

GROUP = pb.NcclTransfer(address="127.0.0.1", port=29_500, world_size=2, rank_offset=1)
SPEC = pb.TensorSpec(name="w", dtype=pb.TENSOR_DTYPE_BFLOAT16, shape=[2, 2])
ALLOWED = Allowed(rendezvous=(RendezvousRule.parse("127.0.0.0/8:29500-29501"),))


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[VllmDouble, Client]]:
    async with (
        running_vllm(checkpoint(tmp_path / "model", 1), model={"backend": "nccl"}) as vllm,
        administered(vllm, tmp_path / "data", allowed=ALLOWED) as (_, client),
    ):
        yield vllm, client


def stage(client: Client, **stage: Any) -> pb.UpdateWeightsRequest:
    session = pb.WeightSession(session_id="s", **stage)
    if "begin" in stage:
        return client.update("v2", session=session)
    return pb.UpdateWeightsRequest(idempotency_key=client.key(), session=session)


def chunk(client: Client, index: int, **fields: Any) -> pb.UpdateWeightsRequest:
    nccl = pb.NcclChunk(tensors=[SPEC], **fields)
    return stage(client, chunk=pb.WeightSessionChunk(index=index, nccl=nccl))


def begin(client: Client, group: pb.NcclTransfer = GROUP) -> pb.UpdateWeightsRequest:
    return stage(client, begin=pb.WeightSessionBegin(nccl=group))


async def test_a_session_is_one_update(tmp_path: Path) -> None:
    async with served(tmp_path) as (vllm, client):
        profile = await client.profile()
        assert list(profile.weight_sessions) == [pb.WEIGHT_TRANSFER_BACKEND_NCCL]
        paused = await client.completed(client.pause("keep"))
        stream = await client.begin(begin(client))
        for index in range(2):
            await client.begin(chunk(client, index))
        await client.begin(stage(client, commit=pb.WeightSessionCommit(chunks=2)))
        end = await stream.end()
        assert end.HasField("completed"), end
        assert vllm.orders("/init_weight_transfer_engine", "/start_weight_update",
                           "/update_weights", "/finish_weight_update") == [
            "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
            "/update_weights", "/finish_weight_update",
        ]  # fmt: skip
        assert vllm.bodies("/init_weight_transfer_engine") == [
            {
                "init_info": {
                    "master_address": "127.0.0.1",
                    "master_port": 29_500,
                    "rank_offset": 1,
                    "world_size": 2,
                }
            }
        ]
        assert vllm.bodies("/update_weights")[0] == {
            "update_info": {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]]}
        }
        assert vllm.model.version == "v2"
        await client.completed(client.resume(paused.pause.pause_epoch))


async def test_no_trainer_is_met_by_an_engine_that_serves(tmp_path: Path) -> None:
    async with served(tmp_path) as (vllm, client):
        refusal = await refused(client.stream(begin(client)))
        assert refusal.reason == "NOT_PAUSED"
        await client.completed(client.pause("abort"))
        elsewhere = pb.NcclTransfer(address="10.0.0.1", port=29_500, world_size=2, rank_offset=1)
        failed = await client.failed(begin(client, elsewhere))
        assert (failed.reason, failed.effect) == ("RENDEZVOUS_NOT_ALLOWED", pb.FAILURE_EFFECT_NONE)
        assert not vllm.orders("/init_weight_transfer_engine")


@pytest.mark.long
async def test_a_session_that_is_called_off_leaves_the_engine_closed(tmp_path: Path) -> None:
    async with served(tmp_path) as (vllm, client):
        await client.completed(client.pause("abort"))
        stream = await client.begin(begin(client))
        await client.begin(chunk(client, 0))
        await until(lambda: vllm.orders("/update_weights"))
        await client.begin(stage(client, abort=pb.WeightSessionAbort(reason="enough")))
        end = await stream.end()
        assert end.failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        profile = await client.profile()
        assert profile.state.weights.state == pb.WEIGHTS_STATE_INCONSISTENT
        assert await refused(client.stream(client.resume(profile.pause_epoch)))
        assert vllm.model.pause_state != "open"


@pytest.mark.long
async def test_a_piece_that_does_not_come(tmp_path: Path) -> None:
    async with served(tmp_path) as (vllm, client):
        await client.completed(client.pause("abort"))
        stream = await client.begin(begin(client))
        vllm.next("/update_weights", Answer(500, {"error": {"message": "no"}}))
        await client.begin(chunk(client, 0))
        end = await stream.end()
        assert end.failed.effect == pb.FAILURE_EFFECT_APPLIED_IN_PART
        # The way back: a whole session, though the server may think that one is open.
        stream = await client.begin(begin(client))
        await client.begin(chunk(client, 0))
        await client.begin(stage(client, commit=pb.WeightSessionCommit(chunks=1)))
        assert (await stream.end()).HasField("completed")
        assert (await client.profile()).state.weights.state == pb.WEIGHTS_STATE_VALID
