"""The ordered log of orders from the front end to the ranks, and their acknowledgements.

Orders go to the first rank alone: where there are more, it is that rank's part to hand them on, so
that all take them in one sequence. Every rank acknowledges each order over its own connection. A
rank that does not acknowledge in time counts as lost: nobody can say any more what it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from app.reference_engine.errors import OrderRejected, RankLost
from app.reference_engine.messages import Ack, Entry, Order, Result
from app.reference_engine.wire import HEADER, decode_body, encode_frame, frame_length


class RankConnection(Protocol):
    """The log's view of one rank."""

    def send(self, frame: bytes) -> None:
        """Queue bytes; never blocks, silently drops them when the rank is gone."""


class SocketConnection:
    """One rank's end of a socket pair, read and written on the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, frame: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def receive(self) -> list[object]:
        """The messages of the next frame. Raises EOFError or OSError when the rank is gone."""
        header = await self._reader.readexactly(HEADER.size)
        return decode_body(await self._reader.readexactly(frame_length(header)))

    def close(self) -> None:
        self._writer.close()


# Gives the ranks that are to blame.
OnOverdue = Callable[["Issued"], Awaitable[tuple[int, ...]]]


class Issued:
    """One order in the log and what each rank says to it."""

    def __init__(self, entry: Entry, ranks: tuple[int, ...], on_overdue: OnOverdue) -> None:
        self.entry = entry
        self._on_overdue = on_overdue
        loop = asyncio.get_running_loop()
        self._acks: dict[int, asyncio.Future[Result]] = {
            rank: loop.create_future() for rank in ranks
        }

    @property
    def complete(self) -> bool:
        """Whether every rank has answered or is lost."""
        return all(ack.done() for ack in self._acks.values())

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not answered and are not lost."""
        return tuple(rank for rank, ack in self._acks.items() if not ack.done())

    async def ack(self, rank: int, deadline_s: float) -> Result:
        """That rank's result. Raises OrderRejected, or RankLost, also when the deadline passes;
        the ranks it names then are those to blame, which need not be this one."""
        try:
            # Shielded: several callers may wait for the same rank, and one may be cancelled.
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(self._acks[rank])
        except TimeoutError:
            blamed = await self._on_overdue(self)
            answer = self._acks[rank]
            if answer.done() and answer.exception() is None:
                return answer.result()  # it came while the ranks were being asked
            cause = f"no acknowledgement within {deadline_s:g} s"
            raise RankLost(blamed or (rank,), cause) from None

    def settle(self, ack: Ack) -> None:
        waiting = self._acks.get(ack.rank)
        if waiting is None or waiting.done():
            return
        if ack.error is not None:
            self._fail(waiting, OrderRejected(ack.rank, ack.error))
        elif ack.result is not None:
            waiting.set_result(ack.result)

    def lose(self, rank: int, cause: str) -> None:
        if not self._acks[rank].done():
            self._fail(self._acks[rank], RankLost((rank,), cause))

    @staticmethod
    def _fail(waiting: asyncio.Future[Result], error: Exception) -> None:
        waiting.set_exception(error)
        waiting.exception()  # nobody has to wait for it: an unread error is not worth a warning


class OrderLog:
    """Numbers orders, sends them, and matches acknowledgements. Lives on one event loop."""

    def __init__(self, connections: dict[int, RankConnection], on_overdue: OnOverdue) -> None:
        """``on_overdue`` is told an order that missed a deadline, before the waiting caller is."""
        self._connections = connections
        self._ranks = tuple(sorted(connections))
        self._on_overdue = on_overdue
        self._last_index = 0
        self._open: dict[int, Issued] = {}
        self._lost: dict[int, str] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that are gone, with the cause."""
        return dict(self._lost)

    def issue(self, order: Order) -> Issued:
        """Write an order to the log and send it. Ranks lost before count as lost for it too."""
        self._last_index += 1
        issued = Issued(Entry(self._last_index, order), self._ranks, self._on_overdue)
        frame = encode_frame([issued.entry])
        for rank, cause in self._lost.items():
            issued.lose(rank, cause)
        if not issued.complete:
            self._open[self._last_index] = issued
            self._connections[self._ranks[0]].send(frame)
        return issued

    def settle(self, ack: Ack) -> None:
        """Take an acknowledgement that arrived."""
        issued = self._open.get(ack.index)
        if issued is not None:
            issued.settle(ack)
            if issued.complete:
                del self._open[ack.index]

    def lose(self, rank: int, cause: str) -> None:
        """A rank is gone for good: everything it has not acknowledged fails at once."""
        if rank in self._lost:
            return
        self._lost[rank] = cause
        for issued in self._open.values():
            issued.lose(rank, cause)
        self._open = {at: issued for at, issued in self._open.items() if not issued.complete}
