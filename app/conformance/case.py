"""What a case is, and how it says that a sentence of the contract holds, does not, or is not
shown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.conformance.trial import Trial

Run = Callable[["Trial"], Awaitable[None]]


class Verdict(StrEnum):
    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    NOT_APPLICABLE = "not-applicable"


class Need(StrEnum):
    """What the caller of the suite has to give; the value is said where it is missing."""

    INFERENCE = "needs --inference ADDR, to see what happens to requests"
    HOOK = "needs --fault-hook CMD, to break the engine and to start it again"
    DESTRUCTIVE = "needs --destructive, since it takes the engine out of service for a while"
    CREDENTIAL = "needs --token or --token-file: no credential is in play"
    REFUSED = "needs --refused-token WHAT=FILE: which tokens must not be taken"
    WEIGHTS = "needs --weights PATH, which the engine can load from disk"
    COPY = "needs --weights-copy PATH: the weights where this command can read them"
    SCRATCH = "needs --scratch DIR, below the engine's allowed roots, where this command can write"
    SHARED = "needs --shared-memory-prefix PREFIX, on the engine's host and as its user"


class NotHeld(Exception):
    """The sentence does not hold: what it led to expect, and what came."""

    def __init__(self, expected: str, seen: str) -> None:
        super().__init__(f"expected {expected}; saw {seen}")
        self.expected = expected
        self.seen = seen


class Lack(StrEnum):
    """Why a case is not applicable."""

    NOT_PROMISED = "not-promised"  # the engine does not offer what the sentence is about
    OPTION = "option-missing"  # whoever runs the suite has not given what it takes
    NOT_REACHED = "not-reached"  # it could not be brought about
    NOT_TRIED = "not-tried"  # the engine did not recover from an earlier case


class NotApplicable(Exception):
    """What the sentence is about could not be brought about: nothing is proven."""

    lack = Lack.NOT_REACHED

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotPromised(NotApplicable):
    """The engine does not offer what the sentence is about: there is nothing to be proven."""

    lack = Lack.NOT_PROMISED


class NotGiven(NotApplicable):
    """Whoever runs the suite has not given what it takes."""

    lack = Lack.OPTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`id` is stable. `sentence` is what an engine promises, and reads as a promise."""

    id: str
    sentence: str
    needs: tuple[Need, ...]
    run: Run


def case(id_: str, sentence: str, *needs: Need) -> Callable[[Run], Case]:
    """Makes the function below it a case."""

    def made(run: Run) -> Case:
        return Case(id=id_, sentence=sentence, needs=needs, run=run)

    return made


def expect(holds: bool, expected: str, seen: object) -> None:
    """Raises NotHeld."""
    if not holds:
        raise NotHeld(expected, str(seen))
