"""The calls that go on with a weight session, on their way to the engine, one after the other.

Each has a key of its own, made from the operation's id and its number, so that it may be sent as
often as it takes: the engine takes it on once, and after a restart of the gateway all of them are
sent again rather than guessed at. What becomes of it is told on the stream of the
operation, which somebody else reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import cast

from app.backends.port import EngineRefused, EngineSilent
from app.backends.telling import Trouble
from app.domain.errors import ChadburnError
from app.domain.kinds import OperationKind
from app.domain.operation import JsonObject, Operation, OperationWarning
from app.domain.transitions import Warned
from app.domain.weight_sessions import AbortSession, Chunk, CommitSession, SessionStage
from app.ledger.stages import StoredStage
from app.operations.backoff import Backoff
from app.operations.fleet import Fleet
from app.operations.logbook import Logbook
from app.operations.pace import Pace

log = logging.getLogger(__name__)

_AT_ONCE = 16
_LOOK_S = 1.0
_OVER = frozenset({"SESSION_NOT_FOUND", "SESSION_CLOSED"})


def session_id_of(operation: Operation) -> str | None:
    """None: it is ordered by one call."""
    if operation.kind is not OperationKind.UPDATE_WEIGHTS:
        return None
    session = cast("JsonObject", operation.request["source"]).get("session")
    return None if session is None else cast("str", cast("JsonObject", session)["session_id"])


class StageSender:
    def __init__(
        self, session_id: str, logbook: Logbook, fleet: Fleet, pace: Pace, backoff: Backoff
    ) -> None:
        self._session_id = session_id
        self._log = logbook
        self._fleet = fleet
        self._pace = pace
        self._backoff = backoff
        self._sent = 0
        self._news = asyncio.Event()

    def wake(self) -> None:
        """There may be more to send."""
        self._news.set()

    async def run(self) -> None:
        """Until the session is closed or the operation has ended. Raises LetGo."""
        while not self._ended():
            self._news.clear()
            stages = await self._log.stages(self._sent, _AT_ONCE)
            for stage in stages:
                if not await self._send(stage):
                    return
                self._sent = stage.number
                if isinstance(stage.stage, CommitSession | AbortSession):
                    return
            if not stages:
                # Another gateway may have taken one on, which nobody tells here.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._news.wait()

    async def _send(self, stage: StoredStage) -> bool:
        """Whether to go on."""
        refusal = await self._taken_on(stage, str(stage.number))
        if refusal is None:
            return True
        if refusal.error.reason not in _OVER:
            what = stage.stage.name
            if isinstance(stage.stage, Chunk):
                what += f" {stage.stage.index}"
            said = f"{what}: {refusal.error.message} ({refusal.error.reason})"
            await self._log.take(Warned(warning=OperationWarning("STAGE_REFUSED", said)))
            # Without it the session can't become what its caller has ordered.
            given_up = AbortSession("a call that goes on with the session was refused")
            await self._taken_on(StoredStage(stage.number, given_up), "given-up")
        return False

    async def _taken_on(self, stage: StoredStage, suffix: str) -> EngineRefused | None:
        """Sent until the engine has said one or the other, or the operation has ended."""
        operation = self._log.operation
        attempt = 0
        trouble = Trouble(log, f"operation {operation.id}")
        while not self._ended():
            try:
                backend = await self._fleet.backend(operation.engine_id)
                await backend.go_on(
                    SessionStage(self._session_id, stage.stage),
                    f"{operation.id}.{suffix}",
                    stage.expected_revision,
                    self._pace.stage_timeout_s,
                )
            except EngineRefused as refused:
                if not refused.error.retryable:
                    return refused
                trouble.seen(logging.INFO, f"a stage has to wait: {refused}", "refused")
            except (EngineSilent, ChadburnError) as silent:
                trouble.seen(logging.INFO, f"a stage is not sent yet: {silent}", "silent")
            else:
                return None
            attempt += 1
            await asyncio.sleep(self._backoff.pause_s(attempt))
        return None

    def _ended(self) -> bool:
        return self._log.operation.done
