"""An order before it is sent: it waits for its turn and for its engine, and is judged once more if
it had to wait for others."""

from __future__ import annotations

import logging
from datetime import timedelta

from app.backends.port import Discovery, EngineBackend, EngineSilent
from app.backends.telling import Trouble
from app.clock import Clock
from app.domain.commands import check_revision, command_of
from app.domain.engine import Engine
from app.domain.errors import ChadburnError, EngineBusy, EngineFault, EngineFrozen, UnknownEngine
from app.domain.kinds import OperationState
from app.domain.operation import Operation
from app.domain.transitions import Dispatched
from app.operations.attention import Attention
from app.operations.fleet import FRESH_FOR, Fleet
from app.operations.logbook import Logbook
from app.operations.pace import Pace
from app.operations.unsent import not_sent, too_late

log = logging.getLogger(__name__)

_NO_TIME = timedelta()
_OTHERS = "its deadline was over while it waited for other orders"
_ENGINE = "the engine could not be reached in time"
_SENDING = "its deadline was over before it was sent"


class SettingOut:
    """An order that is queued stays so until it is sent. Whoever drives the engine says when it
    may be its turn; whether it is, the ledger decides in the write that gives it the slot."""

    def __init__(
        self, logbook: Logbook, fleet: Fleet, clock: Clock, pace: Pace, attention: Attention
    ) -> None:
        self._log = logbook
        self._trouble = Trouble(log, f"operation {logbook.operation.id}")
        self._fleet = fleet
        self._clock = clock
        self._pace = pace
        self._attention = attention
        self._called = False

    def call_up(self) -> None:
        """Nobody seems to be before it any more."""
        if not self._called:  # else it has been told, and may be waiting for its engine
            self._called = True
            self._attention.call()

    async def run(self) -> EngineBackend | None:
        """Write down that it is sent, when it can be. None: it has ended instead. Raises LetGo."""
        attempt = 0
        while not self._operation.done:
            if self._left() <= _NO_TIME:
                await self._log.take(too_late(_OTHERS if self._waits_for_others else _ENGINE))
                return None
            if self._waits_for_others:
                # Also looked at without a call: the deadline is a time of day, which may be set.
                left_s = self._left().total_seconds()
                await self._attention.wait(min(left_s, self._pace.sweep_s))
                continue
            try:
                engine = await self._fleet.engine(self._operation.engine_id)
                backend = self._fleet.backend_of(engine)
                instance_id = await self._instance_id(engine)
            except _Unfit as unfit:
                await self._log.take(not_sent(unfit.error))
                return None
            except (EngineFault, UnknownEngine) as useless:
                await self._log.take(not_sent(useless))
                return None
            except (ChadburnError, EngineSilent) as away:
                # Not sent, so nothing is lost by waiting; it can be cancelled meanwhile.
                self._trouble.seen(logging.INFO, f"it waits: {away}", "waits")
                attempt += 1
                await self._attention.pause(attempt)
                continue
            try:
                if await self._log.take(Dispatched(instance_id=instance_id)) is not None:
                    return None
            except EngineBusy:
                self._called = False
                continue
            except EngineFrozen as refused:
                await self._log.take(not_sent(refused))
                return None
            # Writing may have taken long. Nothing is sent after the deadline.
            if self._left() <= _NO_TIME:
                await self._log.take(too_late(_SENDING))
                return None
            return backend
        return None

    @property
    def _operation(self) -> Operation:
        return self._log.operation

    @property
    def _is_queued(self) -> bool:
        return self._operation.state is OperationState.QUEUED

    @property
    def _waits_for_others(self) -> bool:
        return self._is_queued and not self._called

    def _left(self) -> timedelta:
        deadline_at = self._operation.deadline_at
        return timedelta.max if deadline_at is None else deadline_at - self._clock.now()

    async def _instance_id(self, engine: Engine) -> str:
        """Which process of the engine answers now. One that was queued is judged by what the engine
        says at this moment: those before it have changed what it was judged by. Raises _Unfit."""
        if self._is_queued:
            discovery = await self._fleet.discover(engine.id)
            self._judge(discovery)
            return discovery.facts.instance_id
        facts = engine.observed.facts
        if facts is None or abs(self._clock.now() - facts.observed_at) > FRESH_FOR:
            facts = (await self._fleet.discover(engine.id)).facts
        return facts.instance_id

    def _judge(self, discovery: Discovery) -> None:
        operation = self._operation
        command = command_of(operation.kind, operation.request)
        try:
            command.check_supported(discovery.capabilities)
            check_revision(operation.expected_revision, discovery.facts)
            command.check_state(discovery.facts)
        except ChadburnError as error:
            raise _Unfit(error) from error


class _Unfit(Exception):
    """The engine is no longer as the order wants it. Apart from what may go wrong in asking."""

    def __init__(self, error: ChadburnError) -> None:
        super().__init__(error.reason)
        self.error = error
