"""Weight sessions that are open: what each has been told, and for how long it waits for more.

A session lives in memory. Its keys and what became of its pieces are in the journal; a new life of
the engine has none of the pieces, and ends the operation that they belonged to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import cast

from app.domain.command import fault
from app.domain.commands import UpdateWeights
from app.domain.errors import ChunkOutOfOrder, SessionClosed, TooManyChunks, UnknownSession
from app.domain.operation import OperationWarning, Progress
from app.domain.transitions import CancelRequested, Fact, Progressed, Warned
from app.domain.weight_sessions import (
    AbortSession,
    Chunk,
    CommitSession,
    SessionStage,
    SessionWeights,
)
from app.enginekit.journal import Journal, LiveOperation
from app.enginekit.phases import Interrupts
from app.enginekit.records import FurtherKey

MOST_WAITING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStage:
    """A call that goes on with a session, as it came over the wire. `model` as asked."""

    command: SessionStage
    key: str
    fingerprint: str
    expected_revision: int | None
    model: str | None


class OpenSession:
    """From BEGIN to its end. `accepted` and `staged` count pieces.

    The lease runs from BEGIN, and anew from each call, a repeated one included, until COMMIT is
    accepted. It ends a session also while a piece is being staged: whoever sends it may be gone.
    """

    def __init__(
        self,
        live: LiveOperation,
        command: UpdateWeights,
        journal: Journal,
        interrupts: Interrupts,
        default_lease_ms: int,
    ) -> None:
        self.source = cast("SessionWeights", command.source)
        self.operation_id = live.operation.id
        self.accepted = 0
        self.staged = 0
        self.lapsed = False
        self.commit: CommitSession | None = None
        self._model = command.model
        self._live = live
        self._journal = journal
        self._interrupts = interrupts
        self._lease_s = (self.source.lease_ms or default_lease_ms) / 1000
        self._closed = False
        self._waiting: deque[Chunk] = deque()
        self._news = asyncio.Event()
        self._lease: asyncio.TimerHandle | None = None
        self.heard()

    # ---- the caller's side ----

    def heard(self) -> None:
        """The caller is there: the lease begins anew."""
        if self._lease is not None:
            self._lease.cancel()
        if not self._closed:
            loop = asyncio.get_running_loop()
            self._lease = loop.call_later(self._lease_s, self._lapse)

    async def take(self, order: ReadStage) -> None:
        """Judge a call and write it down. Nobody takes another one meanwhile.

        Raises SessionClosed, ChunkOutOfOrder, TooManyChunks, InvalidArgument, StoreUnavailable.
        """
        if order.model is not None and order.model != self._model:
            raise fault("/model", "is not the model that the session was begun for")
        order.command.check_fits(self.source)
        self.heard()
        operation = self._live.operation
        if self._closed or operation.cancel_requested or operation.done:
            raise self._over()
        further = FurtherKey(order.key, order.fingerprint)
        match order.command.stage:
            case Chunk() as chunk:
                await self._take_chunk(chunk, further)
            case CommitSession() as commit:
                await self._write(Progressed(progress=self.progress("completing")), further)
                self._close()
                self.commit = commit
            case AbortSession(reason=reason):
                said = reason or "the caller has called it off"
                warning = OperationWarning("SESSION_ABORTED", said)
                await self._write(Warned(warning=warning), further)
                self._close()
                await self._journal.record(self._live, lambda _: CancelRequested())
                self._interrupts.cancelled.set()
        self._news.set()

    async def _take_chunk(self, chunk: Chunk, further: FurtherKey) -> None:
        if chunk.index != self.accepted:
            raise ChunkOutOfOrder(
                given=chunk.index, expected=self.accepted, operation_id=self.operation_id
            )
        if self.accepted - self.staged >= MOST_WAITING:
            raise TooManyChunks(
                f"{MOST_WAITING} chunks wait to be staged: wait for one of them",
                operation_id=self.operation_id,
                retry_after_s=1,
            )
        self.accepted += 1
        try:
            await self._write(Progressed(progress=self.progress("receiving")), further)
        except BaseException:
            self.accepted -= 1
            raise
        self._waiting.append(chunk)

    async def _write(self, fact: Fact, further: FurtherKey) -> None:
        if not await self._journal.record(self._live, lambda _: fact, further=further):
            raise self._over()

    def _over(self) -> SessionClosed:
        return SessionClosed("the session takes nothing more", operation_id=self.operation_id)

    def _close(self) -> None:
        self._closed = True
        self.close()

    # ---- the engine's side ----

    async def piece(self, look_again_s: float) -> Chunk | None:
        """The next to be staged, waited for so long. None: there is none yet, or COMMIT has come
        and there will be none."""
        if not self._waiting and self.commit is None:
            self._news.clear()
            try:
                async with asyncio.timeout(look_again_s):
                    await self._news.wait()
            except TimeoutError:
                return None
        return self._waiting.popleft() if self._waiting else None

    def progress(self, phase: str) -> Progress:
        return Progress(phase, self.staged, self.accepted, "chunks")

    def close(self) -> None:
        """The lease is of no more interest."""
        if self._lease is not None:
            self._lease.cancel()

    @property
    def open(self) -> bool:
        return not self._live.operation.done

    def _lapse(self) -> None:
        if not self._closed:
            self.lapsed = self._closed = True
            self._interrupts.cancelled.set()


class Sessions:
    """Those of one engine's life; an update is exclusive, so that there is one at most."""

    def __init__(self) -> None:
        self._open: dict[str, OpenSession] = {}

    def add(self, session: OpenSession) -> None:
        self._open[session.operation_id] = session

    def forget(self, operation_id: str) -> None:
        session = self._open.pop(operation_id, None)
        if session is not None:
            session.close()

    def of_operation(self, operation_id: str) -> OpenSession | None:
        return self._open.get(operation_id)

    def named(self, session_id: str) -> OpenSession:
        """Raises UnknownSession."""
        for session in self._open.values():
            if session.source.session_id == session_id and session.open:
                return session
        raise UnknownSession("no session of that name is open on this engine")
