"""The backend against a real gRPC server: what is heard, and what is never claimed."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from contextlib import aclosing

import grpc
import pytest

from app.backends.port import EngineBackend, EngineRefused, EngineSilent, OutcomeLost, Silence
from app.domain.commands import (
    AbortRequests,
    Command,
    FlushCaches,
    Pause,
    PauseAround,
    ReconfigureServing,
    ReleaseResources,
    RestoreResources,
    Resume,
    UnderPause,
    UpdateWeights,
)
from app.domain.kinds import (
    Admission,
    CacheKind,
    CachePolicy,
    CollectiveBackend,
    Component,
    ContentPolicy,
    DrainRule,
    EngineRole,
    FailureEffect,
    NewRequests,
    OperationKind,
    PauseMode,
    ResourceKind,
    RevisionSource,
    TensorDtype,
    Verification,
    WeightsState,
)
from app.domain.operation import OperationError
from app.domain.transitions import (
    Cancelled,
    Completed,
    EngineAccepted,
    Fact,
    Failed,
    Progressed,
)
from app.domain.weight_sources import (
    DiskWeights,
    DistributedWeights,
    FileDigest,
    SharedMemoryTensor,
    SharedMemoryWeights,
    TensorSpec,
)
from app.rpc.openengine.v1 import admin_pb2, lifecycle_pb2
from tests.backends.scripted_engine import (
    Event,
    ScriptedEngine,
    accepted,
    cancelled,
    failed,
    paused,
    profile,
    progress,
    status_with_info,
)
from tests.backends.ways import backends, order, registration, told, until

pytestmark = pytest.mark.anyio

_C = grpc.StatusCode
SPEC = TensorSpec("w", TensorDtype.FLOAT32, (2, 3))
WIRE_SPEC = admin_pb2.TensorSpec(name="w", dtype=admin_pb2.TENSOR_DTYPE_FLOAT32, shape=[2, 3])


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
        assert (await backend.discover(2.0)).troubles == ("ranks_unwell", "weights_inconsistent")

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


class TestOrders:
    async def test_every_event_becomes_one_fact_with_its_number(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answers = lambda _: (accepted(), progress(done=1, total=2), paused())
        facts = await told(backend, order())
        assert [type(fact) for fact in facts] == [EngineAccepted, Progressed, Completed]
        assert [fact.engine_sequence for fact in facts] == [1, 2, 3]
        end = facts[-1]
        assert isinstance(end, Completed)
        assert end.result == {
            "changed": True,
            "pause_epoch": 3,
            "requests_finished": 2,
            "requests_aborted": 0,
            "requests_kept": 0,
        }
        assert (end.revision, end.verification) == (8, Verification.VERIFIED)

    @pytest.mark.parametrize(
        ("last", "kind"), [(paused(), Completed), (failed(), Failed), (cancelled(), Cancelled)]
    )
    async def test_it_ends_with_the_terminal_event(
        self, engine: ScriptedEngine, backend: EngineBackend, last: Event, kind: type[Fact]
    ) -> None:
        engine.answers = lambda _: (accepted(), last)
        assert isinstance((await told(backend, order()))[-1], kind)

    async def test_a_failure_is_told_whole(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answers = lambda _: (accepted(), failed())
        end = (await told(backend, order()))[-1]
        assert isinstance(end, Failed)
        assert end.error == OperationError(
            "INTERNAL",
            "RANK_LOST",
            "rank 1 is gone",
            ranks=(1,),
            effect=FailureEffect.ROLLED_BACK,
        )

    @pytest.mark.parametrize(
        ("command", "fields"),
        [
            (
                Pause(mode=PauseMode.KEEP, hold_limit_ms=1234, model="tiny"),
                {"mode": 3, "new_requests": 1, "hold_limit_ms": 1234, "model": "tiny"},
            ),
            (
                Pause(mode=PauseMode.ABORT, new_requests=NewRequests.REFUSE),
                {"mode": 2, "new_requests": 2, "whole_engine": admin_pb2.WholeEngine()},
            ),
            (Resume(pause_epoch=9), {"pause_epoch": 9}),
            (FlushCaches(caches=(CacheKind.PREFIX, CacheKind.ENCODER)), {"caches": [1, 2]}),
            (
                ReleaseResources(
                    resources=(ResourceKind.KV_CACHE, ResourceKind.WEIGHTS),
                    content=ContentPolicy.DISCARD,
                    drain=DrainRule.REFUSE,
                ),
                {"resources": [2, 1], "content": 2, "drain": 3},
            ),
            (
                RestoreResources(resources=(ResourceKind.EXECUTION_GRAPHS,), release_epoch=4),
                {"resources": [3], "release_epoch": 4},
            ),
            (
                ReconfigureServing(
                    role=EngineRole.DECODE,
                    tensor_parallel_size=2,
                    data_parallel_size=3,
                    max_running_requests=4,
                    max_batched_tokens=5,
                    drain=DrainRule.WAIT,
                ),
                {
                    "role": 3,
                    "tensor_parallel_size": 2,
                    "data_parallel_size": 3,
                    "max_running_requests": 4,
                    "max_batched_tokens": 5,
                    "drain": 1,
                },
            ),
            (
                UpdateWeights(
                    source=DiskWeights("/models/v2", (FileDigest("a.safetensors", "0f" * 32),)),
                    weight_version="v2",
                    cache_policy=CachePolicy.KEEP,
                    admission=PauseAround(PauseMode.KEEP, NewRequests.HOLD, 1234),
                    components=(Component.TARGET, Component.DRAFT),
                    check_finite=True,
                ),
                {
                    "disk": admin_pb2.DiskWeights(
                        path="/models/v2",
                        digests=[
                            admin_pb2.FileDigest(name="a.safetensors", sha256=b"\x0f" * 32),
                        ],
                    ),
                    "weight_version": "v2",
                    "cache_policy": 2,
                    "components": [1, 2],
                    "pause": admin_pb2.PauseAround(
                        mode=admin_pb2.PAUSE_MODE_KEEP,
                        new_requests=admin_pb2.NEW_REQUESTS_HOLD,
                        hold_limit_ms=1234,
                    ),
                    "check_finite": True,
                },
            ),
            (
                UpdateWeights(
                    source=SharedMemoryWeights(
                        "w", 32, (SharedMemoryTensor(SPEC, 8),), sha256="0f" * 32
                    ),
                    weight_version="v2",
                    cache_policy=CachePolicy.FLUSH,
                    admission=UnderPause(),
                ),
                {
                    "tensors": admin_pb2.TensorWeights(
                        shared_memory=admin_pb2.SharedMemoryWeights(
                            object_name="w",
                            size_bytes=32,
                            tensors=[
                                admin_pb2.SharedMemoryTensor(
                                    spec=WIRE_SPEC, offset_bytes=8, length_bytes=24
                                )
                            ],
                            sha256=b"\x0f" * 32,
                        )
                    ),
                    "cache_policy": 1,
                    "components": [1],
                    "under_pause": admin_pb2.UnderPause(),
                    "check_finite": False,
                },
            ),
            (
                UpdateWeights(
                    source=DistributedWeights(
                        backend=CollectiveBackend.NCCL,
                        address="10.0.0.1",
                        port=29500,
                        world_size=3,
                        rank_offset=1,
                        group="trainer",
                        source_rank=0,
                        tensors=(SPEC,),
                    ),
                    weight_version="v2",
                    cache_policy=CachePolicy.FLUSH,
                    admission=UnderPause(7),
                ),
                {
                    "distributed": admin_pb2.DistributedWeights(
                        backend=admin_pb2.COLLECTIVE_BACKEND_NCCL,
                        address="10.0.0.1",
                        port=29500,
                        world_size=3,
                        rank_offset=1,
                        group="trainer",
                        tensors=[WIRE_SPEC],
                    ),
                    "under_pause": admin_pb2.UnderPause(pause_epoch=7),
                },
            ),
        ],
    )
    async def test_every_field_reaches_the_engine(
        self,
        engine: ScriptedEngine,
        backend: EngineBackend,
        command: Command,
        fields: dict[str, object],
    ) -> None:
        engine.answers = lambda _: (accepted(), failed())
        wanted = dataclasses.replace(order(command), expected_revision=5, deadline_ms=777)
        await told(backend, wanted)
        request = engine.orders[wanted.operation_id].request
        assert request.idempotency_key == wanted.operation_id
        assert (request.expected_revision, request.deadline_ms) == (5, 777)
        for name, value in fields.items():
            assert getattr(request, name) == value, name
        assert request.WhichOneof("target") == ("model" if command.model else "whole_engine")

    async def test_what_an_order_leaves_out_is_left_out(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answers = lambda _: (accepted(), paused())
        wanted = order()
        await told(backend, wanted)
        request = engine.orders[wanted.operation_id].request
        assert not request.HasField("expected_revision")
        assert not request.HasField("hold_limit_ms")
        reshape = order(ReconfigureServing(max_running_requests=4, drain=DrainRule.WAIT))
        engine.answers = lambda _: (accepted(), failed())
        await told(backend, reshape)
        request = engine.orders[reshape.operation_id].request
        assert {field.name for field, _ in request.ListFields()} == {
            *("idempotency_key", "deadline_ms", "whole_engine", "max_running_requests", "drain"),
        }

    async def test_the_same_id_attaches_and_replays(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        wanted = order()
        async with aclosing(backend.carry_out(wanted)) as facts:
            assert isinstance(await anext(facts), EngineAccepted)
        engine.orders[wanted.operation_id].tell(progress(), paused())
        again = await told(backend, wanted)
        assert [fact.engine_sequence for fact in again] == [1, 2, 3]
        assert len(engine.orders) == 1

    async def test_the_trace_goes_along(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answers = lambda _: (accepted(), paused())
        trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
        await told(backend, dataclasses.replace(order(), trace_id=trace_id))
        assert engine.metadata[-1]["traceparent"].split("-")[1] == trace_id


class TestRefusals:
    @pytest.mark.parametrize(
        ("code", "sent", "reason"),
        [
            (_C.INVALID_ARGUMENT, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
            (_C.ABORTED, "REVISION_MISMATCH", "REVISION_MISMATCH"),
            (_C.ABORTED, "not a reason!", "ABORTED"),
            (_C.FAILED_PRECONDITION, "STALE_PAUSE_EPOCH", "STALE_PAUSE_EPOCH"),
            (_C.UNIMPLEMENTED, "UNSUPPORTED_OPERATION", "UNSUPPORTED_OPERATION"),
            (_C.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED", "IDEMPOTENCY_KEY_REUSED"),
            (_C.NOT_FOUND, "MODEL_NOT_FOUND", "MODEL_NOT_FOUND"),
            (_C.RESOURCE_EXHAUSTED, "STORE_FULL", "STORE_FULL"),
            (_C.UNAUTHENTICATED, "TOKEN_EXPIRED", "ENGINE_AUTH_REFUSED"),
            (_C.PERMISSION_DENIED, "WRONG_AUDIENCE", "ENGINE_AUTH_REFUSED"),
        ],
    )
    async def test_a_refusal_is_one_and_says_no_text_of_the_engines(
        self, engine: ScriptedEngine, backend: EngineBackend, code: _C, sent: str, reason: str
    ) -> None:
        engine.script.refusals.append(status_with_info(code, sent, "secret 10.1.2.3"))
        with pytest.raises(EngineRefused) as refused:
            await told(backend, order())
        error = refused.value.error
        assert (error.code, error.reason, error.effect) == (code.name, reason, FailureEffect.NONE)
        assert "secret" not in error.message

    @pytest.mark.parametrize(
        "code", [_C.UNAVAILABLE, _C.DEADLINE_EXCEEDED, _C.CANCELLED, _C.UNKNOWN, _C.INTERNAL]
    )
    async def test_what_proves_nothing_is_a_lost_outcome(
        self, engine: ScriptedEngine, backend: EngineBackend, code: _C
    ) -> None:
        engine.script.refusals.append(status_with_info(code, "WHATEVER", "secret"))
        with pytest.raises(OutcomeLost) as lost:
            await told(backend, order())
        assert "secret" not in lost.value.why

    async def test_a_refusal_after_the_first_event_is_none(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        """The status may claim what it likes: the order was taken on."""
        engine.script.cuts.append(1)
        engine.script.cut_status = status_with_info(_C.ABORTED, "ENGINE_BUSY")
        engine.answers = lambda _: (accepted(), progress())
        with pytest.raises(OutcomeLost):
            await told(backend, order())

    async def test_the_engines_text_is_only_logged(
        self, engine: ScriptedEngine, backend: EngineBackend, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.script.refusals.append(status_with_info(_C.ABORTED, "ENGINE_BUSY", "text for us"))
        with caplog.at_level(logging.INFO), pytest.raises(EngineRefused) as refused:
            await told(backend, order())
        assert "text for us" in caplog.text
        assert refused.value.error.retryable


class TestLosses:
    async def test_a_cut_stream_is_a_lost_outcome(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answers = lambda _: (accepted(), progress(), paused())
        engine.script.cuts.append(2)
        wanted = order()
        facts = backend.carry_out(wanted)
        assert [(await anext(facts)).engine_sequence for _ in range(2)] == [1, 2]
        with pytest.raises(OutcomeLost):
            await anext(facts)
        assert len(await told(backend, wanted)) == 3

    async def test_a_stream_that_just_ends_is_a_lost_outcome(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answers = lambda _: (accepted(), progress(), paused())
        engine.script.ends.append(1)
        with pytest.raises(OutcomeLost):
            await told(backend, order())

    async def test_an_engine_that_dies_is_a_lost_outcome(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        facts = backend.carry_out(order())
        await anext(facts)
        await engine.stop()
        with pytest.raises(OutcomeLost):
            await anext(facts)

    async def test_an_engine_that_never_answers_is_a_lost_outcome(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answers = lambda _: ()
        engine.answering.clear()
        with pytest.raises(OutcomeLost):
            await told(backend, order(deadline_s=0.1))

    async def test_a_quiet_drain_is_waited_for(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        wanted = order()
        facts = backend.carry_out(wanted)
        await anext(facts)
        waiting = asyncio.ensure_future(anext(facts))
        asked = ("GetOperation", wanted.operation_id)
        await until(lambda: engine.calls.count(asked) >= 3)
        assert not waiting.done()
        engine.orders[wanted.operation_id].tell(paused())
        assert isinstance(await waiting, Completed)
        await facts.aclose()

    async def test_an_engine_that_forgot_the_order_is_not_waited_for(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        wanted = order()
        facts = backend.carry_out(wanted)
        await anext(facts)
        del engine.orders[wanted.operation_id]
        with pytest.raises(OutcomeLost):
            await anext(facts)

    @pytest.mark.parametrize(
        "events",
        [
            [Event(operation_id="e-1", sequence=1)],
            [Event(sequence=1, accepted=admin_pb2.OperationAccepted())],
            [Event(operation_id="e-1", accepted=admin_pb2.OperationAccepted())],
            [Event(operation_id="e-1", sequence=2, accepted=admin_pb2.OperationAccepted())],
            [
                Event(operation_id="e-1", sequence=1, accepted=admin_pb2.OperationAccepted()),
                Event(operation_id="e-1", sequence=3, progress=admin_pb2.OperationProgress()),
            ],
            [
                Event(operation_id="e-1", sequence=1, accepted=admin_pb2.OperationAccepted()),
                Event(operation_id="e-2", sequence=2, progress=admin_pb2.OperationProgress()),
            ],
            [
                Event(
                    operation_id="e-1",
                    sequence=1,
                    progress=admin_pb2.OperationProgress(done=2**63),
                )
            ],
        ],
    )
    async def test_nonsense_is_a_lost_outcome(
        self, engine: ScriptedEngine, backend: EngineBackend, events: list[Event]
    ) -> None:
        engine.script.raw.append(events)
        with pytest.raises(OutcomeLost):
            await told(backend, order())

    async def test_an_end_without_a_readable_result_claims_nothing(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        odd = Event(
            completed=admin_pb2.OperationCompleted(
                changed=True,
                verification=admin_pb2.VERIFICATION_VERIFIED,
                resume=admin_pb2.ResumeResult(pause_epoch=1),
            )
        )
        engine.answers = lambda _: (accepted(), odd)
        end = (await told(backend, order()))[-1]
        assert isinstance(end, Completed)
        assert (end.result, end.verification) == ({"changed": True}, Verification.UNVERIFIED)

    async def test_text_of_an_engine_is_made_safe_to_keep(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answers = lambda _: (accepted(), progress("a\x00b\x1b[31m" + "x" * 5000), paused())
        fact = (await told(backend, order()))[1]
        assert isinstance(fact, Progressed)
        assert "\x00" not in fact.progress.phase
        assert "\x1b" not in fact.progress.phase
        assert len(fact.progress.phase) <= 64


class TestFinding:
    async def test_an_order_that_runs_is_found(self, backend: EngineBackend) -> None:
        wanted = order()
        async with aclosing(backend.carry_out(wanted)) as facts:
            await anext(facts)
        found = await backend.find(wanted.operation_id, 2.0)
        assert found is not None
        assert (found.engine_operation_id, found.instance_id) == ("e-1", "i-1")
        assert (found.ended, found.end) == (False, None)

    async def test_how_it_ended_is_found(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.answers = lambda _: (accepted(), paused(5))
        wanted = order()
        await told(backend, wanted)
        found = await backend.find(wanted.operation_id, 2.0)
        assert found is not None
        assert found.ended
        assert isinstance(found.end, Completed)
        assert (found.end.result["pause_epoch"], found.end.engine_sequence) == (5, None)

    async def test_what_the_engine_does_not_know_is_not_found(self, backend: EngineBackend) -> None:
        assert await backend.find("nobody", 2.0) is None

    async def test_a_not_found_that_nobody_signed_is_no_answer(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        """Something on the way may say so too, and an order would be sent again for it."""
        engine.read_refusal = _C.NOT_FOUND
        with pytest.raises(EngineSilent):
            await backend.find("nobody", 2.0)

    async def test_an_answer_about_another_order_is_no_answer(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        wanted = order()
        async with aclosing(backend.carry_out(wanted)) as facts:
            await anext(facts)
        engine.orders["k-2"] = engine.orders[wanted.operation_id]
        with pytest.raises(EngineSilent) as silent:
            await backend.find("k-2", 2.0)
        assert silent.value.reason is Silence.MALFORMED


class TestCancelling:
    async def test_the_end_comes_through_the_stream(self, backend: EngineBackend) -> None:
        facts = backend.carry_out(order())
        first = await anext(facts)
        assert isinstance(first, EngineAccepted)
        await backend.cancel(first.engine_operation_id, 2.0)
        assert isinstance(await anext(facts), Cancelled)
        await facts.aclose()

    async def test_a_refusal_says_why(self, engine: ScriptedEngine, backend: EngineBackend) -> None:
        engine.script.refusals.append(status_with_info(_C.FAILED_PRECONDITION, "NOT_CANCELLABLE"))
        with pytest.raises(EngineRefused) as refused:
            await backend.cancel("e-1", 2.0)
        assert refused.value.error.reason == "NOT_CANCELLABLE"

    async def test_no_answer_is_no_refusal(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        await engine.stop()
        with pytest.raises(EngineSilent):
            await backend.cancel("e-1", 2.0)


class TestAborting:
    async def test_each_request_has_an_outcome_of_its_own(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.aborts = {
            "done": lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED,
            "nobody": status_with_info(_C.NOT_FOUND, "REQUEST_NOT_FOUND"),
            "stuck": status_with_info(_C.FAILED_PRECONDITION, "STUCK"),
            "lost": _C.UNAVAILABLE,
            "odd": lifecycle_pb2.ABORT_STATUS_UNSPECIFIED,
        }
        ids = ("there", "done", "nobody", "stuck", "lost", "odd")
        facts = await told(backend, order(AbortRequests(request_ids=ids)))
        end = facts[-1]
        assert isinstance(end, Completed)
        assert end.result["requests"] == [
            {"request_id": "there", "outcome": "aborted"},
            {"request_id": "done", "outcome": "already_finished"},
            {"request_id": "nobody", "outcome": "not_found"},
            {"request_id": "stuck", "outcome": "failed"},
            {"request_id": "lost", "outcome": "unverified"},
            {"request_id": "odd", "outcome": "unverified"},
        ]
        assert end.verification is Verification.UNVERIFIED
        assert [key for method, key in engine.calls if method == "Abort"].count("lost") == 1

    async def test_all_is_said_as_all(self, engine: ScriptedEngine, backend: EngineBackend) -> None:
        end = (await told(backend, order(AbortRequests(all=True))))[-1]
        assert isinstance(end, Completed)
        assert end.result == {"changed": True, "requests": [], "all": "aborted"}
        assert end.verification is Verification.VERIFIED
        assert engine.calls == [("Abort", "all_requests")]

    async def test_all_with_a_lost_reply_is_unverified_and_not_repeated(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        engine.aborts = {"all_requests": _C.UNAVAILABLE}
        end = (await told(backend, order(AbortRequests(all=True))))[-1]
        assert isinstance(end, Completed)
        assert (end.result["all"], end.verification) == ("unverified", Verification.UNVERIFIED)
        assert len(engine.calls) == 1

    @pytest.mark.parametrize(
        "command", [AbortRequests(all=True), AbortRequests(request_ids=("a", "b"))]
    )
    async def test_an_engine_that_takes_no_aborts_of_ours_refuses(
        self, engine: ScriptedEngine, backend: EngineBackend, command: AbortRequests
    ) -> None:
        refusal = status_with_info(_C.PERMISSION_DENIED, "ADMIN_LISTENER_ONLY")
        engine.aborts = dict.fromkeys(("a", "b", "all_requests"), refusal)
        with pytest.raises(EngineRefused) as refused:
            await told(backend, order(command))
        assert refused.value.error.reason == "ENGINE_AUTH_REFUSED"

    async def test_many_are_told_in_steps(self, backend: EngineBackend) -> None:
        ids = tuple(f"r-{n}" for n in range(20))
        facts = await told(backend, order(AbortRequests(request_ids=ids)))
        steps = [fact.progress.done for fact in facts if isinstance(fact, Progressed)]
        assert steps == [8, 16]

    async def test_nothing_is_sent_after_the_deadline(
        self, engine: ScriptedEngine, backend: EngineBackend
    ) -> None:
        late = order(AbortRequests(request_ids=("a", "b")), deadline_s=-1.0)
        end = (await told(backend, late))[-1]
        assert isinstance(end, Completed)
        assert engine.calls == []
        assert end.result["changed"] is False

    async def test_what_nobody_heard_is_unverified(self, backend: EngineBackend) -> None:
        end = backend.end_without_record(order(AbortRequests(request_ids=("a",))))
        assert isinstance(end, Completed)
        assert end.result["requests"] == [{"request_id": "a", "outcome": "unverified"}]
        assert backend.end_without_record(order()) is None


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
