"""The gate in front of generation, as pure rules: who may pass, wait or turn back.

No clock, no waiting, no task: `admission.AdmissionGate` puts those around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.domain.kinds import Admission, NewRequests


class Passage(StrEnum):
    ADMITTED = "admitted"
    HELD = "held"
    REFUSED = "refused"
    FULL = "full"  # as many are held as may be
    DUPLICATE = "duplicate"  # a request of that id is held or in flight


@dataclass(frozen=True, slots=True)
class NewRequestRule:
    """What a pause does with requests that arrive. `hold_limit_ms` is always above 0: even with
    REFUSE requests are held while it is not yet known whether the pause takes effect."""

    new_requests: NewRequests
    hold_limit_ms: int


class Gate:
    """Open, draining or paused; and, beside that, whether a pause is on its way.

    A pause goes `drain` or `close`, then `take_effect` or `withdraw`. `withdraw` returns to what
    was before, which may be an earlier pause.
    """

    def __init__(self, *, max_held: int) -> None:
        self._max_held = max_held
        self._admission = Admission.OPEN
        self._rule: NewRequestRule | None = None  # of the pause that holds
        self._coming: NewRequestRule | None = None  # of the pause on its way
        self._in_flight: set[str] = set()
        self._held: dict[str, None] = {}  # in order of arrival

    @property
    def admission(self) -> Admission:
        return self._admission

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def hold_limit_ms(self) -> int:
        """For a request that is held now."""
        rule = self._rule or self._coming
        return 0 if rule is None else rule.hold_limit_ms

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def held_ids(self) -> tuple[str, ...]:
        return tuple(self._held)

    def arrive(self, request_id: str) -> Passage:
        if request_id in self._in_flight or request_id in self._held:
            return Passage.DUPLICATE
        if self._admission is Admission.OPEN and self._coming is None:
            self._in_flight.add(request_id)
            return Passage.ADMITTED
        if self._turns_back():
            return Passage.REFUSED
        if len(self._held) >= self._max_held:
            return Passage.FULL
        self._held[request_id] = None
        return Passage.HELD

    def _turns_back(self) -> bool:
        if self._admission is Admission.OPEN:
            return False  # closing: held until it is known whether the pause takes effect
        rule = self._coming if self._admission is Admission.DRAINING else self._rule
        return rule is not None and rule.new_requests is NewRequests.REFUSE

    def leave(self, request_id: str) -> None:
        """The request is over, or its caller has gone."""
        self._in_flight.discard(request_id)
        self._held.pop(request_id, None)

    def close(self, rule: NewRequestRule) -> None:
        """Let nothing in while the ranks prepare a pause; admission is reported as before."""
        self._coming = rule

    def drain(self, rule: NewRequestRule) -> None:
        """Let what is in flight finish. Only from open: a paused engine has nothing to drain."""
        self._coming = rule
        self._admission = Admission.DRAINING

    def take_effect(self) -> tuple[str, ...]:
        """The pause on its way holds from now on. Returns the held requests it turns back."""
        if self._coming is None:
            raise ValueError("no pause is on its way")
        self._rule, self._coming = self._coming, None
        self._admission = Admission.PAUSED
        if self._rule.new_requests is NewRequests.HOLD:
            return ()
        turned_back = tuple(self._held)
        self._held.clear()
        return turned_back

    def withdraw(self) -> tuple[str, ...]:
        """The pause on its way does not happen. Returns the requests let in, oldest first."""
        self._coming = None
        return () if self._admission is Admission.PAUSED else self.open()

    def open(self) -> tuple[str, ...]:
        """Returns the requests let in, oldest first."""
        self._admission = Admission.OPEN
        self._rule = None
        let_in = tuple(self._held)
        self._held.clear()
        self._in_flight.update(let_in)
        return let_in
