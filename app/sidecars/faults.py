"""What went wrong with a call, as the kit tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from app.enginekit.runtime import RuntimeFault
from app.sidecars.answers import Unreadable
from app.sidecars.http import CallError, Died, NoAnswer, NotSent, Refused, WrongAnswer


@contextmanager
def told() -> Generator[None]:
    """An order whose outcome is not known is rolled back by reading back, and lost where that fails
    too."""
    try:
        yield
    except CallError as error:
        raise fault_of(error) from error
    except Unreadable as error:
        raise RuntimeFault("WRONG_ANSWER", str(error)) from error


def fault_of(error: CallError) -> RuntimeFault:
    match error:
        case NotSent():
            return RuntimeFault("ENGINE_UNREACHABLE", error.message, retryable=True)
        case Died():
            return RuntimeFault("ENGINE_DIED", error.message)
        case NoAnswer():
            return RuntimeFault("ENGINE_NOT_ANSWERING", error.message)
        case Refused(status=status):
            code = "INVALID_ARGUMENT" if status in (400, 404, 422) else None
            return RuntimeFault("ENGINE_REFUSED", error.message, code=code)
        case WrongAnswer():
            return RuntimeFault("WRONG_ANSWER", error.message)
    return RuntimeFault("INTERNAL", error.message)


def refused(reason: str, message: str) -> RuntimeFault:
    """Before anything was sent: the engine's state does not allow it."""
    return RuntimeFault(reason, message, code="FAILED_PRECONDITION")


def inconsistent() -> RuntimeFault:
    """Of an update that broke off: what was sent of it can't be taken back."""
    return RuntimeFault(
        "WEIGHTS_INCONSISTENT",
        "the engine's weights are neither the old ones nor the new ones: update it again",
        applied=True,
    )


def remaining_s(deadline_at: float) -> float:
    """Until a deadline on the event loop's clock."""
    return max(0.001, deadline_at - asyncio.get_running_loop().time())
