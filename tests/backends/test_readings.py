"""What an engine tells becomes facts, and what it does not tell is not made up."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from app.backends.port import EngineBackend, EngineSilent, OutcomeLost, Silence
from app.domain.kinds import (
    Admission,
    NewRequests,
    OperationKind,
    PauseMode,
    RevisionSource,
    WeightsState,
)
from app.rpc.openengine.v1 import admin_pb2
from tests.backends.scripted_engine import (
    ScriptedEngine,
    profile,
)
from tests.backends.ways import backends, order, registration, told

pytestmark = pytest.mark.anyio
_C = grpc.StatusCode


class TestReading:
    async def test_a_profile_becomes_facts_and_capabilities(self, backend: EngineBackend) -> None:
        found = await backend.discover(2.0)
        facts, can = found.facts, found.capabilities
        assert (facts.instance_id, facts.revision, facts.pause_epoch) == ("i-1", 7, 2)
        assert facts.admission is Admission.OPEN
        assert facts.revision_source is RevisionSource.ENGINE
        assert (facts.weights.version, facts.weights.state) == ("v1", WeightsState.VALID)
        assert facts.pause is None
        assert can.cancellable == {OperationKind.PAUSE}
        assert can.pause_modes == set(PauseMode)
        assert can.new_requests == set(NewRequests)
        assert can.models == ("tiny",)
        assert found.info["engine_name"] == "scripted"
        assert found.info["parallelism"] == {"tensor_parallel_size": 2}
        assert found.models[0]["max_context_length"] == 128
        assert found.troubles == ()

    async def test_a_pause_names_the_key_it_was_ordered_under(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.profile.state.pause.CopyFrom(
            admin_pb2.PauseStatus(
                mode=admin_pb2.PAUSE_MODE_KEEP,
                epoch=3,
                idempotency_key="k-1",
                since_unix_nanos=1_700_000_000_000_000_000,
                new_requests=admin_pb2.NEW_REQUESTS_REFUSE,
                requests_kept=4,
            )
        )
        engine.profile.state.admission = admin_pb2.ADMISSION_STATE_PAUSED
        pause = (await backend.discover(2.0)).facts.pause
        assert pause is not None
        assert (pause.mode, pause.epoch, pause.by) == (PauseMode.KEEP, 3, "k-1")
        assert (pause.new_requests, pause.requests_kept) == (NewRequests.REFUSE, 4)
        assert pause.since is not None

    async def test_what_an_engine_adds_freely_stays_with_it(self, backend: EngineBackend) -> None:
        found = await backend.discover(2.0)
        load = await backend.load(2.0)
        assert "canary" not in repr(found) + repr(load)
        assert (load["running_requests"], load["queued_requests"]) == (3, 0)
        assert "used_kv_blocks" not in load
        assert load["memory"] == [
            {"rank": 1, "weights_bytes": 4096, "in_use_bytes": 0},
            {"rank": 2},
        ]

    async def test_what_is_constant_is_read_once_in_an_engine_life(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        for _ in range(3):
            await backend.discover(2.0)
        assert engine.calls.count(("GetServerInfo", "")) == 1
        engine.instance_id = "i-2"
        await backend.discover(2.0)
        assert engine.calls.count(("GetServerInfo", "")) == 2

    async def test_facts_are_had_without_the_control_service(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.control_down = True
        found = await backend.discover(2.0)
        assert found.facts.revision == 7
        assert (found.info, found.troubles) == ({}, ("control_unreachable",))

    async def test_trouble_is_told_apart_from_rest(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.profile.state.ranks.add(rank=1, state=admin_pb2.RANK_STATE_FAILED)
        engine.profile.state.weights.state = admin_pb2.WEIGHTS_STATE_INCONSISTENT
        engine.profile.state.admission = admin_pb2.ADMISSION_STATE_PAUSED
        found = await backend.discover(2.0)
        assert found.troubles == ("ranks_failed", "ranks_unwell", "weights_inconsistent")
        engine.profile.state.ranks[0].state = admin_pb2.RANK_STATE_UNKNOWN
        found = await backend.discover(2.0)
        assert (found.failed, found.troubles) == (False, ("ranks_unwell", "weights_inconsistent"))

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            (_C.UNAUTHENTICATED, Silence.AUTH_REFUSED),
            (_C.PERMISSION_DENIED, Silence.AUTH_REFUSED),
            (_C.UNIMPLEMENTED, Silence.REFUSED),
            (_C.INTERNAL, Silence.MALFORMED),
            (_C.UNAVAILABLE, Silence.UNREACHABLE),
        ],
    )
    async def test_why_there_is_no_answer(
        self, engine: ScriptedEngine, backend: EngineBackend, code: _C, reason: Silence
    ) -> None:
        engine.read_refusal = code
        with pytest.raises(EngineSilent) as silent:
            await backend.discover(2.0)
        assert silent.value.reason is reason

    async def test_an_engine_that_does_not_answer_is_not_waited_for(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answering.clear()
        with pytest.raises(EngineSilent) as silent:
            await backend.discover(0.2)
        assert silent.value.reason is Silence.DEADLINE

    async def test_an_engine_that_is_not_there_is_unreachable(self) -> None:
        gone = ScriptedEngine()
        address = await gone.start()
        await gone.stop()
        known = backends()
        with pytest.raises(EngineSilent) as silent:
            await known.of(registration(address)).discover(0.3)
        assert silent.value.reason is Silence.UNREACHABLE
        await known.close()

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda told: told.ClearField("instance_id"),
            lambda told: told.ClearField("state"),
            lambda told: told.state.pause.SetInParent(),
            lambda told: setattr(told, "revision", 2**63),
        ],
    )
    async def test_a_profile_that_makes_no_sense_is_no_answer(
        self,
        engine: ScriptedEngine,
        backend: EngineBackend,
        spoil: Callable[[admin_pb2.AdminProfile], None],
    ) -> None:
        spoil(engine.profile)
        with pytest.raises(EngineSilent) as silent:
            await backend.discover(2.0)
        assert silent.value.reason is Silence.MALFORMED

    async def test_words_of_a_newer_engine_are_left_out(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        newer = profile()
        # Pause modes (4) and new_requests (5) with a number of a later schema, as on the wire.
        newer.MergeFromString(b"\x20\x63\x28\x63")
        engine.profile = newer
        can = (await backend.discover(2.0)).capabilities
        assert 0x63 in newer.pause_modes
        assert can.pause_modes == set(PauseMode)
        assert can.new_requests == set(NewRequests)


class TestRestart:
    async def test_an_engine_on_the_same_port_is_found_again(self) -> None:
        first = ScriptedEngine()
        address = await first.start()
        known = backends()
        backend = known.of(registration(address))
        assert (await backend.discover(2.0)).facts.instance_id == "i-1"
        await first.stop()
        with pytest.raises(EngineSilent):
            await backend.discover(0.2)
        second = ScriptedEngine(instance_id="i-2")
        await second.start(first.port)
        try:
            # One call, within the five seconds that the product promises.
            assert (await backend.discover(5.0)).facts.instance_id == "i-2"
        finally:
            await known.close()
            await second.stop()

    async def test_an_order_is_never_repeated_by_the_transport(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.script.deaf = 3
        wanted = order()
        with pytest.raises(OutcomeLost):
            await told(backend, wanted)
        assert engine.sent(wanted.operation_id) == 1
