"""`vllm.Control` without a socket: what is sent, what readings mean, what is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from app.backends.port import EngineRefused
from app.backends.vllm.aims import LoraAim, PauseAim, SleepAim, aim_of
from app.backends.vllm.kept import Ended, HeldPause, Kept, UnderWay
from app.backends.vllm.observing import UPDATING, facts_of, observe, troubles_of
from app.backends.vllm.payloads import init_infos, update_info
from app.backends.vllm.readings import (
    BOTH,
    EngineReading,
    MemberReading,
    capabilities_of,
    refuses_new_requests,
)
from app.backends.vllm.statuses import Broke, Done, Lost, Refused, said
from app.backends.vllm.verdicts import NoEffect, Undecided, verdict
from app.domain.commands import Command, LoadLora, Pause, ReleaseResources, Resume, UpdateWeights
from app.domain.facts import LoraFact
from app.domain.kinds import (
    Admission,
    ContentPolicy,
    DrainRule,
    FailureEffect,
    OperationKind,
    PauseMode,
    ResourceKind,
    TensorDtype,
    Verification,
    WeightsState,
)
from app.domain.operation import OperationError
from app.domain.tensors import TensorSpec
from app.domain.transitions import Cancelled, Completed, Failed
from app.domain.weight_sessions import (
    DiskChunk,
    DiskTransfer,
    IpcTransfer,
    NcclChunk,
    NcclTransfer,
)
from app.rpc.vllm import control_pb2 as pb

NOW = datetime(2026, 3, 1, tzinfo=UTC)
C = grpc.StatusCode


def member(rank: int = 0, **changes: Any) -> MemberReading:
    server = changes.pop("server", {})
    shape = pb.ParallelismInfo(
        tensor_parallel_size=server.pop("tp", 1),
        pipeline_parallel_size=1,
        data_parallel_size=server.pop("dp", 1),
        data_parallel_size_local=1,
    )
    parts: dict[str, Any] = {
        "engine_version": "0.32.0",
        "instance_id": f"i-{rank}",
        "parallelism": shape,
        "max_loras": 2,
        "rl_capabilities": pb.RlCapabilities(
            weight_transfer_enabled=True, weight_transfer_backend="nccl", sleep_mode_enabled=True
        ),
    }
    known: dict[str, Any] = {
        "rank": rank,
        "server": pb.ServerInfo(**(parts | server)),
        "model": pb.ModelInfo(served_model_name="tiny", supports_lora=True),
        "paused": False,
        "sleeping": False,
        "version": "v1",
        "loras": (),
    }
    return MemberReading(**(known | changes))


def reading(*members: MemberReading) -> EngineReading:
    return EngineReading(members or (member(),))


def kept(**changes: Any) -> Kept:
    """As after a first look at `reading()`."""
    return replace(observe(Kept(), reading(), NOW), **changes)


def under_way(command: Command, step: str = "sending", **changes: Any) -> Kept:
    way = UnderWay(
        operation_id="op", kind=command.kind, step=step, request=dict(command.document())
    )
    return kept(under_way=way, **changes)


class TestKeeping:
    @pytest.mark.parametrize(
        "state",
        [
            Kept(),
            Kept(
                number=3,
                revision=4,
                pause_epoch=2,
                release_epoch=1,
                instance_ids=("a", "b"),
                pause=HeldPause(mode=PauseMode.DRAIN, by="op", since=NOW, settled=False),
                released=BOTH,
                sleep_doubt=True,
                weights=WeightsState.MISSING,
                version="v2",
                updates_since_flush=1,
                loras=(LoraFact("a", 1, "/a"),),
                session_open=True,
                under_way=UnderWay(
                    operation_id="op",
                    kind=OperationKind.PAUSE,
                    step="pausing",
                    request={"mode": "drain"},
                ),
                ended=Ended("op-1", Completed(result={"changed": True}, revision=3)),
            ),
            Kept(
                pause=HeldPause(mode=None),
                ended=Ended(
                    "op-2",
                    Failed(
                        error=OperationError(
                            "INTERNAL", "X", "x", ranks=(1,), effect=FailureEffect.NONE
                        )
                    ),
                ),
            ),
            Kept(ended=Ended("op-3", Cancelled(message="m", revision=4))),
        ],
    )
    def test_it_comes_back_from_its_document(self, state: Kept) -> None:
        stored = state.state()
        again = replace(stored, document=json.loads(json.dumps(dict(stored.document))))
        assert Kept.of(again) == replace(state, number=state.number + 1)


class TestReadings:
    def test_a_feature_that_one_member_lacks_is_not_offered(self) -> None:
        other = member(1, loras=None)
        other.server.rl_capabilities.sleep_mode_enabled = False
        other.server.rl_capabilities.weight_transfer_backend = "ipc"
        can = capabilities_of(reading(member(), other))
        assert not can.operations & {
            OperationKind.LOAD_LORA,
            OperationKind.RELEASE_RESOURCES,
            OperationKind.UPDATE_WEIGHTS,
        }
        assert OperationKind.PAUSE in can.operations
        assert can.resources == {}

    def test_ranks_are_counted_over_all_members(self) -> None:
        both = reading(member(0, server={"tp": 2}), member(1, server={"tp": 2}))
        assert both.ranks({0, 1}) == (0, 1, 2, 3)
        assert both.ranks({1}) == (2, 3)
        assert capabilities_of(both).world_size == 4
        assert reading(member(server={"tp": 2, "dp": 4})).ranks({0}) == tuple(range(8))

    @pytest.mark.parametrize(
        ("version", "mode", "refuses"),
        [
            ("0.32.0", PauseMode.DRAIN, False),
            ("0.33.0", PauseMode.DRAIN, True),
            ("1.0", PauseMode.ABORT, True),
            ("0.33.0rc1", PauseMode.KEEP, False),
            ("odd", PauseMode.ABORT, False),
        ],
    )
    def test_what_new_requests_meet(self, version: str, mode: PauseMode, refuses: bool) -> None:
        of = reading(member(server={"engine_version": version}))
        assert refuses_new_requests(of, mode) is refuses


class TestObserving:
    def test_nothing_new_is_nothing(self) -> None:
        assert observe(kept(), reading(), NOW) == kept()

    def test_half_an_order_is_no_fact(self) -> None:
        during = under_way(Pause(mode=PauseMode.ABORT), "pausing")
        assert observe(during, reading(member(paused=True, sleeping=True)), NOW) == during

    def test_an_order_that_nobody_came_back_from(self) -> None:
        drain = under_way(Pause(mode=PauseMode.DRAIN), "pausing", abandoned=True)
        found = observe(drain, reading(member(paused=True, sleeping=True)), NOW)
        assert found.under_way is None
        assert found.pause is not None
        assert (found.pause.mode, found.pause.settled) == (PauseMode.DRAIN, False)
        way = UnderWay(operation_id="op", kind=OperationKind.UPDATE_WEIGHTS, step=UPDATING)
        found = observe(kept(under_way=way, abandoned=True), reading(), NOW)
        assert (found.weights, found.session_open) == (WeightsState.INCONSISTENT, True)
        assert "weights_inconsistent" in troubles_of(found, reading())
        release = ReleaseResources(
            resources=(ResourceKind.WEIGHTS, ResourceKind.KV_CACHE),
            content=ContentPolicy.DISCARD,
            drain=DrainRule.ABORT,
        )
        left = under_way(release, "sleeping", abandoned=True)
        found = observe(left, reading(member(paused=True, sleeping=True)), NOW)
        assert (found.released, found.weights) == (BOTH, WeightsState.MISSING)

    def test_one_of_two_members_is_another_process(self) -> None:
        two = reading(member(0), member(1))
        before = observe(Kept(), two, NOW)
        anew = member(1, server={"instance_id": "i-9"}, version="default")
        after = observe(before, reading(member(0), anew), NOW)
        assert after.weights is WeightsState.INCONSISTENT
        assert (after.revision, after.pause_epoch) == (2, 1)
        assert troubles_of(after, reading(member(0), anew))

    def test_woken_by_somebody_else(self) -> None:
        asleep = kept(released=BOTH, release_epoch=1, weights=WeightsState.MISSING)
        found = observe(asleep, reading(), NOW)
        assert found.released == frozenset()
        # Memory is there again; what was in it is not.
        assert found.weights is WeightsState.MISSING

    def test_what_an_order_keeps_from_being_read_is_as_before_it(self) -> None:
        """An adapter that takes long, and an update: the engine then answers no read."""
        stale = EngineReading((member(paused=None, version=None, loras=None),), stale=True)
        loading = under_way(LoadLora(name="a", path="/a"))
        facts = facts_of(loading, stale, NOW)
        assert (facts.admission, facts.weights.version) == (Admission.OPEN, "v1")
        pausing = under_way(Pause(mode=PauseMode.ABORT), "pausing")
        assert facts_of(pausing, stale, NOW).admission is Admission.UNKNOWN

    def test_members_that_differ_are_neither_open_nor_paused(self) -> None:
        mixed = reading(member(0, paused=True, sleeping=True), member(1))
        state = observe(Kept(), mixed, NOW)
        assert facts_of(state, mixed, NOW).admission is Admission.UNKNOWN
        assert "members_differ" in troubles_of(state, mixed)


def failed(code: grpc.StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), "secret text")


class TestStatuses:
    @pytest.mark.parametrize(
        ("rpc", "code", "reason"),
        [
            ("LoadLora", C.ALREADY_EXISTS, "LORA_ALREADY_LOADED"),
            ("UnloadLora", C.NOT_FOUND, "LORA_NOT_FOUND"),
            ("Sleep", C.FAILED_PRECONDITION, "SLEEP_MODE_OFF"),
            ("PauseGeneration", C.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
            ("PauseGeneration", C.UNAUTHENTICATED, "ENGINE_AUTH_REFUSED"),
            ("Shutdown", C.UNIMPLEMENTED, "UNIMPLEMENTED"),
        ],
    )
    def test_refusals(self, rpc: str, code: grpc.StatusCode, reason: str) -> None:
        answer = said(rpc, failed(code))
        assert isinstance(answer, Refused)
        assert answer.error.reason == reason
        assert "secret" not in answer.error.message

    def test_what_is_no_refusal(self) -> None:
        assert isinstance(said("Sleep", failed(C.INTERNAL)), Broke)
        assert said("Sleep", failed(C.UNAVAILABLE)) == Lost("the connection to the engine was lost")
        # A server says so whose own clock was first.
        assert isinstance(said("Sleep", failed(C.CANCELLED)), Lost)
        late = said("Sleep", failed(C.DEADLINE_EXCEEDED))
        assert isinstance(late, Lost)
        assert late.late


class TestVerdicts:
    pause = Pause(mode=PauseMode.ABORT)

    def of(self, command: Command, before: Kept, now: EngineReading, answers: Any = None) -> Any:
        aim = aim_of(command, replace(before, under_way=None), now)
        assert aim is not None
        return verdict(aim, before, now, NOW, answers)

    def test_a_lost_reply_is_made_good_only_where_looking_tells(self) -> None:
        closed, opened = reading(member(paused=True, sleeping=True)), reading()
        before = under_way(self.pause)
        found = self.of(self.pause, before, closed)
        assert isinstance(found.end, Completed)
        assert found.kept.under_way is None
        with pytest.raises(NoEffect):
            self.of(self.pause, before, opened)
        held = under_way(self.pause, pause=HeldPause(mode=PauseMode.KEEP))
        with pytest.raises(Undecided):
            self.of(self.pause, held, closed)

    def test_a_word_without_the_deed_is_a_failure(self) -> None:
        found = self.of(self.pause, under_way(self.pause), reading(), {0: Done(None)})
        assert isinstance(found.end, Failed)
        assert found.end.error.reason == "NOT_CONFIRMED"

    def test_an_error_after_which_nothing_shows(self) -> None:
        error = OperationError("INTERNAL", "ENGINE_ERROR", "")
        found = self.of(self.pause, under_way(self.pause), reading(), {0: Broke(error)})
        assert found.end.error.effect is FailureEffect.UNKNOWN
        assert found.kept.pause is None

    def test_an_error_after_which_it_shows(self) -> None:
        error = OperationError("INTERNAL", "ENGINE_ERROR", "")
        closed = reading(member(paused=True, sleeping=True))
        found = self.of(self.pause, under_way(self.pause), closed, {0: Broke(error)})
        assert found.end.error.effect is FailureEffect.APPLIED_IN_PART
        assert found.kept.pause_epoch == 1

    def test_a_restart_ends_whatever_it_was(self) -> None:
        anew = reading(member(server={"instance_id": "i-9"}))
        found = self.of(Resume(pause_epoch=1), under_way(Resume(pause_epoch=1)), anew)
        assert found.end.error.reason == "ENGINE_RESTARTED"

    def test_a_sleep_is_never_verified(self) -> None:
        release = ReleaseResources(
            resources=(ResourceKind.WEIGHTS, ResourceKind.KV_CACHE),
            content=ContentPolicy.DISCARD,
            drain=DrainRule.WAIT,
        )
        aim = SleepAim(release, None)
        sent = aim.request()
        assert (sent.level, sent.mode) == (2, pb.PAUSE_MODE_WAIT)
        assert SleepAim(release, PauseMode.KEEP).request().mode == pb.PAUSE_MODE_KEEP
        assert aim.verified is Verification.UNVERIFIED

    def test_requests(self) -> None:
        sent = PauseAim(Pause(mode=PauseMode.DRAIN)).request()
        assert (sent.mode, sent.clear_cache, sent.HasField("clear_cache")) == (2, False, True)
        wanted = LoraAim(LoadLora(name="a", path="/a"), reading()).request()
        assert wanted == pb.LoadLoraRequest(lora_name="a", source_path="/a")


class TestPayloads:
    nccl = NcclTransfer(address="t", port=29500, world_size=5, rank_offset=1)

    def test_each_member_has_its_place_in_the_group(self) -> None:
        alone = reading(member(0, server={"tp": 2}), member(1, server={"tp": 2}))
        infos = [json.loads(one) for one in init_infos(self.nccl, alone)]
        assert [one["rank_offset"] for one in infos] == [1, 3]
        # Started as one of two, it adds its own place itself.
        knowing = reading(member(0, server={"dp": 2}), member(1, server={"dp": 2}))
        infos = [json.loads(one) for one in init_infos(self.nccl, knowing)]
        assert [one["rank_offset"] for one in infos] == [1, 1]

    @pytest.mark.parametrize("odd", [{"source_rank": 4}, {"group": "g"}])
    def test_what_vllm_cannot_be_told(self, odd: dict[str, Any]) -> None:
        with pytest.raises(EngineRefused):
            init_infos(replace(self.nccl, **odd), reading())

    def test_chunks(self) -> None:
        spec = TensorSpec("w", TensorDtype.FLOAT32, ())
        chunk = NcclChunk(tensors=(spec,), packed=True, packed_buffer_bytes=64, packed_buffers=2)
        assert json.loads(update_info(self.nccl, chunk, check_finite=False)) == {
            "names": ["w"],
            "dtype_names": ["float32"],
            "shapes": [[]],
            "packed": True,
            "packed_buffer_size_bytes": 64,
            "packed_num_buffers": 2,
        }
        disk = DiskTransfer("/m")
        one = update_info(disk, DiskChunk(("a.safetensors",)), check_finite=True)
        assert json.loads(one) == {"path": "/m/a.safetensors", "check_finite": True}
        several = update_info(disk, DiskChunk(("a", "b")), check_finite=False)
        assert json.loads(several) == {"path": "/m"}
        with pytest.raises(EngineRefused):
            update_info(IpcTransfer(), chunk, check_finite=False)
        assert UpdateWeights.kind is OperationKind.UPDATE_WEIGHTS
