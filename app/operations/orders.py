"""Giving an order: judged, written down, handed to the runner; and watching or cancelling it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.clock import Clock, IdSource
from app.domain.commands import Command
from app.domain.operation import Actor, JsonObject, Operation
from app.ledger.ledger import Ledger
from app.ledger.values import Accepted
from app.operations.callers import Caller
from app.operations.deadlines import Deadlines
from app.operations.fleet import Fleet
from app.operations.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRequest:
    """One order as the edge understood it.

    `key`: the caller's idempotency key; None only with `plan`. `fingerprint`: of the whole
    request. `revision_from_header`: the expected revision came as If-Match, so that a mismatch is
    reported as such. `deadline_ms`: None means the default of the kind.
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
    request_id: str | None = None
    trace_id: str | None = None
    source: str | None = None


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
    ) -> None: ...

    async def submit(self, request: OrderRequest) -> Accepted:
        """Take the order on. Nothing waits for the engine, but facts older than 2 s are read
        again first, for 300 ms at most.

        Judged in this order: engine known, key replayed, offered by the engine, deadline,
        revision, epoch and state, nothing else running. Raises UnknownEngine, IdempotencyKeyReused,
        MissingIdempotencyKey, Unimplemented (QUEUE_NOT_OFFERED, UNSUPPORTED_OPERATION),
        EngineUnreachable (it never answered, so nothing is known to judge by), InvalidArgument,
        RevisionMismatch, FailedPrecondition and its leaves, EngineBusy. A refusal is audited.
        """
        raise NotImplementedError

    async def plan(self, request: OrderRequest) -> JsonObject:
        """The same judgement, and what the order would do. Sends no order, writes nothing.

        `{engine, kind, request, would: "accept", effect, revision, revision_source, pause_epoch,
        instance_id, facts_observed_at, running_operation, deadline_ms, load}`. Raises as `submit`.
        """
        raise NotImplementedError

    async def cancel(self, operation_id: str, caller: Caller) -> Operation:
        """Cancel what was not sent; else ask the engine. The end comes as any other end does.

        Raises UnknownOperation, OperationEnded, NotCancellable. Asking again changes nothing.
        """
        raise NotImplementedError

    async def wait(self, operation_id: str, timeout_s: float) -> Operation:
        """The operation once it has ended, or as it stands when the time is up.

        Raises UnknownOperation.
        """
        raise NotImplementedError
