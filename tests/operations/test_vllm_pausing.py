"""Pauses and resumes of engines that speak `vllm.Control`: what they can't tell is kept here."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from app.domain.commands import FlushCaches, Pause, Resume
from app.domain.engine import HealthState
from app.domain.errors import NotPaused, StalePauseEpoch, UnsupportedOperation
from app.domain.kinds import (
    Admission,
    CacheKind,
    FailureEffect,
    NewRequests,
    OperationKind,
    OperationState,
    PauseMode,
    RevisionSource,
    Verification,
    WeightsState,
)
from app.operations.settling import Settlements, Statement
from app.rpc.vllm import control_pb2 as pb
from tests.doubles.vllm_control import C
from tests.operations.gateway import CALLER, until
from tests.operations.vllm import vllm_gateway

pytestmark = pytest.mark.anyio

S = OperationState
DRAIN = Pause(mode=PauseMode.DRAIN)
ABORT = Pause(mode=PauseMode.ABORT)
KEEP = Pause(mode=PauseMode.KEEP)
SENT_AS = {
    PauseMode.DRAIN: pb.PAUSE_MODE_WAIT,
    PauseMode.ABORT: pb.PAUSE_MODE_ABORT,
    PauseMode.KEEP: pb.PAUSE_MODE_KEEP,
}


async def test_what_is_known_of_an_engine_at_first(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        engine = await gateway.known()
        facts, can = engine.observed.facts, engine.observed.capabilities
        assert facts is not None
        assert can is not None
        assert engine.observed.health is HealthState.SERVING
        assert (facts.revision, facts.revision_source) == (1, RevisionSource.GATEWAY)
        assert (facts.admission, facts.pause_epoch, facts.release_epoch) == (Admission.OPEN, 0, 0)
        assert facts.weights.state is WeightsState.VALID
        assert facts.weights.version == "default"
        ids = [one.control.instance_id for one in gateway.controls]
        assert facts.instance_id == ",".join(ids)
        assert can.world_size == 2
        assert can.models == ("tiny", "tiny-alias")
        assert OperationKind.FLUSH_CACHES not in can.operations
        assert OperationKind.LOAD_LORA in can.operations
        with pytest.raises(UnsupportedOperation):
            await gateway.give(FlushCaches(caches=(CacheKind.PREFIX,)))
        assert (await gateway.facts()).revision == 1
        assert gateway.engine.orders == []


async def test_more_ranks_than_can_be_are_not_believed(tmp_path: Path) -> None:
    """Each of them is named where an order ends."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.replicas = 0xFFFF_FFFF
        failed = await gateway.carry_out(KEEP)
        assert (failed.state, gateway.engine.orders) == (S.FAILED, [])
        gateway.engine.replicas = 1
        assert (await gateway.carry_out(KEEP)).state is S.SUCCEEDED


async def test_a_version_of_others_is_kept_as_what_can_be_kept(tmp_path: Path) -> None:
    """No database takes NUL, no terminal should obey it, and it may be as long as a message."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.weight_version = f"step\0{'x' * 3_000_000}"
        version = (await gateway.facts()).weights.version
        assert version is not None
        assert (version.startswith("step x"), len(version)) == (True, 1_000)
        assert (await gateway.kept()).document["version"] == version


@pytest.mark.long
async def test_an_engine_that_lacks_calls_offers_less(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.missing = {"IsPaused", "IsSleeping", "GetWeightVersion", "ListLoras"}
        can = (await gateway.fleet.discover("e1")).capabilities
        assert can.operations == {OperationKind.ABORT_REQUESTS, OperationKind.SHUTDOWN}
        assert (await gateway.facts()).admission is Admission.UNKNOWN


@pytest.mark.parametrize(
    "mode",
    [
        PauseMode.DRAIN,
        pytest.param(PauseMode.ABORT, marks=pytest.mark.long),
        pytest.param(PauseMode.KEEP, marks=pytest.mark.long),
    ],
)
async def test_a_pause_and_the_resume_that_lifts_it(tmp_path: Path, mode: PauseMode) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        paused = await gateway.carry_out(Pause(mode=mode))
        assert paused.state is S.SUCCEEDED
        assert paused.result == {"changed": True, "pause_epoch": 1}
        assert (paused.revision, paused.verification) == (2, Verification.VERIFIED)
        assert [(r.rank, r.state.value) for r in paused.ranks] == [
            (0, "committed"),
            (1, "committed"),
        ]
        facts = await gateway.facts()
        assert (facts.admission, facts.revision) == (Admission.PAUSED, 2)
        assert facts.pause is not None
        assert (facts.pause.mode, facts.pause.epoch, facts.pause.by) == (mode, 1, paused.id)
        for one in gateway.controls:
            (sent,) = one.control.named("PauseGeneration")
            assert (sent.mode, sent.clear_cache) == (
                SENT_AS[mode],
                False,
            )
        again = await gateway.carry_out(Pause(mode=mode))
        assert (again.result, again.revision) == ({"changed": False, "pause_epoch": 1}, 2)
        assert gateway.engine.orders == ["PauseGeneration"]
        with pytest.raises(StalePauseEpoch):
            await gateway.give(Resume(pause_epoch=9))
        resumed = await gateway.carry_out(Resume(pause_epoch=1))
        assert (resumed.state, resumed.revision) == (S.SUCCEEDED, 3)
        assert (await gateway.facts()).admission is Admission.OPEN
        with pytest.raises(NotPaused):
            await gateway.give(Resume(pause_epoch=1))


@pytest.mark.long
async def test_another_mode_is_another_pause(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(KEEP)
        ended = await gateway.carry_out(ABORT)
        assert ended.result == {"changed": True, "pause_epoch": 2}
        with pytest.raises(StalePauseEpoch):
            await gateway.give(Resume(pause_epoch=1))


async def test_a_drain_of_frozen_requests_is_not_ordered(tmp_path: Path) -> None:
    """vLLM answers at once that it has drained them, and they are frozen as before."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.running = {"r"}
        await gateway.carry_out(KEEP)
        refused = await gateway.carry_out(DRAIN)
        assert refused.state is S.FAILED
        assert refused.error is not None
        assert (refused.error.reason, refused.error.effect) == (
            "REQUESTS_FROZEN",
            FailureEffect.NONE,
        )
        assert gateway.engine.orders == ["PauseGeneration"]
        assert gateway.engine.running == {"r"}


@pytest.mark.long
async def test_a_drain_is_told_while_it_lasts_and_no_resume_gets_behind_it(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.running = {"r"}
        drain = await gateway.give(DRAIN)
        await until(lambda: gateway.engine.paused)
        facts = await gateway.facts()
        assert (facts.admission, facts.revision) == (Admission.DRAINING, 1)
        assert facts.open_operations == (drain.id,)
        with pytest.raises(StalePauseEpoch):
            await gateway.give(Resume(pause_epoch=1))
        assert gateway.engine.named("ResumeGeneration") == []
        gateway.engine.finish()
        assert (await gateway.end_of(drain)).state is S.SUCCEEDED
        assert (await gateway.facts()).admission is Admission.PAUSED


@pytest.mark.long
async def test_a_drain_whose_deadline_is_over_opens_admission_again(tmp_path: Path) -> None:
    """The engine stays closed when its client gives up: that is what has to be undone."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.running = {"r"}
        ended = await gateway.carry_out(DRAIN, deadline_ms=300)
        assert ended.state is S.FAILED
        assert ended.error is not None
        assert (ended.error.reason, ended.error.effect) == (
            "DEADLINE_EXCEEDED",
            FailureEffect.ROLLED_BACK,
        )
        facts = await gateway.facts()
        assert (facts.admission, facts.revision, facts.pause_epoch) == (Admission.OPEN, 1, 0)
        assert gateway.engine.running == {"r"}
        assert gateway.engine.generate() == "tokens"


async def test_what_others_do_to_it_is_noticed(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.paused = True
        facts = await gateway.facts()
        assert (facts.revision, facts.pause_epoch) == (2, 1)
        assert facts.pause is not None
        assert (facts.pause.mode, facts.pause.by) == (None, "external")
        gateway.engine.paused = False
        facts = await gateway.facts()
        assert (facts.revision, facts.admission, facts.pause) == (3, Admission.OPEN, None)
        gateway.engine.weight_version = "theirs"
        facts = await gateway.facts()
        assert (facts.revision, facts.weights.version) == (4, "theirs")


@pytest.mark.long
async def test_a_pause_of_others_may_hide_a_sleep(tmp_path: Path) -> None:
    """To be asleep and to be paused looks the same. Where it can't sleep, there is no doubt."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.paused = True
        epoch = (await gateway.facts()).pause_epoch
        doubted = await gateway.carry_out(Resume(pause_epoch=epoch))
        assert doubted.error is not None
        assert doubted.error.reason == "SLEEP_STATE_UNKNOWN"
        assert gateway.engine.orders == []
    other = tmp_path / "other"
    other.mkdir()
    async with vllm_gateway(other) as gateway:
        gateway.engine.sleep_mode = False
        await gateway.controls[0].restart()
        await gateway.facts()
        gateway.engine.paused = True
        epoch = (await gateway.facts()).pause_epoch
        assert (await gateway.carry_out(Resume(pause_epoch=epoch))).state is S.SUCCEEDED


@pytest.mark.long
async def test_a_restart_is_another_engine_and_its_pause_is_gone(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(ABORT)
        await gateway.controls[0].restart()
        facts = await gateway.facts()
        assert (facts.admission, facts.pause) == (Admission.OPEN, None)
        assert (facts.revision, facts.pause_epoch, facts.release_epoch) == (3, 2, 1)
        assert facts.instance_id == gateway.engine.instance_id


@pytest.mark.long
async def test_what_is_kept_survives_the_gateway(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        paused = await gateway.carry_out(KEEP)
        await gateway.restart()
        facts = await gateway.facts()
        assert facts.pause is not None
        assert (facts.pause.mode, facts.pause.epoch, facts.pause.by) == (
            PauseMode.KEEP,
            1,
            paused.id,
        )
        assert facts.revision == 2
        assert (await gateway.carry_out(Resume(pause_epoch=1))).state is S.SUCCEEDED


# ---- replies that do not come ----


@pytest.mark.long
async def test_a_pause_whose_reply_is_lost_is_read_back(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.loses.add("PauseGeneration")
        ended = await gateway.carry_out(ABORT)
        assert (ended.state, ended.verification) == (S.SUCCEEDED, Verification.VERIFIED)
        assert gateway.engine.orders == ["PauseGeneration"]
        assert (await gateway.facts()).pause_epoch == 1


async def test_a_pause_that_never_arrived_is_sent_again(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.fails["PauseGeneration"] = [(C.UNAVAILABLE, "connection reset")]
        ended = await gateway.carry_out(KEEP)
        assert (ended.state, ended.result) == (S.SUCCEEDED, {"changed": True, "pause_epoch": 1})
        assert gateway.engine.orders == ["PauseGeneration", "PauseGeneration"]


@pytest.mark.long
async def test_a_drain_whose_reply_is_lost_is_not_called_drained(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.loses.add("PauseGeneration")
        ended = await gateway.carry_out(DRAIN)
        assert ended.state is S.FAILED
        assert ended.error is not None
        assert (ended.error.reason, ended.error.effect) == (
            "DRAIN_UNCONFIRMED",
            FailureEffect.APPLIED_IN_PART,
        )
        assert (await gateway.facts()).admission is Admission.PAUSED
        # Not the same pause once more, which would say that nothing is to be done.
        again = await gateway.carry_out(DRAIN)
        assert again.result == {"changed": True, "pause_epoch": 2}
        assert len(gateway.engine.orders) == 2


@pytest.mark.long
async def test_another_mode_whose_reply_is_lost_stays_unknown(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(KEEP)
        gateway.engine.loses.add("PauseGeneration")
        order = await gateway.give(ABORT)
        await gateway.until(order, S.RECONCILING)
        asked = len(gateway.engine.named("IsPaused"))
        await until(lambda: len(gateway.engine.named("IsPaused")) > asked + 3)
        assert await gateway.state_of(order) is S.RECONCILING
        assert gateway.engine.orders == ["PauseGeneration", "PauseGeneration"]


@pytest.mark.long
async def test_the_engine_restarted_under_an_order(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.running = {"r"}
        order = await gateway.give(DRAIN)
        await until(lambda: gateway.engine.paused)
        await gateway.controls[0].restart()
        ended = await gateway.end_of(order)
        assert ended.state is S.FAILED
        assert ended.error is not None
        assert (ended.error.reason, ended.error.effect) == (
            "ENGINE_RESTARTED",
            FailureEffect.UNKNOWN,
        )
        assert (await gateway.facts()).admission is Admission.OPEN


@pytest.mark.long
async def test_the_engine_behind_the_front_end_is_dead(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.dead = True
        ended = await gateway.carry_out(KEEP)
        assert ended.state is S.FAILED
        assert (await gateway.known()).observed.health is HealthState.UNREACHABLE
        assert len(gateway.engine.orders) <= 1


@pytest.mark.long
async def test_an_engine_that_dies_of_the_order(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.known()
        gateway.engine.fails["PauseGeneration"] = [(C.INTERNAL, "EngineCore died")]
        order = await gateway.give(KEEP)
        gateway.engine.dead = True
        ended = await gateway.end_of(order)
        assert ended.state is S.FAILED
        assert ended.error is not None
        assert ended.error.reason in ("ENGINE_DEAD", "ENGINE_UNREACHABLE", "ENGINE_ERROR")


@pytest.mark.long
async def test_the_gateway_restarted_under_a_pause(tmp_path: Path) -> None:
    """What was written down before the call tells the next gateway that it may have been made."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.hangs["PauseGeneration"] = answer = asyncio.Event()
        order = await gateway.give(ABORT)
        await until(lambda: bool(gateway.engine.named("PauseGeneration")))
        await gateway.stop()
        gateway.engine.hangs.clear()
        answer.set()
        await gateway.start()
        ended = await gateway.end_of(order)
        assert ended.state is S.SUCCEEDED
        assert (await gateway.facts()).pause_epoch == 1


@pytest.mark.long
async def test_a_person_ends_what_cannot_be_told_apart(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path) as gateway:
        await gateway.carry_out(KEEP)
        gateway.engine.loses.add("PauseGeneration")
        order = await gateway.give(ABORT)
        await gateway.until(order, S.RECONCILING)
        settlements = Settlements(gateway.ledger, gateway.runner, gateway.clock)
        statement = Statement(end=S.SUCCEEDED, reason="seen in its log")
        await settlements.settle(order.id, statement, CALLER)
        facts = await gateway.facts()
        assert facts.open_operations == ()
        assert (facts.admission, facts.pause_epoch) == (Admission.PAUSED, 2)
        assert (await gateway.carry_out(Resume(pause_epoch=2))).state is S.SUCCEEDED


async def test_whoever_lost_the_engine_makes_no_further_call(tmp_path: Path) -> None:
    """A gateway that stood still finds at its next step that its row is another one."""
    async with vllm_gateway(tmp_path) as gateway:
        gateway.engine.running = {"r"}
        order = await gateway.give(DRAIN, deadline_ms=400)
        await until(lambda: gateway.engine.paused)
        kept = await gateway.kept()
        assert await gateway.ledger.kept_states.put("e1", replace(kept, number=kept.number + 1))
        await gateway.until(order, S.RECONCILING)
        # Its deadline has passed: it would have opened admission again.
        assert "ResumeGeneration" not in gateway.engine.orders
        gateway.engine.finish()
        assert (await gateway.end_of(order)).state is S.FAILED


# ---- several members ----


async def test_a_member_that_fails_is_named(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        gateway.controls[1].control.fails["PauseGeneration"] = [(C.INTERNAL, "no")]
        ended = await gateway.carry_out(KEEP)
        assert ended.state is S.FAILED
        assert ended.error is not None
        assert (ended.error.ranks, ended.error.effect) == ((1,), FailureEffect.APPLIED_IN_PART)
        facts = await gateway.facts()
        assert (facts.admission, facts.pause_epoch) == (Admission.UNKNOWN, 1)
        assert (await gateway.known()).observed.health is HealthState.DEGRADED
        # From there it goes either way.
        assert (await gateway.carry_out(KEEP)).state is S.SUCCEEDED
        assert (await gateway.facts()).admission is Admission.PAUSED


@pytest.mark.long
async def test_a_member_whose_reply_is_lost(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        gateway.controls[1].control.fails["PauseGeneration"] = [(C.UNAVAILABLE, "reset")]
        ended = await gateway.carry_out(KEEP)
        assert ended.error is not None
        assert (ended.error.reason, ended.error.ranks) == ("MEMBERS_DIFFER", (1,))
        assert (await gateway.carry_out(Resume(pause_epoch=1))).state is S.SUCCEEDED
        assert (await gateway.facts()).admission is Admission.OPEN


@pytest.mark.long
async def test_a_member_that_is_not_there_keeps_the_order_from_being_sent(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, 2) as gateway:
        await gateway.controls[1].leave()
        order = await gateway.give(KEEP, deadline_ms=2_000)
        ended = await gateway.end_of(order)
        assert ended.state is S.FAILED
        assert ended.error is not None
        assert ended.error.effect is FailureEffect.NONE
        assert gateway.engine.orders == []


# ---- 0.33 ----


@pytest.mark.long
async def test_what_new_requests_meet_is_told_as_it_is(tmp_path: Path) -> None:
    async with vllm_gateway(tmp_path, version="0.33.0") as gateway:
        paused = await gateway.carry_out(DRAIN)
        assert [warning.reason for warning in paused.warnings] == ["NEW_REQUESTS_REFUSED"]
        facts = await gateway.facts()
        assert facts.pause is not None
        assert facts.pause.new_requests is NewRequests.REFUSE
        assert gateway.engine.generate() == "refused"
        await gateway.carry_out(Resume(pause_epoch=1))
        refuse = Pause(mode=PauseMode.DRAIN, new_requests=NewRequests.REFUSE)
        assert (await gateway.carry_out(refuse)).warnings == ()
        keep = Pause(mode=PauseMode.KEEP, new_requests=NewRequests.REFUSE)
        assert (await gateway.carry_out(keep)).state is S.FAILED
