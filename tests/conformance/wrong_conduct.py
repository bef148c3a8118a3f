"""Wrong about what is done: one order at a time, pauses, requests, health, restarts, ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from app.domain.commands import Resume
from app.domain.kinds import PauseMode
from app.enginekit.runtime import Conclusion, Order
from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lifecycle_pb2
from tests.conformance.faulty import Event, Fault, kind_of
from tests.conformance.paced_engine import PacedEngine

INFERENCE = "openengine.v1.Inference"
_SERVING, _NOT_SERVING = 1, 2


# ---- one at a time ----


class RunsBeside(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if status.code is not grpc.StatusCode.ABORTED:
            await super().refuse(method, request, context, status)
        for event in self.forged(method):
            await context.write(event)


class HidesOpenOperations(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            del answer.state.open_operations[:]
        return answer


class DeafWhileBusy(Fault):
    """Answers no read while an operation runs."""

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method == "GetOperation" and self.double is not None:
            journal = self.double.server._running().state.journal
            for _ in range(500):
                await asyncio.sleep(0.02 if journal.open_operations() else 0)
        return None


class ResumeBreaksDrain(Fault):
    async def instead(self, method: str, request: Any) -> list[Any] | None:
        assert self.double is not None
        desk = self.double.server._running().desk
        for record in self.double.server._running().state.journal.open_operations():
            if method == "Resume":
                await desk.cancel(record.operation.id)
                return list(self.forged(method))
        return None


class CancelLies(Fault):
    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method != "CancelOperation":
            return None
        operation = pb.AdminOperation(
            operation_id=request.operation_id, state=pb.ADMIN_OPERATION_STATE_CANCELLING
        )
        return [pb.CancelAdminOperationResponse(operation=operation)]


class CancelledYetPaused(Fault):
    """Calls a drain cancelled, and pauses all the same when it is over."""

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method != "CancelOperation":
            return None
        await self.engine.abort(None, "hurry")
        state = pb.ADMIN_OPERATION_STATE_CANCELLING
        operation = pb.AdminOperation(operation_id=request.operation_id, state=state)
        return [pb.CancelAdminOperationResponse(operation=operation)]

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "completed" and method == "Pause":
            event.cancelled.message = "cancelled"
        return (event,)


# ---- pauses ----


class PausesOnPaper(Fault):
    """Says that it is paused, and is not."""

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        return list(self.forged(method)) if method in ("Pause", "Resume") else None


class PausesInTheProfile(PausesOnPaper):
    """Even its profile says so."""

    def __init__(self) -> None:
        super().__init__()
        self._paused: pb.PauseStatus | None = None

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method == "Pause":
            self._paused = pb.PauseStatus(
                mode=request.mode, epoch=1, idempotency_key=request.idempotency_key
            )
        elif method == "Resume":
            self._paused = None
        return await super().instead(method, request)

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile" and self._paused is not None:
            answer.state.admission = pb.ADMISSION_STATE_PAUSED
            answer.state.pause.CopyFrom(self._paused)
        return answer


class PausedButGenerating(PacedEngine):
    """False success: what is in flight goes on."""

    def _held_up(self) -> bool:
        return False


class AbortLetsLive(PacedEngine):
    def _pause(self, mode: PauseMode) -> Conclusion:
        self._paused = mode
        return Conclusion(requests_aborted=len(self._requests))


class KeepLoses(PacedEngine):
    async def commit(self, order: Order, rank: int) -> None:
        if isinstance(order.command, Resume) and rank == 0:
            for request in self._requests.values():
                request.aborted = "lost while frozen"
        await super().commit(order, rank)


class DrainEndsRequests(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Pause" and request.mode == pb.PAUSE_MODE_DRAIN:
            asyncio.get_running_loop().call_later(0.3, self._end)
        return request

    def _end(self) -> None:
        for running in self.engine._requests.values():
            running.aborted = "drained"
        self.engine._wake_all()


class RefusesInsteadOfHolding(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Pause":
            request.ClearField("hold_limit_ms")
            request.new_requests = pb.NEW_REQUESTS_REFUSE
        return request


class HoldsInsteadOfRefusing(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Pause":
            request.new_requests = pb.NEW_REQUESTS_HOLD
        return request


# ---- requests ----


class AbortsAllByOmission(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Abort" and not request.request_id:
            request.all_requests.SetInParent()
        return request


class AbortsTheOthersToo(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Abort":
            return lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        return request


class SaysAborted(Fault):
    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method != "Abort":
            return None
        status = lifecycle_pb2.AbortStatus.ABORT_STATUS_ABORTED
        return [lifecycle_pb2.AbortResponse(status=status)]


# ---- health ----


class AlwaysServing(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "Check":
            answer.status = _SERVING
        if method == "Health":
            answer.state = lifecycle_pb2.HealthState.HEALTH_STATE_READY
        return answer


class OneHealthForAll(Fault):
    """Every service is what readiness is."""

    async def asked(self, method: str, request: Any) -> Any:
        if method == "Check":
            request.service = INFERENCE
        return request


class NeverReady(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "Check" and request.service == INFERENCE:
            answer.status = _NOT_SERVING
        return answer


class HidesAdmin(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetServerInfo":
            answer.extra.Clear()
        return answer


# ---- credentials ----


class EchoesInRefusals(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        shown = dict(context.invocation_metadata() or ()).get("authorization", "")
        await context.abort(status.code, f"{status.details} ({shown})")


class EchoesInTrailers(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        shown = dict(context.invocation_metadata() or ()).get("x-api-key", "")
        context.set_trailing_metadata((("x-debug", str(shown)),))
        await context.abort(status.code, status.details)


class AsksForNoToken(Fault):
    """The suite shows a token; this engine would have let it in without."""


# ---- restarts and ranks ----


class SameInstance(Fault):
    def __init__(self) -> None:
        super().__init__()
        self._first = ""

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            self._first = answer.instance_id = self._first or answer.instance_id
        return answer


class CountsFromOne(Fault):
    """Revision and epochs begin anew with each life."""

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[str, tuple[int, int]] = {}

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            now = (answer.revision - 1, answer.pause_epoch)
            began = self._began.setdefault(answer.instance_id, now)
            answer.revision -= began[0]
        return answer

    async def asked(self, method: str, request: Any) -> Any:
        if getattr(request, "expected_revision", 0):
            assert self.double is not None
            began = self._began.get(self.double.instance_id, (0, 0))
            request.expected_revision += began[0]
        return request


class FinishedAfterAll(Fault):
    """What a restart cut off is reported as done."""

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetOperation" and answer.failed.reason == "ENGINE_RESTARTED":
            answer.completed.changed = True
        return answer


class SurelyNothing(Fault):
    """Claims to know what it cannot know."""

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetOperation" and answer.failed.reason == "ENGINE_RESTARTED":
            answer.failed.effect = pb.FAILURE_EFFECT_NONE
        return answer


class OneRankWillDo(Fault):
    """Success although not every rank has committed."""

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "failed":
            event.completed.changed = True
        return (event,)


class SomeRank(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "failed":
            del event.failed.ranks[:]
        return (event,)


class ServesWithoutARank(PacedEngine):
    def lose(self, rank: int) -> None:
        healthy = self.observation
        super().lose(rank)
        self.observation = healthy


class StaysBroken(Fault):
    """A restart does not bring the weights back."""

    def __init__(self) -> None:
        super().__init__()
        self._first = ""

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            self._first = self._first or answer.instance_id
            if answer.instance_id != self._first:
                answer.state.weights.state = pb.WEIGHTS_STATE_MISSING
        return answer


class ForgetsOrders(Fault):
    """Does nothing any more after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self._first = ""

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        assert self.double is not None
        self._first = self._first or self.double.instance_id
        if method == "Pause" and self.double.instance_id != self._first:
            return self.forged(method)[:1]
        return None
