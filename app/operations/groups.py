"""Having an engine join a trainer's process group before an update is ordered.

That is no order: nothing of the engine's state is another by it. It is audited, and what it leads
to is an update like any other.
"""

from __future__ import annotations

from app.backends.port import EngineRefused, EngineSilent, JoinsGroups
from app.clock import Clock
from app.domain.errors import (
    ChadburnError,
    EngineBusy,
    EngineFault,
    EngineUnreachable,
    FailedPrecondition,
    InvalidArgument,
    UnsupportedOperation,
)
from app.domain.weight_sessions import NcclTransfer
from app.ledger.ledger import Ledger
from app.operations.auditing import entry_of, refusals_audited
from app.operations.callers import Caller
from app.operations.fleet import Fleet

_ACTION = "join_group"


class Groups:
    def __init__(self, ledger: Ledger, fleet: Fleet, clock: Clock) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._clock = clock

    async def join(
        self, engine_id: str, transfer: NcclTransfer, caller: Caller, timeout_s: float
    ) -> bool:
        """Whether the engine is in it now; False: engines of this kind join with the update that
        names the group, and nothing was done.

        Raises UnknownEngine, EngineBusy, InvalidArgument, FailedPrecondition, UnsupportedOperation,
        EngineFault, EngineUnreachable (it is not known, and counts as not joined).
        """
        async with refusals_audited(
            self._ledger, self._clock, _ACTION, caller, engine_id=engine_id
        ):
            backend = await self._fleet.backend(engine_id)
            if not isinstance(backend, JoinsGroups):
                return False
            try:
                joined = await backend.join_group(transfer, timeout_s)
            except EngineRefused as refusal:
                raise _refusal(refusal) from refusal
            except EngineSilent as silent:
                message = "it is not known whether the engine has joined"
                raise EngineUnreachable(message) from silent
        if not joined:
            return False
        entry = entry_of(self._clock.now(), _ACTION, "accepted", caller, engine_id=engine_id)
        await self._ledger.audit.append(entry)
        return True


def _refusal(refused: EngineRefused) -> ChadburnError:
    error = refused.error
    match error.code:
        case "ABORTED":
            return EngineBusy(operation_id=None)
        case "INVALID_ARGUMENT":
            return InvalidArgument(error.message)
        case "FAILED_PRECONDITION":
            return FailedPrecondition(error.message)
        case "UNIMPLEMENTED":
            return UnsupportedOperation(error.message)
        case "UNAVAILABLE":
            return EngineUnreachable(error.message)
    return EngineFault(error.message)
