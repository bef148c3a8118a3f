"""New weights for engines that speak `vllm.Control`: in pieces or from disk, as one order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.clock import uuid7
from app.domain.commands import (
    Pause,
    PauseAround,
    ReleaseResources,
    RestoreResources,
    Resume,
    UnderPause,
    UpdateWeights,
)
from app.domain.errors import (
    NotPaused,
    ResourcesReleased,
    UnsupportedOperation,
    WeightsNotValid,
)
from app.domain.kinds import (
    Admission,
    CachePolicy,
    Component,
    ContentPolicy,
    DrainRule,
    FailureEffect,
    OperationState,
    PauseMode,
    ResourceKind,
    TensorDtype,
    Verification,
    WeightsState,
)
from app.domain.operation import Operation
from app.domain.tensors import TensorSpec
from app.domain.weight_sessions import (
    AbortSession,
    Chunk,
    CommitSession,
    IpcTransfer,
    NcclChunk,
    NcclTransfer,
    SessionStage,
    SessionWeights,
    Stage,
)
from app.domain.weight_sources import DiskWeights, FileDigest
from app.operations.sessions import StageRequest
from tests.doubles.vllm_control import C, EngineDied
from tests.operations.gateway import ALICE, CALLER, until
from tests.operations.vllm import VllmGateway, vllm_gateway

pytestmark = pytest.mark.anyio

S = OperationState
NCCL = NcclTransfer(address="trainer", port=29500, world_size=3, rank_offset=1)
SPEC = TensorSpec("w", TensorDtype.BFLOAT16, (2, 3))


def session(**changes: Any) -> UpdateWeights:
    fields: dict[str, Any] = {
        "source": SessionWeights("step-7", NCCL),
        "weight_version": "v7",
        "cache_policy": CachePolicy.FLUSH,
        "admission": PauseAround(PauseMode.KEEP),
    }
    return UpdateWeights(**(fields | changes))


def chunk(index: int = 0, name: str = "w") -> Chunk:
    spec = TensorSpec(name, TensorDtype.BFLOAT16, (2, 3))
    return Chunk(index, NcclChunk(tensors=(spec,)))


def disk(path: str = "/models/new", **changes: Any) -> UpdateWeights:
    return session(source=DiskWeights(path), **changes)


async def go_on(gateway: VllmGateway, stage: Stage) -> None:
    await gateway.sessions.go_on(
        StageRequest(
            engine_id="e1",
            command=SessionStage("step-7", stage),
            actor=ALICE,
            caller=CALLER,
            key=uuid7(),
            fingerprint="f",
        )
    )


async def begun(gateway: VllmGateway, order: Operation, phase: str = "initialising") -> None:
    async def told() -> bool:
        known = await gateway.ledger.operations.get(order.id)
        assert known is not None
        assert not known.done, known.error
        return known.progress is not None and known.progress.phase == phase

    await until(told)


def reason(operation: Operation) -> str:
    assert operation.error is not None
    return operation.error.reason


async def test_a_session_is_one_order(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        order = await gateway.give(session())
        await go_on(gateway, chunk(0))
        await go_on(gateway, chunk(1, "v"))
        await go_on(gateway, CommitSession(2))
        ended = await gateway.end_of(order)
        assert ended.state is S.SUCCEEDED, ended.error
        assert ended.verification is Verification.VERIFIED
        assert ended.result == {
            "changed": True,
            "weight_version": "v7",
            "previous_weight_version": "default",
            "evidence": [],
            "confirmed": ["target"],
            "unconfirmed": [],
            "flushed": [],
            "updates_since_flush": 0,
            "switched": [],
        }
        for rank, one in enumerate(gateway.controls):
            assert one.control.orders == [
                "InitWeightTransferEngine",
                "PauseGeneration",
                "StartWeightUpdate",
                "UpdateWeights",
                "UpdateWeights",
                "FinishWeightUpdate",
                "ResumeGeneration",
            ]
            (init,) = one.control.named("InitWeightTransferEngine")
            assert json.loads(init.init_info_json) == {
                "master_address": "trainer",
                "master_port": 29500,
                # Started as one of two, a member adds its own place.
                "rank_offset": 1,
                "world_size": 3,
            }, rank
            first = json.loads(one.control.named("UpdateWeights")[0].update_info_json)
            assert first == {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
            assert one.control.named("PauseGeneration")[0].clear_cache
            assert one.control.generate() == "tokens"
        facts = await gateway.facts()
        assert (facts.weights.version, facts.weights.state) == ("v7", WeightsState.VALID)
        assert facts.admission is Admission.OPEN


@pytest.mark.long
async def test_an_update_from_disk_is_one_call(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.transfer = "disk"
        await gateway.controls[0].restart()
        await gateway.known()
        named = disk(check_finite=True, cache_policy=CachePolicy.KEEP)
        ended = await gateway.carry_out(named)
        assert ended.state is S.SUCCEEDED, ended.error
        (sent,) = gateway.engine.named("UpdateWeights")
        assert json.loads(sent.update_info_json) == {"path": "/models/new", "check_finite": True}
        assert (await gateway.facts()).weights.updates_since_flush == 1
        digests = (FileDigest("model.safetensors", "0" * 64),)
        checked = session(source=DiskWeights("/models/new", digests), weight_version="v8")
        assert (await gateway.carry_out(checked)).state is S.SUCCEEDED
        assert json.loads(gateway.engine.named("UpdateWeights")[1].update_info_json) == {
            "path": "/models/new",
            "files": {"model.safetensors": "0" * 64},
        }
        assert reason(await gateway.carry_out(disk("relative"))) == "INVALID_ARGUMENT"


@pytest.mark.long
async def test_ways_that_weights_do_not_travel(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        with pytest.raises(UnsupportedOperation):
            await gateway.give(session(source=SessionWeights("s", IpcTransfer())))
        with pytest.raises(UnsupportedOperation):
            await gateway.give(disk())
        gateway.engine.transfer = "sparse_nccl"
        await gateway.controls[0].restart()
        can = (await gateway.fleet.discover("e1")).capabilities
        assert can.weight_sources == frozenset()


async def test_an_update_needs_its_pause(tmp_path: Path) -> None:
    """Without one vLLM starts it under traffic, and dies of the next step."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.running = {"r"}
        with pytest.raises(NotPaused):
            await gateway.give(session(admission=UnderPause()))
        await gateway.carry_out(Pause(mode=PauseMode.KEEP))
        order = await gateway.give(session(admission=UnderPause(1)))
        await go_on(gateway, chunk())
        await go_on(gateway, CommitSession(1))
        assert (await gateway.end_of(order)).state is S.SUCCEEDED
        assert not gateway.engine.dead
        assert gateway.engine.running == {"r"}
        facts = await gateway.facts()
        assert (facts.admission, facts.pause_epoch) == (Admission.PAUSED, 1)


@pytest.mark.long
async def test_no_update_of_a_sleeping_engine(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(
            ReleaseResources(
                resources=(ResourceKind.WEIGHTS, ResourceKind.KV_CACHE),
                content=ContentPolicy.DISCARD,
                drain=DrainRule.ABORT,
            )
        )
        with pytest.raises(ResourcesReleased):
            await gateway.give(session())
        weights = RestoreResources(resources=(ResourceKind.WEIGHTS,), release_epoch=1)
        assert (await gateway.carry_out(weights)).state is S.SUCCEEDED
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        await go_on(gateway, CommitSession(1))
        assert (await gateway.end_of(order)).state is S.SUCCEEDED
        rest = RestoreResources(resources=(ResourceKind.KV_CACHE,), release_epoch=1)
        assert (await gateway.carry_out(rest)).state is S.SUCCEEDED
        assert (await gateway.carry_out(Resume(pause_epoch=1))).state is S.SUCCEEDED
        assert gateway.engine.generate() == "tokens"


async def test_a_failed_update_keeps_the_engine_closed_until_one_succeeds(tmp_path: Path) -> None:
    """vLLM would resume, and die of the first request."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.transfer = "disk"
        gateway.engine.bad_payloads = {"/models/nope"}
        await gateway.controls[0].restart()
        await gateway.known()
        failed = await gateway.carry_out(disk("/models/nope"))
        assert failed.state is S.FAILED
        assert failed.error is not None
        assert (failed.error.reason, failed.error.effect, failed.error.ranks) == (
            "ENGINE_ERROR",
            FailureEffect.APPLIED_IN_PART,
            (0,),
        )
        facts = await gateway.facts()
        assert facts.weights.state is WeightsState.INCONSISTENT
        assert facts.weights.version == "default"
        assert (facts.admission, facts.pause is not None) == (Admission.PAUSED, True)
        with pytest.raises(WeightsNotValid):
            await gateway.give(Resume(pause_epoch=facts.pause_epoch))
        good = await gateway.carry_out(disk())
        assert good.state is S.SUCCEEDED, good.error
        facts = await gateway.facts()
        assert (facts.weights.state, facts.admission) == (WeightsState.VALID, Admission.PAUSED)
        assert (await gateway.carry_out(Resume(pause_epoch=facts.pause_epoch))).state is S.SUCCEEDED
        assert gateway.engine.generate() == "tokens"
    gateway.engine.weights = "half"
    with pytest.raises(EngineDied):
        gateway.engine.generate()


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.long
async def test_a_session_that_is_called_off(tmp_path: Path, started: bool) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        order = await gateway.give(session())
        if started:
            await go_on(gateway, chunk())
            await begun(gateway, order, "staged")
        await go_on(gateway, AbortSession("diverged"))
        ended = await gateway.end_of(order)
        assert "SESSION_ABORTED" in {warning.reason for warning in ended.warnings}
        facts = await gateway.facts()
        if not started:
            assert ended.state is S.CANCELLED
            assert (facts.weights.state, facts.admission) == (WeightsState.VALID, Admission.OPEN)
            assert "StartWeightUpdate" not in gateway.engine.orders
            return
        assert (ended.state, reason(ended)) == (S.FAILED, "SESSION_ABORTED")
        assert facts.weights.state is WeightsState.INCONSISTENT
        assert facts.admission is Admission.PAUSED
        # What it left open at the engine does not stand in the way of the next one.
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        await go_on(gateway, CommitSession(1))
        assert (await gateway.end_of(order)).state is S.SUCCEEDED


@pytest.mark.long
async def test_a_session_that_nobody_goes_on_with(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        ended = await gateway.carry_out(
            session(source=SessionWeights("step-7", NCCL, lease_ms=200))
        )
        assert reason(ended) == "SESSION_LEASE_EXPIRED"
        assert ended.error is not None
        assert ended.error.effect is FailureEffect.ROLLED_BACK
        assert (await gateway.facts()).admission is Admission.OPEN


@pytest.mark.long
async def test_a_commit_that_counts_otherwise(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        await go_on(gateway, CommitSession(2))
        assert reason(await gateway.end_of(order)) == "CHUNK_COUNT_MISMATCH"
        assert (await gateway.facts()).weights.state is WeightsState.INCONSISTENT


@pytest.mark.long
async def test_a_session_is_cancelled(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        order = await gateway.give(session())
        await begun(gateway, order)
        await gateway.orders.cancel(order.id, CALLER)
        assert (await gateway.end_of(order)).state is S.CANCELLED
        assert (await gateway.facts()).admission is Admission.OPEN


@pytest.mark.long
async def test_transport_that_does_not_come_up_touches_nothing(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        gateway.controls[1].control.fails["InitWeightTransferEngine"] = [(C.INTERNAL, "nccl")]
        ended = await gateway.carry_out(session())
        assert ended.error is not None
        assert (ended.error.ranks, ended.error.effect) == ((1,), FailureEffect.NONE)
        assert gateway.engine.orders == ["InitWeightTransferEngine"]
        source = SessionWeights(
            "s", NcclTransfer(address="t", port=1, world_size=3, rank_offset=0, source_rank=2)
        )
        assert reason(await gateway.carry_out(session(source=source))) == "TRANSFER_NOT_OFFERED"


@pytest.mark.long
async def test_the_draft_is_updated_where_there_is_one(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        with pytest.raises(UnsupportedOperation):
            await gateway.give(session(components=(Component.DRAFT,)))
        gateway.engine.draft = True
        await gateway.controls[0].restart()
        await gateway.known()
        order = await gateway.give(session(components=(Component.DRAFT,)))
        await go_on(gateway, chunk())
        await go_on(gateway, CommitSession(1))
        assert (await gateway.end_of(order)).state is S.SUCCEEDED
        assert "StartDraftWeightUpdate" in gateway.engine.orders
        both = session(components=(Component.TARGET, Component.DRAFT))
        assert reason(await gateway.carry_out(both)) == "UNSUPPORTED_OPERATION"


@pytest.mark.long
async def test_a_start_that_is_refused_touches_nothing(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.fails["StartWeightUpdate"] = [(C.FAILED_PRECONDITION, "not configured")]
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        ended = await gateway.end_of(order)
        assert reason(ended) == "WEIGHT_TRANSFER_OFF"
        facts = await gateway.facts()
        assert (facts.weights.state, facts.admission) == (WeightsState.VALID, Admission.OPEN)


async def test_one_member_fails_and_no_member_serves(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        await begun(gateway, order, "staged")
        gateway.controls[1].control.fails["FinishWeightUpdate"] = [(C.INTERNAL, "no")]
        await go_on(gateway, CommitSession(1))
        ended = await gateway.end_of(order)
        assert ended.state is S.FAILED
        assert ended.error is not None
        assert (ended.error.ranks, ended.error.effect) == ((1,), FailureEffect.APPLIED_IN_PART)
        assert ended.error.message.startswith("the update is not finished on every member: ")
        facts = await gateway.facts()
        assert (facts.weights.state, facts.weights.version) == (WeightsState.INCONSISTENT, None)
        assert facts.admission is Admission.PAUSED
        assert all(one.control.paused for one in gateway.controls)


async def test_a_finish_that_fails_says_so_of_the_one_engine(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        await begun(gateway, order, "staged")
        gateway.engine.fails["FinishWeightUpdate"] = [(C.INTERNAL, "no")]
        await go_on(gateway, CommitSession(1))
        ended = await gateway.end_of(order)
        assert ended.error is not None
        assert ended.error.message == (
            "the engine did not finish the update: the engine could not carry it out"
        )


@pytest.mark.long
async def test_a_finish_whose_reply_is_lost_shows_in_the_version(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        order = await gateway.give(session())
        await go_on(gateway, chunk())
        await begun(gateway, order, "staged")
        gateway.engine.loses.add("FinishWeightUpdate")
        await go_on(gateway, CommitSession(1, "v7b"))
        ended = await gateway.end_of(order)
        assert ended.state is S.SUCCEEDED, ended.error
        assert (await gateway.facts()).weights.version == "v7b"
        assert gateway.engine.orders.count("FinishWeightUpdate") == 1
