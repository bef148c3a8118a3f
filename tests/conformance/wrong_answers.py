"""Wrong about what is refused, what is offered, and about revisions and epochs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from app.rpc.openengine.v1 import admin_pb2 as pb
from app.rpc.openengine.v1 import lora_pb2
from tests.conformance.faulty import Event, Fault, Forged, kind_of

# ---- refusals ----


class UnspecifiedMeansDrain(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Pause" and not request.mode:
            request.mode = pb.PAUSE_MODE_DRAIN
        return request


class UnspecifiedIsLeftOut(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "FlushCaches" and 0 in request.caches:
            del request.caches[:]
            request.caches.append(pb.CACHE_KIND_PREFIX)
        return request


class EmptyMeansAll(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "FlushCaches" and not request.caches:
            request.caches.append(pb.CACHE_KIND_PREFIX)
        return request


class UnknownMeansDrain(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Pause" and request.mode > 3:
            request.mode = pb.PAUSE_MODE_DRAIN
        return request


class FlushesWhatItHas(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "FlushCaches" and pb.CACHE_KIND_ENCODER in request.caches:
            request.caches[0] = pb.CACHE_KIND_PREFIX
        return request


class AnyModel(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if hasattr(request, "model"):
            request.ClearField("model")
        return request


class AnyDeadline(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if hasattr(request, "deadline_ms"):
            request.ClearField("deadline_ms")
        return request


class AnyHoldLimit(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Pause":
            request.ClearField("hold_limit_ms")
        return request


class NoErrorInfo(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        await context.abort(status.code, status.details)


class LowerCaseReasons(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        await context.abort_with_status(_with_info(status, lambda i: i.reason.lower(), keep=True))


class NamesNobody(Fault):
    """Busy, but does not say with what."""

    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        await context.abort_with_status(_with_info(status, lambda i: i.reason, keep=False))


def _with_info(status: Any, reason_of: Any, *, keep: bool) -> Any:
    told = status_pb2.Status.FromString(dict(status.trailing_metadata)["grpc-status-details-bin"])
    for detail in told.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            info.reason = reason_of(info)
            if not keep:
                info.metadata.clear()
            detail.Pack(info)
    return rpc_status.to_status(told)


class LeavesOperation(Fault):
    """Writes an order down before it judges it."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: set[str] = set()

    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        key = getattr(request, "idempotency_key", "")
        if method == "GetOperation" and key in self._refused:
            raise Forged(pb.AdminOperation(operation_id="refused", idempotency_key=key))
        self._refused.add(key)
        await super().refuse(method, request, context, status)


class SmallLimit(Fault):
    """States a smaller limit than the one it keeps."""

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.limits.max_message_bytes = 64 * 1024
        return answer


class LargeLimit(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.limits.max_message_bytes = 2 * 1024 * 1024
        return answer


# ---- the profile ----


class UnimplementedHasEffect(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method in ("ReleaseResources", "StopProfile", "LoadLora"):
            seen = self.engine.observation
            version = f"v{next(self._numbers)}-half-released"
            self.engine.observation = replace(seen, weights=replace(seen.weights, version=version))
        return request


class DoesWhatItDoesNotOffer(Fault):
    async def instead(self, method: str, request: Any) -> list[Any] | None:
        if method == "UpdateWeights" and request.idempotency_key:
            return list(self.forged(method))
        if method == "StopProfile":
            return [pb.StopProfileResponse()]
        if method == "LoadLora":
            return [lora_pb2.LoadLoraResponse()]
        return None


class OffersTooMuch(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.operations.add(kind=pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS)
        return answer


class ShortMemory(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.limits.key_retention_ms = 60_000
        return answer


class NoInstance(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.instance_id = ""
        return answer


class ReadingCounts(Fault):
    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.revision += next(self._numbers)
        return answer


# ---- revisions and epochs ----


class IgnoresExpectedRevision(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if hasattr(request, "expected_revision"):
            request.ClearField("expected_revision")
        return request


class RefusesExpectedRevision(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if getattr(request, "expected_revision", 0):
            request.expected_revision += 1
        return request


class RevisionRisesWithoutChange(Fault):
    def __init__(self) -> None:
        super().__init__()
        self._unchanged: set[str] = set()

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "completed" and not event.completed.changed:
            self._unchanged.add(event.operation_id)
        return (event,)

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.revision += len(self._unchanged)
        return answer


class RevisionStandsStill(Fault):
    def __init__(self) -> None:
        super().__init__()
        self._first = 0

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            self._first = answer.revision = self._first or answer.revision
        return answer


class AlwaysChanged(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "completed":
            event.completed.changed = True
        return (event,)


class EpochStandsStill(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "completed" and method == "Pause":
            event.completed.pause.pause_epoch = 1
        return (event,)

    async def asked(self, method: str, request: Any) -> Any:
        if method == "Resume":
            assert self.double is not None
            request.pause_epoch = self.double.server._running().state.facts().pause_epoch
        return request

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetAdminProfile":
            answer.pause_epoch = min(1, answer.pause_epoch)
            answer.state.pause.epoch = min(1, answer.state.pause.epoch)
        return answer


class IgnoresPauseEpoch(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Resume" and request.pause_epoch:
            assert self.double is not None
            request.pause_epoch = self.double.server._running().state.facts().pause_epoch
        return request


class ResumesTheOpen(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method != "Resume" or "not paused" not in status.details:
            await super().refuse(method, request, context, status)
        for event in self.forged(method):
            await context.write(event)


class RepeatIsNewPause(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Pause" and not request.hold_limit_ms:
            request.hold_limit_ms = 10_000 + next(self._numbers)
        return request


class CarriesOutTwice(RepeatIsNewPause):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "Pause":
            request.idempotency_key += f"-{next(self._numbers)}"
        return await super().asked(method, request)
