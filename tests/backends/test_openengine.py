"""The backend against a real gRPC server: what is heard, and what is never claimed."""

from __future__ import annotations

import dataclasses
from contextlib import aclosing

import grpc
import pytest

from app.backends.port import EngineBackend, EngineRefused, EngineSilent
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
    CacheKind,
    CachePolicy,
    CollectiveBackend,
    Component,
    ContentPolicy,
    DrainRule,
    EngineRole,
    FailureEffect,
    NewRequests,
    PauseMode,
    ResourceKind,
    TensorDtype,
    Verification,
)
from app.domain.operation import OperationError
from app.domain.tensors import TensorSpec
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
)
from app.rpc.openengine.v1 import admin_pb2, lifecycle_pb2
from tests.backends.scripted_engine import (
    Event,
    ScriptedEngine,
    accepted,
    cancelled,
    failed,
    paused,
    progress,
    status_with_info,
)
from tests.backends.ways import order, told

pytestmark = pytest.mark.anyio

_C = grpc.StatusCode
SPEC = TensorSpec("w", TensorDtype.FLOAT32, (2, 3))
WIRE_SPEC = admin_pb2.TensorSpec(name="w", dtype=admin_pb2.TENSOR_DTYPE_FLOAT32, shape=[2, 3])


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
