"""The gate with its waiting: held requests, their limits, and the end of work in flight."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.domain.errors import ChadburnError
from app.domain.kinds import Admission
from app.enginekit.gate import Gate, NewRequestRule, Passage
from app.enginekit.refusals import AdmissionClosed, DuplicateRequest, Stopping, TooManyHeld

Owner = tuple[str, str, str] | None
"""Issuer, subject and client of the token; None where the listener asks for none."""

_ENDED_REMEMBERED = 4096


class HeldRequestEnded(Exception):
    """It was taken on, waited, and will not be let in."""

    def __init__(self, message: str, *, aborted: bool) -> None:
        super().__init__(message)
        self.message = message
        self.aborted = aborted


@dataclass(slots=True)
class Ticket:
    """A request that was let in. `finished`: it ran to an end of its own."""

    finished: bool = False


class AdmissionGate:
    """`unfit`: why nothing may be served at all, whatever the gate says."""

    def __init__(self, *, max_held: int) -> None:
        self._gate = Gate(max_held=max_held)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._owners: dict[str, Owner] = {}
        self._ended: OrderedDict[str, Owner] = OrderedDict()
        self._left = asyncio.Event()
        self.finished = 0
        self.unfit: ChadburnError | None = None
        self._stopping: Stopping | None = None

    @property
    def admission(self) -> Admission:
        return self._gate.admission

    @property
    def in_flight(self) -> int:
        return self._gate.in_flight

    @property
    def held(self) -> int:
        return self._gate.held

    # ---- requests ----

    @asynccontextmanager
    async def passage(self, request_id: str, owner: Owner) -> AsyncIterator[Ticket]:
        """From arrival to the end of a request; inside, it is in flight.

        Raises AdmissionClosed, TooManyHeld, DuplicateRequest or `unfit` before it is taken on,
        HeldRequestEnded after it has waited in vain.
        """
        passage = self._arrive(request_id)
        self._owners[request_id] = owner
        ticket = Ticket()
        try:
            if passage is Passage.HELD:
                await self._wait(request_id)
            yield ticket
        finally:
            self._leave(request_id, ticket)

    def _arrive(self, request_id: str) -> Passage:
        if self._stopping is not None:
            raise self._stopping
        if self.unfit is not None and self.admission is Admission.OPEN:
            raise self.unfit
        passage = self._gate.arrive(request_id)
        if passage is Passage.DUPLICATE:
            raise DuplicateRequest("a request of that id is in flight")
        if passage is Passage.REFUSED:
            raise AdmissionClosed("the engine takes no new requests during this pause")
        if passage is Passage.FULL:
            raise TooManyHeld("as many requests as this engine may hold wait for the resume")
        return passage

    async def _wait(self, request_id: str) -> None:
        let_in = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = let_in
        try:
            await asyncio.wait({let_in}, timeout=self._gate.hold_limit_ms / 1000)
            if not let_in.done():
                raise HeldRequestEnded(
                    "the pause lasted longer than requests are held", aborted=False
                )
            let_in.result()
            if self.unfit is not None:
                raise HeldRequestEnded(self.unfit.message, aborted=False)
        finally:
            # Not only tidiness: a future that fails after its waiter has gone would be reported
            # as an error that nobody looked at.
            del self._waiting[request_id]
            if let_in.done() and not let_in.cancelled():
                let_in.exception()

    def _leave(self, request_id: str, ticket: Ticket) -> None:
        self._gate.leave(request_id)
        owner = self._owners.pop(request_id)
        self._ended[request_id] = owner
        self._ended.move_to_end(request_id)
        if len(self._ended) > _ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        self.finished += ticket.finished
        self._left.set()

    def owner_of(self, request_id: str) -> Owner:
        """Of a request that is here or was lately. Raises KeyError for any other."""
        if request_id in self._owners:
            return self._owners[request_id]
        return self._ended[request_id]

    def ended_lately(self, request_id: str) -> bool:
        return request_id not in self._owners and request_id in self._ended

    def end_held(self, request_ids: tuple[str, ...] | None, message: str) -> tuple[str, ...]:
        """Abort held requests, all of them with None. Returns those that were held."""
        wanted = self._gate.held_ids() if request_ids is None else request_ids
        ended = tuple(name for name in wanted if self._gate.is_held(name))
        for name in ended:
            self._gate.leave(name)
            self._turn_back(name, message, aborted=True)
        return ended

    def stop(self, message: str) -> None:
        """The engine stops: nobody will be let in any more."""
        self._stopping = Stopping(message)
        for name in self._gate.held_ids():
            self._gate.leave(name)
            self._turn_back(name, message, aborted=False)

    # ---- a pause ----

    def close(self, rule: NewRequestRule) -> None:
        self._gate.close(rule)

    def drain(self, rule: NewRequestRule) -> None:
        self._gate.drain(rule)

    async def departure(self) -> None:
        """Until some request has left since the last call. For one waiter: the running drain."""
        await self._left.wait()
        self._left.clear()

    def take_effect(self) -> None:
        for name in self._gate.take_effect():
            self._turn_back(
                name, "the engine takes no new requests during this pause", aborted=False
            )

    def withdraw(self) -> None:
        self._let_in(self._gate.withdraw())

    def open(self) -> None:
        self._let_in(self._gate.open())

    def _let_in(self, names: tuple[str, ...]) -> None:
        # Futures wake their waiters in the order in which they are set.
        for name in names:
            waiting = self._waiting.get(name)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def _turn_back(self, name: str, message: str, *, aborted: bool) -> None:
        waiting = self._waiting.get(name)
        if waiting is not None and not waiting.done():
            waiting.set_exception(HeldRequestEnded(message, aborted=aborted))
