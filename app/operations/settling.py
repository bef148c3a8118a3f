"""Stating the end of an operation whose outcome is not known."""

from __future__ import annotations

from dataclasses import dataclass

from app.clock import Clock
from app.domain.errors import NotReconciling, OperationEnded, UnknownOperation
from app.domain.kinds import OperationState
from app.domain.operation import Operation
from app.domain.transitions import Advanced, Settled, advance
from app.ledger.errors import Superseded
from app.ledger.ledger import Ledger
from app.operations.auditing import end_entry, entry_of, refusals_audited
from app.operations.callers import Caller
from app.operations.runner import Runner

ACTION = "settle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """`end` is terminal. `reason`: how it is known. `message`: what a failure says of itself;
    empty: the reason."""

    end: OperationState
    reason: str
    message: str = ""


class Settlements:
    def __init__(self, ledger: Ledger, runner: Runner, clock: Clock) -> None:
        self._ledger = ledger
        self._runner = runner
        self._clock = clock

    async def settle(self, operation_id: str, statement: Statement, caller: Caller) -> Operation:
        """End it as stated, and free the engine's slot. Nothing is asked of the engine, and what
        is known of it stays as it is.

        Of this and the engine's own late answer one is written, whichever comes first. Raises
        UnknownOperation, OperationEnded, NotReconciling; audited either way.
        """
        operation = await self._operation(operation_id)
        async with refusals_audited(
            self._ledger,
            self._clock,
            ACTION,
            caller,
            engine_id=operation.engine_id,
            operation_id=operation_id,
        ):
            while True:
                try:
                    settled = await self._write(operation, statement, caller)
                    break
                except Superseded:
                    # A warning, the engine's own end, or another person's word was first.
                    operation = await self._operation(operation_id)
        self._runner.take(settled)
        return settled

    async def _write(self, before: Operation, statement: Statement, caller: Caller) -> Operation:
        if before.done:
            raise OperationEnded("the operation has ended", operation_id=before.id)
        now = self._clock.now()
        fact = Settled(
            end=statement.end,
            by="" if caller.actor is None else caller.actor.subject,
            reason=statement.reason,
            message=statement.message,
        )
        step = advance(before, fact, now)
        if not isinstance(step, Advanced):
            raise NotReconciling(
                f"the operation is {before.state.value}: only an outcome that is not known, of an "
                "operation that is reconciling, can be stated",
                operation_id=before.id,
            )
        asked = entry_of(
            now,
            ACTION,
            "accepted",
            caller,
            engine_id=before.engine_id,
            operation_id=before.id,
            detail={"outcome": statement.end.value, "message": statement.message},
        )
        return await self._ledger.operations.record(
            before, step, audit=end_entry(step.operation, now), asked=asked
        )

    async def _operation(self, operation_id: str) -> Operation:
        operation = await self._ledger.operations.get(operation_id)
        if operation is None:
            raise UnknownOperation("there is no operation of that id")
        return operation
