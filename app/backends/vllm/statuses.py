"""How one member has answered a call that changes something."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc

from app.backends import status_map
from app.domain.kinds import FailureEffect
from app.domain.operation import OperationError

_C = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class Done:
    response: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """Judged, and nothing done."""

    error: OperationError


@dataclass(frozen=True, slots=True)
class Broke:
    """INTERNAL, vLLM's one word for whatever goes wrong in the engine: done in part, or not."""

    error: OperationError


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer. `late`: the time of the call was over, and the engine may be at it still."""

    why: str
    late: bool = False


Said: TypeAlias = Done | Refused | Broke | Lost


def words_of(said: Said) -> str:
    """Why it was not done, as far as that is known; empty: it was."""
    match said:
        case Refused(error=error) | Broke(error=error):
            return error.message
        case Lost(why=why):
            return why
        case Done():
            return ""


# What a status means there, where the code alone says little.
_REASONS = {
    ("LoadLora", _C.ALREADY_EXISTS): (
        "LORA_ALREADY_LOADED",
        "an adapter or model of that name is there",
    ),
    ("UnloadLora", _C.NOT_FOUND): ("LORA_NOT_FOUND", "no adapter of that name is loaded"),
    ("Sleep", _C.FAILED_PRECONDITION): ("SLEEP_MODE_OFF", "started without --enable-sleep-mode"),
    ("WakeUp", _C.FAILED_PRECONDITION): ("SLEEP_MODE_OFF", "started without --enable-sleep-mode"),
    ("Shutdown", _C.FAILED_PRECONDITION): (
        "ENGINE_NOT_MANAGED",
        "this vLLM did not start its engine, and does not end it",
    ),
    ("InitWeightTransferEngine", _C.FAILED_PRECONDITION): (
        "WEIGHT_TRANSFER_OFF",
        "started without --weight-transfer-config",
    ),
    ("StartWeightUpdate", _C.FAILED_PRECONDITION): (
        "WEIGHT_TRANSFER_OFF",
        "started without --weight-transfer-config",
    ),
    ("StartDraftWeightUpdate", _C.FAILED_PRECONDITION): (
        "NO_DRAFT_MODEL",
        "there is no draft model whose weights could be updated",
    ),
}


def said(rpc: str, error: grpc.aio.AioRpcError) -> Said:
    code = error.code()
    refusal = status_map.refusal_of(error)
    if refusal is not None and code is not _C.ABORTED:
        reason = _REASONS.get((rpc, code))
        if reason is not None:
            refusal = replace(refusal, reason=reason[0], message=reason[1])
        return Refused(refusal)
    if code is _C.INTERNAL:
        message = "the engine could not carry it out"
        return Broke(
            OperationError("INTERNAL", "ENGINE_ERROR", message, effect=FailureEffect.UNKNOWN)
        )
    # CANCELLED is what a server says whose own clock was first at the deadline.
    late = code in (_C.DEADLINE_EXCEEDED, _C.CANCELLED)
    return Lost(status_map.lost_because(error), late)
