"""Wrong about weight sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from app.domain.weight_sessions import Chunk
from app.enginekit.runtime import Order
from tests.conformance.faulty import Event, Fault, kind_of
from tests.conformance.session_engine import PiecewiseEngine


def stage_of(request: Any) -> str:
    """begin, chunk, commit, abort; empty for another order."""
    session = getattr(request, "session", None)
    return (session.WhichOneof("stage") or "") if session is not None else ""


class StagesLive(PiecewiseEngine):
    """What is staged is served at once."""

    async def stage_chunk(self, order: Order, rank: int, chunk: Chunk) -> None:
        await super().stage_chunk(order, rank, chunk)
        new = {tensor.name: tensor for tensor in self.pieces[order.operation_id, rank]}
        self.live[rank] = tuple(new.get(one.name, one) for one in self.live[rank])
        self._tell_apart()


class StagesForShow(PiecewiseEngine):
    """What was staged is not what is committed."""

    async def commit(self, order: Order, rank: int) -> None:
        before = self.live[rank]
        await super().commit(order, rank)
        if (order.operation_id, rank) in self.pieces:
            self.live[rank] = before
            self._tell_apart()


class OperationPerCall(Fault):
    """A chunk's stream is told under an id of its own."""

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if stage_of(request) == "chunk":
            event.operation_id += "-chunk"
        return (event,)


class TellsNothingOfChunks(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if event.HasField("progress") and event.progress.unit == "chunks":
            event.progress.unit = ""
        return (event,)


class ForgetsStageKeys(Fault):
    """A call that is repeated is taken for a new one."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, int] = {}

    async def asked(self, method: str, request: Any) -> Any:
        if stage_of(request) in ("chunk", "commit"):
            times = self._seen.setdefault(request.idempotency_key, 0)
            self._seen[request.idempotency_key] += 1
            if times:
                request.idempotency_key += f"-{times}"
        return request


class AnyOrder(Fault):
    """The index of a chunk does not count."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    async def asked(self, method: str, request: Any) -> Any:
        if stage_of(request) == "chunk":
            request.session.chunk.index = self._next
            self._next += 1
        return request


class AnySession(Fault):
    """One is as good as another."""

    def __init__(self) -> None:
        super().__init__()
        self._open = ""

    async def asked(self, method: str, request: Any) -> Any:
        if stage_of(request) == "begin":
            self._open = request.session.session_id
        elif stage_of(request):
            request.session.session_id = self._open or request.session.session_id
        return request


class ManySessions(Fault):
    """A second BEGIN is taken on too, as far as its caller can see."""

    async def refuse(self, method: str, request: Any, context: Any, status: Any) -> None:
        if stage_of(request) != "begin":
            await super().refuse(method, request, context, status)
        for event in self.forged(method):
            await context.write(event)


class CommitsWhatWasSent(Fault):
    """Whatever that call says, it commits the chunks that were sent."""

    stage: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._chunks = 0

    async def asked(self, method: str, request: Any) -> Any:
        stage = stage_of(request)
        if stage == "begin":
            self._chunks = 0
        elif stage == "chunk":
            self._chunks += 1
        elif stage == self.stage:
            request.session.commit.chunks = self._chunks
        return request


class AbortCommits(CommitsWhatWasSent):
    stage = "abort"


class IgnoresCount(CommitsWhatWasSent):
    stage = "commit"


class AbortIsAFailure(Fault):
    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if stage_of(request) == "abort" and kind_of(event) == "cancelled":
            event.failed.reason = "SESSION_ABORTED"
        return (event,)


class IgnoresLease(Fault):
    async def asked(self, method: str, request: Any) -> Any:
        if stage_of(request) == "begin":
            request.session.begin.ClearField("lease_ms")
        return request


class SurvivesInName(Fault):
    """After a restart it says that the session was committed."""

    def told(self, method: str, request: Any, event: Event) -> Iterable[Event]:
        if stage_of(request) and event.failed.reason == "ENGINE_RESTARTED":
            event.completed.changed = True
        return (event,)
