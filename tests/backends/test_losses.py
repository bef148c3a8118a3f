"""A refusal is one only when the engine refused; a lost reply is neither success nor failure."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import grpc
import pytest

from app.backends.port import EngineBackend, EngineRefused, EngineSilent, OutcomeLost, Silence
from app.domain.kinds import (
    FailureEffect,
    Verification,
)
from app.domain.transitions import (
    Completed,
    Progressed,
)
from app.rpc.openengine.v1 import admin_pb2
from tests.backends.scripted_engine import (
    Event,
    ScriptedEngine,
    accepted,
    paused,
    progress,
    status_with_info,
)
from tests.backends.ways import order, told, until

pytestmark = pytest.mark.anyio
_C = grpc.StatusCode


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
