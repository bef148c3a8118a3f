"""Going on with a weight session: judged, written down, handed to the runner."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from app.clock import Clock
from app.domain.commands import UpdateWeights, check_revision, command_of
from app.domain.engine import Engine
from app.domain.engine_payloads import EnginePayloadChunk
from app.domain.errors import (
    ChadburnError,
    ChunkOutOfOrder,
    EngineUnreachable,
    MissingIdempotencyKey,
    SessionClosed,
    UnknownSession,
)
from app.domain.idempotency import check_key
from app.domain.kinds import OperationState
from app.domain.operation import Actor, JsonObject, Operation, Progress
from app.domain.transitions import Advanced, Continued, advance
from app.domain.weight_sessions import Chunk, SessionStage, SessionWeights, Stage
from app.ledger.errors import LedgerUnavailable, Superseded
from app.ledger.ledger import Ledger
from app.ledger.stages import StoredStage, Taken
from app.ledger.values import Accepted, KeyClaim
from app.operations.auditing import entry_of, refusals_audited
from app.operations.callers import Caller
from app.operations.fleet import Fleet
from app.operations.runner import Runner
from app.operations.stage_sending import session_id_of

_CLOSED = frozenset({OperationState.CANCELLING})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """One further call as the edge understood it. `caller.actor` is who began the session."""

    engine_id: str
    command: SessionStage
    actor: Actor
    caller: Caller
    model: str | None = None
    key: str | None = None
    fingerprint: str = ""
    expected_revision: int | None = None
    revision_from_header: bool = False


@dataclass(frozen=True, slots=True)
class _Judged:
    operation: Operation
    taken: Taken


class Sessions:
    """A session belongs to whoever began it: for others there is none of that name."""

    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        runner: Runner,
        clock: Clock,
        *,
        key_retention_s: float = 86_400.0,
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._runner = runner
        self._clock = clock
        self._key_retention = timedelta(seconds=key_retention_s)
        self._under_way: set[asyncio.Task[Any]] = set()

    async def go_on(self, request: StageRequest) -> Accepted:
        """Take a further call on. What is accepted is the operation that the session is.

        Judged in this order: engine known, key replayed, offered by the engine, session open,
        revision, fits the session, its turn. Raises UnknownEngine, MissingIdempotencyKey,
        IdempotencyKeyReused, UnsupportedOperation, EngineUnreachable, UnknownSession,
        RevisionMismatch, InvalidArgument, SessionClosed, ChunkOutOfOrder. A refusal is audited.
        """
        task = asyncio.get_running_loop().create_task(self._go_on(request))
        self._under_way.add(task)
        task.add_done_callback(self._over)
        # A client that goes away between the commit and the runner must not leave a call lying.
        return await asyncio.shield(task)

    async def plan(self, request: StageRequest) -> JsonObject:
        """The same judgement; writes nothing. `{engine, kind, request, would, operation}`."""
        judged = await self._judge(request, await self._fleet.engine(request.engine_id))
        return {
            "engine": request.engine_id,
            "kind": request.command.kind.value,
            "request": {"session_id": request.command.session_id, "stage": self._name(request)},
            "would": "accept",
            "operation": judged.operation.id,
        }

    async def staged(self, operation_id: str, index: int, timeout_s: float) -> Operation:
        """The operation once that chunk is staged on every rank or it has ended, or as it stands
        when the time is up."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        with self._ledger.events.subscribe() as events:
            while True:
                operation = await self._ledger.operations.get(operation_id)
                assert operation is not None  # its call was taken on
                left_s = ends_at - loop.time()
                if operation.done or is_staged(operation, index) or left_s <= 0:
                    return operation
                await events.changed(left_s)

    async def _go_on(self, request: StageRequest) -> Accepted:
        kind = request.command.kind
        async with refusals_audited(
            self._ledger, self._clock, kind.value, request.caller, engine_id=request.engine_id
        ):
            engine = await self._fleet.engine(request.engine_id)
            if request.key is None:
                raise MissingIdempotencyKey("an order needs an idempotency key")
            key = check_key(request.key)
            earlier = await self._ledger.operations.replay(request.actor, key, request.fingerprint)
            if earlier is not None:
                return Accepted(earlier, fresh=False)
            try:
                accepted = await self._judged_and_taken(request, key, engine)
            except LedgerUnavailable:
                raise
            except ChadburnError:
                # What refuses it may be what a twin of this very call has changed meanwhile.
                twin = await self._ledger.operations.replay(request.actor, key, request.fingerprint)
                if twin is None:
                    raise
                return Accepted(twin, fresh=False)
        if accepted.fresh:
            self._runner.take(accepted.operation)
        return accepted

    async def _judged_and_taken(self, request: StageRequest, key: str, engine: Engine) -> Accepted:
        while True:
            judged = await self._judge(request, engine)
            try:
                return await self._take(request, key, judged)
            except Superseded:
                continue  # something was heard of it, or another call was taken on, meanwhile

    async def _judge(self, request: StageRequest, engine: Engine) -> _Judged:
        facts, can = engine.observed.facts, engine.observed.capabilities
        if facts is None or can is None:
            raise EngineUnreachable("this engine has not answered yet", retry_after_s=2)
        command = request.command
        command.check_supported(can)
        operation = await self._open(request)
        check_revision(request.expected_revision, facts, from_header=request.revision_from_header)
        begun = command_of(operation.kind, operation.request)
        assert isinstance(begun, UpdateWeights)
        assert isinstance(begun.source, SessionWeights)
        if request.model is not None and request.model != begun.model:
            raise UnknownSession("the session is not one of that model")
        command.check_fits(begun.source)
        taken = await self._ledger.stages.taken(operation.id)
        if taken.closed or operation.state in _CLOSED:
            raise SessionClosed("the session takes nothing more", operation_id=operation.id)
        stage = command.stage
        if isinstance(stage, Chunk) and stage.index != taken.chunks:
            raise ChunkOutOfOrder(
                given=stage.index, expected=taken.chunks, operation_id=operation.id
            )
        return _Judged(operation, taken)

    async def _open(self, request: StageRequest) -> Operation:
        for operation in await self._ledger.operations.open_ones(request.engine_id):
            named = session_id_of(operation) == request.command.session_id
            if named and operation.actor == request.actor:
                return operation
        raise UnknownSession("no session of yours has that name and is open on this engine")

    async def _take(self, request: StageRequest, key: str, judged: _Judged) -> Accepted:
        now = self._clock.now()
        stage = request.command.stage
        step = advance(judged.operation, Continued(progress=_progress(judged, stage.name)), now)
        if not isinstance(step, Advanced):
            raise SessionClosed("the session takes nothing more", operation_id=judged.operation.id)
        number = judged.taken.calls + 1
        return await self._ledger.stages.take(
            judged.operation,
            step,
            StoredStage(number, stage, request.expected_revision),
            key=KeyClaim(key, request.fingerprint, now + self._key_retention),
            audit=entry_of(
                now,
                request.command.kind.value,
                "accepted",
                request.caller,
                engine_id=request.engine_id,
                operation_id=judged.operation.id,
                detail={"stage": self._name(request), **_payload(stage)},
            ),
        )

    @staticmethod
    def _name(request: StageRequest) -> str:
        stage = request.command.stage
        return f"{stage.name} {stage.index}" if isinstance(stage, Chunk) else stage.name

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # audited; whoever waited may have left


def _payload(stage: Stage) -> JsonObject:
    """What is kept of a payload that the engine alone can read: its digest and size, no byte."""
    if not isinstance(stage, Chunk) or not isinstance(stage.payload, EnginePayloadChunk):
        return {}
    sent = stage.payload
    return {"payload_sha256": sent.sha256, "payload_bytes": sent.size_bytes}


def is_staged(operation: Operation, index: int) -> bool:
    progress = operation.progress
    return progress is not None and progress.unit == "chunks" and progress.done > index


def _progress(judged: _Judged, name: str) -> Progress:
    before = judged.operation.progress
    staged = before.done if before is not None and before.unit == "chunks" else 0
    chunks = judged.taken.chunks + (name == Chunk.name)
    return Progress(f"{name}_taken", staged, chunks, "chunks")
