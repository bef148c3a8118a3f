"""Wrong about events and keys: what is told of an operation, and which operation it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from app.rpc.openengine.v1 import admin_pb2 as pb
from tests.conformance.faulty import TERMINAL, Event, Fault, Forged, kind_of, turned_down

# ---- streams ----


class DoubleTerminal(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        yield event
        if kind_of(event) in TERMINAL:
            event.sequence += 1
            yield event


class TerminalMissing(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        return () if kind_of(event) in TERMINAL else (event,)


class TerminalNotLast(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        yield event
        if kind_of(event) in TERMINAL:
            more = Event(operation_id=event.operation_id, sequence=event.sequence + 1)
            more.time_unix_nanos = event.time_unix_nanos
            more.progress.phase = "afterwards"
            yield more


class SequenceGap(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        event.sequence += event.sequence > 1
        return (event,)


class NoAccepted(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        return () if kind_of(event) == "accepted" else (event,)


class WrongKind(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) == "accepted":
            event.accepted.kind = pb.ADMIN_OPERATION_KIND_SHUTDOWN
        return (event,)


class StatusAfterTheEnd(Fault):
    async def closing(self, method: str, context: Any) -> None:
        await turned_down(context, grpc.StatusCode.INTERNAL)


class ReplayFromTheMiddle(Fault):
    def __init__(self) -> None:
        super().__init__()
        self._ended: set[str] = set()

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if event.operation_id in self._ended and event.sequence == 1:
            return ()
        if kind_of(event) in TERMINAL:
            self._ended.add(event.operation_id)
        return (event,)


class HearsFromNow(Fault):
    """Whoever attaches later hears only what comes from then on."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, Any] = {}

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        late = self._first.setdefault(event.operation_id, request) is not request
        return () if late and event.sequence <= 2 else (event,)


class EndChanges(Fault):
    def __init__(self) -> None:
        super().__init__()
        self._ended: set[str] = set()

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if kind_of(event) in TERMINAL:
            if event.operation_id in self._ended:
                event.failed.reason = "ON_SECOND_THOUGHTS"
            self._ended.add(event.operation_id)
        return (event,)


class ManyIds(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        event.operation_id += f"-{event.sequence}"
        return (event,)


class DetachCancels(Fault):
    async def observer_gone(self, method: str, operation_id: str) -> None:
        assert self.double is not None
        await self.double.server._running().desk.cancel(operation_id)


class DetachLetsGo(Fault):
    """Observers hold the operation: one that breaks off undoes what it asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._gone: set[str] = set()

    async def observer_gone(self, method: str, operation_id: str) -> None:
        self._gone.add(operation_id)

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        if method == "GetOperation" and answer.operation_id in self._gone:
            answer.cancelled.message = "the observer has gone"
        return answer


# ---- keys ----


class ForgetsKeys(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if getattr(request, "idempotency_key", "") and method != "GetOperation":
            request.idempotency_key += f"-{next(self._numbers)}"
        return request


class ForgetsKeysAtRestart(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        assert self.double is not None
        if getattr(request, "idempotency_key", ""):
            request.idempotency_key += self.double.instance_id[-8:]
        return request


class TakesOtherPayload(Fault):
    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, Any] = {}

    async def asked(self, method: str, request: Any) -> Any:
        key = getattr(request, "idempotency_key", "")
        first = self._first.setdefault(key, request) if key else request
        return first if type(first) is type(request) else request


class TakesAnyKey(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        key = getattr(request, "idempotency_key", None)
        if key is not None and (not 0 < len(key) <= 128 or not key.isascii()):
            request.idempotency_key = f"instead-{next(self._numbers)}"
        return request


class RefusesLongKeys(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if len(getattr(request, "idempotency_key", "")) > 64:
            request.idempotency_key = ""
        return request


class RetryIsJudgedAnew(Fault):
    """Checks the revision before it looks at the key."""

    def __init__(self) -> None:
        super().__init__()
        self._revision = 0

    async def instead(self, method: str, request: Any) -> list[Any] | None:
        expected = getattr(request, "expected_revision", 0)
        if expected and expected < self._revision:
            request.idempotency_key += "-late"
        return None

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        self._revision = max(self._revision, event.completed.revision)
        return (event,)


class ForgetsByKey(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if method == "GetOperation" and request.idempotency_key:
            request.idempotency_key = "another"
        return request


class FindsAnything(Fault):
    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if method == "GetOperation":
            raise Forged(pb.AdminOperation(operation_id="something"))
        await super().refuse(method, request, context, status)
