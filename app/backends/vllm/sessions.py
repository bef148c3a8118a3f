"""The pieces of a weight session between the calls that bring them and the update that uses them.

They live in this process alone. After a restart of the gateway an update that has begun is over, so
that no piece is lost which anything still waits for.
"""

from __future__ import annotations

import asyncio
from collections import deque

from app.backends.port import EngineRefused
from app.backends.vllm.refusals import refused
from app.domain.operation import OperationWarning, Progress
from app.domain.weight_sessions import AbortSession, Chunk, CommitSession, SessionStage, Stage

MOST_WAITING = 16
DEFAULT_LEASE_S = 60.0


class Lapsed(Exception):
    """Nobody has gone on with the session for as long as its lease, or its deadline is over.
    `late`: the latter."""

    def __init__(self, *, late: bool) -> None:
        super().__init__("late" if late else "lease")
        self.late = late


class OpenSession:
    """`taken`: chunks. `called_off`: by its caller, whatever waits before that."""

    def __init__(self, session_id: str, lease_ms: int | None) -> None:
        self._session_id = session_id
        self._lease_s = DEFAULT_LEASE_S if lease_ms is None else lease_ms / 1000
        self._keys: set[str] = set()
        self._waiting: deque[Chunk | CommitSession] = deque()
        self._news = asyncio.Event()
        self._closed = False
        self._touched_at = asyncio.get_running_loop().time()
        self.taken = 0
        self.staged = 0
        self.called_off: AbortSession | None = None

    def take(self, stage: SessionStage, key: str) -> None:
        """Take a call on, once under its key. Raises EngineRefused."""
        if stage.session_id != self._session_id:
            raise not_open()
        self._touched_at = asyncio.get_running_loop().time()
        if key in self._keys:
            return
        if self._closed:
            raise refused("FAILED_PRECONDITION", "SESSION_CLOSED", "it takes nothing more")
        self._add(stage.stage)
        self._keys.add(key)
        self._news.set()

    def _add(self, stage: Stage) -> None:
        match stage:
            case Chunk(index=index):
                if index != self.taken:
                    message = f"chunk {self.taken} is expected"
                    raise refused("FAILED_PRECONDITION", "CHUNK_OUT_OF_ORDER", message)
                if self.taken - self.staged >= MOST_WAITING:
                    message = f"{MOST_WAITING} chunks wait: wait for one of them"
                    raise refused("RESOURCE_EXHAUSTED", "TOO_MANY_CHUNKS", message, retryable=True)
                self.taken += 1
                self._waiting.append(stage)
            case CommitSession():
                self._closed = True
                self._waiting.append(stage)
            case AbortSession():
                self._closed = True
                self.called_off = stage

    def call_off(self, stage: AbortSession) -> None:
        """By somebody else than its caller."""
        self._closed = True
        self.called_off = self.called_off or stage
        self._news.set()

    async def piece(self, left_s: float) -> Chunk | CommitSession | AbortSession:
        """What is to be done next. Raises Lapsed."""
        loop = asyncio.get_running_loop()
        over_at = loop.time() + left_s
        while True:
            if self.called_off is not None:
                return self.called_off
            if self._waiting:
                return self._waiting.popleft()
            self._news.clear()
            ends_at = min(over_at, self._touched_at + self._lease_s)
            if loop.time() >= ends_at:
                self._closed = True
                raise Lapsed(late=ends_at == over_at)
            try:
                async with asyncio.timeout_at(ends_at):
                    await self._news.wait()
            except TimeoutError:
                continue

    def working(self) -> None:
        """What takes time now is the engine, and not the caller."""
        self._touched_at = asyncio.get_running_loop().time()

    def progress(self, phase: str) -> Progress:
        return Progress(phase, self.staged, self.taken, "chunks")


def not_open() -> EngineRefused:
    return refused("NOT_FOUND", "SESSION_NOT_FOUND", "no session of that name is open")


def aborted(session: AbortSession) -> OperationWarning:
    return OperationWarning("SESSION_ABORTED", session.reason or "the caller has called it off")
