"""Giving an order: judged, written down, handed to the runner; and watching or cancelling it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

from app.clock import Clock, IdSource, rfc3339
from app.domain.commands import Command, check_revision
from app.domain.engine import Engine
from app.domain.errors import (
    ChadburnError,
    EngineUnreachable,
    MissingIdempotencyKey,
    NotCancellable,
    OperationEnded,
    StalePauseEpoch,
    StaleReleaseEpoch,
    UnknownOperation,
)
from app.domain.facts import EngineFacts
from app.domain.idempotency import check_key
from app.domain.kinds import OperationState
from app.domain.operation import Actor, JsonObject, Operation
from app.domain.queueing import Queueing
from app.domain.transitions import Advanced, Cancelled, CancelRequested, Fact, advance
from app.ledger.errors import LedgerUnavailable, Superseded
from app.ledger.ledger import Ledger
from app.ledger.values import Accepted, KeyClaim
from app.operations.auditing import end_entry, entry_of, refusals_audited
from app.operations.callers import Caller
from app.operations.deadlines import Deadlines
from app.operations.effects import effect_of
from app.operations.fleet import REFRESH_WAIT_S, Fleet
from app.operations.freezing import require_thawed
from app.operations.runner import Runner
from app.operations.watched import Origin, Watched

T = TypeVar("T")

_UNSENT = frozenset({OperationState.ACCEPTED, OperationState.QUEUED})


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRequest:
    """One order as the edge understood it.

    `key`: the caller's idempotency key; None only with `plan`. `fingerprint`: of the whole
    request. `revision_from_header`: the expected revision came as If-Match, so that a mismatch is
    reported as such. `deadline_ms`: None means the default of the kind. `when_busy` says nothing
    of orders that exclude no others: there is nothing that they would have to wait for.
    `override_freeze`: the caller may, and wants to, order it in a freeze.
    """

    engine_id: str
    command: Command
    actor: Actor
    key: str | None = None
    fingerprint: str = ""
    expected_revision: int | None = None
    revision_from_header: bool = False
    deadline_ms: int | None = None
    reason: str | None = None
    when_busy: Literal["refuse", "queue"] = "refuse"
    override_freeze: bool = False
    request_id: str | None = None
    trace_id: str | None = None
    source: str | None = None
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Judged:
    """An order that passed: what it was judged by, how long it may take, and whether it waits."""

    engine: Engine
    facts: EngineFacts
    deadline_ms: int
    queueing: Queueing | None


class Orders:
    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        runner: Runner,
        clock: Clock,
        new_id: IdSource,
        *,
        deadlines: Deadlines,
        key_retention_s: float = 86_400.0,
        queue_limit: int = 16,
        max_open: int = 64,
        watched: Watched | None = None,
    ) -> None:
        """`queue_limit`: so many orders may wait for one engine. `max_open`: so many of its
        operations, of those that need not wait, may be open."""
        self._ledger = ledger
        self._fleet = fleet
        self._runner = runner
        self._clock = clock
        self._new_id = new_id
        self._deadlines = deadlines
        self._key_retention = timedelta(seconds=key_retention_s)
        self._queue_limit = queue_limit
        self._max_open = max_open
        self._watched = watched or Watched()
        self._under_way: set[asyncio.Task[Any]] = set()

    async def submit(self, request: OrderRequest, known: Engine | None = None) -> Accepted:
        """Take the order on. Nothing waits for the engine, but facts older than 2 s are read
        again first, for 300 ms at most.

        `known`: the engine, as its caller has just read it; None: it is read here. Judged in this
        order: engine known, key replayed, not frozen, offered by the engine,
        deadline, revision, epoch and state, nothing else running. One that waits where the engine
        is busy is not held against its state, which those before it will change: that is judged at
        its turn, with all the rest once more.

        Raises UnknownEngine, IdempotencyKeyReused, MissingIdempotencyKey, EngineFrozen,
        UnsupportedOperation, EngineUnreachable (it never answered, so nothing is known to judge
        by), InvalidArgument, RevisionMismatch, FailedPrecondition and its leaves, EngineBusy,
        QueueFull, TooManyOpenOperations. A refusal is audited.
        """
        # A client that goes away between the commit and the runner must not leave an order lying.
        return await self._to_the_end(self._submit(request, known))

    async def plan(self, request: OrderRequest) -> JsonObject:
        """The same judgement, and what the order would do. Sends no order, writes nothing.

        `{engine, kind, request, would: "accept" | "queue", queue_position, effect, revision,
        revision_source, pause_epoch, release_epoch, instance_id, facts_observed_at,
        running_operation, deadline_ms, load}`. Raises as `submit`.
        """
        engine = await self._fleet.engine(request.engine_id)
        self._require_thawed(engine, request)
        judged = await self._judge(request, engine)
        position = None
        if request.command.kind.exclusive:
            line = await self._ledger.operations.line(request.engine_id)
            position = line.enter(judged.queueing)
        load = await self._load(request.engine_id)
        facts = judged.facts
        return {
            "engine": request.engine_id,
            "kind": request.command.kind.value,
            "request": dict(request.command.document()),
            "would": "accept" if position is None else "queue",
            "queue_position": position,
            "effect": effect_of(request.command, facts, load),
            "revision": facts.revision,
            "revision_source": facts.revision_source.value,
            "pause_epoch": facts.pause_epoch,
            "release_epoch": facts.release_epoch,
            "instance_id": facts.instance_id,
            "facts_observed_at": rfc3339(facts.observed_at),
            "running_operation": judged.engine.running_operation,
            "deadline_ms": judged.deadline_ms,
            "load": None if load is None else dict(load),
        }

    async def cancel(self, operation_id: str, caller: Caller) -> Operation:
        """Cancel what was not sent; else ask the engine. The end comes as any other end does.

        Raises UnknownOperation, OperationEnded, NotCancellable. Asking again changes nothing.
        """
        return await self._to_the_end(self._cancel(operation_id, caller))

    async def wait(self, operation_id: str, timeout_s: float) -> Operation:
        """The operation once it has ended, or as it stands when the time is up.

        Raises UnknownOperation.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        with self._ledger.events.subscribe() as events:
            while True:
                operation = await self._operation(operation_id)
                left_s = ends_at - loop.time()
                if operation.done or left_s <= 0:
                    return operation
                await events.changed(left_s)

    # ---- submitting ----

    async def _submit(self, request: OrderRequest, known: Engine | None) -> Accepted:
        caller = Caller(
            actor=request.actor,
            note=request.reason,
            request_id=request.request_id,
            trace_id=request.trace_id,
            source=request.source,
            scopes=request.scopes,
        )
        kind = request.command.kind
        async with refusals_audited(
            self._ledger, self._clock, kind.value, caller, engine_id=request.engine_id
        ):
            engine = known or await self._fleet.engine(request.engine_id)
            if request.key is None:
                raise MissingIdempotencyKey("an order needs an idempotency key")
            key = check_key(request.key)
            if not self._fleet.knows_well(engine):
                # Nobody waits for an engine to be read whose order is known already.
                earlier = await self._replay(request, key)
                if earlier is not None:
                    return earlier
            try:
                self._require_thawed(engine, request)
                judged = await self._judge(request, engine)
            except LedgerUnavailable:
                raise
            except ChadburnError:
                # This very order may have been taken on by an earlier call, or by a twin of this
                # one, and what refuses it now is what it has changed itself.
                earlier = await self._replay(request, key)
                if earlier is None:
                    raise
                return earlier
            now = self._clock.now()
            operation = Operation(
                id=self._new_id(),
                engine_id=request.engine_id,
                kind=kind,
                state=OperationState.ACCEPTED,
                request=request.command.document(),
                actor=request.actor,
                created_at=now,
                idempotency_key=key,
                reason=request.reason,
                expected_revision=request.expected_revision,
                deadline_at=now + timedelta(milliseconds=judged.deadline_ms),
                trace_id=request.trace_id,
                override_freeze=request.override_freeze,
            )
            with self._watched.taking_on(operation) as span:
                accepted = await self._ledger.operations.accept(
                    operation,
                    key=KeyClaim(key, request.fingerprint, now + self._key_retention),
                    queueing=judged.queueing,
                    payload=request.command.payload,
                    most_open=self._max_open,
                    audit=entry_of(
                        now,
                        kind.value,
                        "accepted",
                        caller,
                        engine_id=request.engine_id,
                        operation_id=operation.id,
                        detail={"override_freeze": True} if request.override_freeze else {},
                    ),
                )
        if accepted.fresh:
            origin = Origin(request.request_id, span.sampled)
            self._runner.take(accepted.operation, origin)
        return accepted

    def _require_thawed(self, engine: Engine, request: OrderRequest) -> None:
        require_thawed(engine, self._clock.now(), override=request.override_freeze)

    async def _replay(self, request: OrderRequest, key: str) -> Accepted | None:
        """What the key stands for. Raises IdempotencyKeyReused."""
        earlier = await self._ledger.operations.replay(request.actor, key, request.fingerprint)
        return None if earlier is None else Accepted(earlier, fresh=False)

    async def _judge(self, request: OrderRequest, engine: Engine) -> _Judged:
        """`engine`: as the ledger has just had it."""
        began_at = self._clock.now()
        loop = asyncio.get_running_loop()
        waits_until = loop.time() + REFRESH_WAIT_S
        engine = await self._fleet.refreshed(engine)
        try:
            return await self._check(request, engine)
        except ChadburnError:
            tried_at = engine.observed.observed_at
            left_s = waits_until - loop.time()
            if left_s <= 0 or (tried_at is not None and tried_at >= began_at):
                raise
            # Nobody is refused by facts that a pause or a resume may just have overtaken.
            return await self._check(request, await self._fleet.reread(request.engine_id, left_s))

    async def _check(self, request: OrderRequest, engine: Engine) -> _Judged:
        facts, can = engine.observed.facts, engine.observed.capabilities
        if facts is None or can is None:
            raise EngineUnreachable("this engine has not answered yet", retry_after_s=2)
        command = request.command
        command.check_supported(can)
        deadline_ms = self._deadlines.of(
            command.kind, request.deadline_ms, can.limits.max_deadline_ms
        )
        check_revision(request.expected_revision, facts, from_header=request.revision_from_header)
        waits = False
        try:
            command.check_state(facts)
        except (StalePauseEpoch, StaleReleaseEpoch):
            raise  # no waiting makes another epoch than the latest the latest
        except ChadburnError:
            waits = await self._would_wait(request)
            if not waits:
                raise
        queueing = None
        if request.when_busy == "queue":
            # What was not held against the engine's state must not take the slot at once, should
            # it be free by the time the order is written down.
            queueing = Queueing(self._queue_limit, in_any_case=waits)
        return _Judged(engine, facts, deadline_ms, queueing)

    async def _would_wait(self, request: OrderRequest) -> bool:
        if request.when_busy != "queue" or not request.command.kind.exclusive:
            return False
        return (await self._ledger.operations.line(request.engine_id)).first is not None

    async def _load(self, engine_id: str) -> JsonObject | None:
        try:
            async with asyncio.timeout(REFRESH_WAIT_S):
                return await self._fleet.load(engine_id)
        except (ChadburnError, TimeoutError):
            return None

    # ---- cancelling ----

    async def _cancel(self, operation_id: str, caller: Caller) -> Operation:
        operation = await self._operation(operation_id)
        engine_id = operation.engine_id
        async with refusals_audited(
            self._ledger,
            self._clock,
            "cancel",
            caller,
            engine_id=engine_id,
            operation_id=operation_id,
        ):
            while True:
                fact = await self._cancelling(operation)
                if fact is None:
                    return operation
                step = advance(operation, fact, self._clock.now())
                # `_cancelling` gives only what the state allows.
                assert isinstance(step, Advanced)
                now = self._clock.now()
                end = end_entry(step.operation, now) if step.operation.done else None
                asked = entry_of(
                    now,
                    "cancel",
                    "accepted",
                    caller,
                    engine_id=engine_id,
                    operation_id=operation_id,
                )
                try:
                    operation = await self._ledger.operations.record(
                        operation, step, audit=end, asked=asked
                    )
                    break
                except Superseded:
                    # It was sent, or something was heard of it, in between.
                    operation = await self._operation(operation_id)
        self._runner.take(operation)
        return operation

    async def _cancelling(self, operation: Operation) -> Fact | None:
        """What a cancellation means now; None: it has been asked for already."""
        if operation.done:
            raise OperationEnded("the operation has ended", operation_id=operation.id)
        if operation.cancel_requested:
            return None
        if operation.state in _UNSENT:
            return Cancelled(message="cancelled before it was sent")
        if operation.state is OperationState.RECONCILING:
            raise NotCancellable(
                "its outcome is not known and the engine is being asked", operation_id=operation.id
            )
        can = (await self._fleet.engine(operation.engine_id)).observed.capabilities
        if can is None or operation.kind not in can.cancellable:
            raise NotCancellable(
                f"this engine does not cancel {operation.kind.value}", operation_id=operation.id
            )
        return CancelRequested()

    # ---- parts ----

    async def _operation(self, operation_id: str) -> Operation:
        operation = await self._ledger.operations.get(operation_id)
        if operation is None:
            raise UnknownOperation("there is no operation of that id")
        return operation

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Carried to its end even if whoever waits for it leaves."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            # Looked at here, for who waited may have left: its failure was audited, and is not
            # to be reported as unnoticed.
            task.exception()
