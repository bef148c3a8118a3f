"""KV that this engine holds for others to fetch, each for the time of a lease.

A session ends when it was fetched, when its lease has run out, or when somebody ends it. Until then
its parts lie in host memory; the blocks they were computed in are free at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from app.reference_engine.kv_wire import Offer
from app.reference_engine.memory_file import MemoryFile

_ENDS_REMEMBERED = 4096


class SessionEnd(StrEnum):
    FETCHED = "fetched"
    LAPSED = "lapsed"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class KvSession:
    """``secret`` proves that somebody was given the session. ``break_off`` is set while it is being
    fetched."""

    id: str
    secret: bytes
    offer: Offer
    parts: tuple[MemoryFile, ...]
    break_off: Callable[[], None] | None = field(default=None)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.offer.parts)


class KvSessions:
    """Lives on one event loop."""

    def __init__(self, *, lease_s: float, new_id: Callable[[], str]) -> None:
        self._lease_s = lease_s
        self._new_id = new_id
        self._open: dict[str, KvSession] = {}
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._ended: OrderedDict[str, SessionEnd] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def size_bytes(self) -> int:
        return sum(session.size_bytes for session in self._open.values())

    def open(self, secret: bytes, offer: Offer, parts: Sequence[MemoryFile]) -> KvSession:
        """The parts are the session's from now on."""
        session = KvSession(self._new_id(), secret, offer, tuple(parts))
        self._open[session.id] = session
        self._lease(session)
        return session

    def _lease(self, session: KvSession) -> None:
        loop = asyncio.get_running_loop()
        self._leases[session.id] = loop.call_later(self._lease_s, self._lapse, session)

    def _lapse(self, session: KvSession) -> None:
        if session.break_off is not None:
            self._lease(session)  # fetching has a deadline of its own
        else:
            self.end(session, SessionEnd.LAPSED)

    def find(self, session_id: str) -> KvSession | None:
        return self._open.get(session_id)

    def ended(self, session_id: str) -> SessionEnd | None:
        """How, for the latest 4096."""
        return self._ended.get(session_id)

    def end(self, session: KvSession, how: SessionEnd) -> None:
        """Safe to repeat. Whoever fetches it at the moment is cut off."""
        if self._open.pop(session.id, None) is None:
            return
        self._leases.pop(session.id).cancel()
        self._ended[session.id] = how
        while len(self._ended) > _ENDS_REMEMBERED:
            self._ended.popitem(last=False)
        if session.break_off is not None:
            session.break_off()
        for part in session.parts:
            part.close()

    def end_all(self) -> None:
        for session in tuple(self._open.values()):
            self.end(session, SessionEnd.ABORTED)
