"""Freezing an engine: for a time it takes no new orders."""

from __future__ import annotations

from datetime import datetime

from app.clock import Clock, rfc3339
from app.domain.engine import Engine
from app.domain.freezes import Freeze, check_window, refusal_of
from app.ledger.ledger import Ledger
from app.operations.auditing import entry_of, refusals_audited
from app.operations.callers import Caller
from app.operations.fleet import Fleet


class Freezes:
    def __init__(self, ledger: Ledger, fleet: Fleet, clock: Clock) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._clock = clock

    async def freeze(self, engine_id: str, reason: str, until: datetime, caller: Caller) -> Engine:
        """Until then, in the place of an earlier freeze. What runs goes on; what was accepted and
        not sent by then ends, unless it overrides freezes.

        Raises UnknownEngine, InvalidArgument (`until` has passed, or is too far ahead).
        """
        async with refusals_audited(
            self._ledger, self._clock, "freeze_engine", caller, engine_id=engine_id
        ):
            now = self._clock.now()
            check_window(until, now)
            assert caller.actor is not None, "nobody freezes an engine without a token"
            freeze = Freeze(reason=reason, until=until, by=caller.actor, since=now)
            entry = entry_of(
                now,
                "freeze_engine",
                "accepted",
                caller,
                engine_id=engine_id,
                detail={"until": rfc3339(until)},
            )
            await self._ledger.freezes.put(engine_id, freeze, entry)
        return await self._fleet.engine(engine_id)

    async def thaw(self, engine_id: str, caller: Caller) -> None:
        """Orders are taken again. Nothing happens where no freeze is in force. Raises
        UnknownEngine."""
        async with refusals_audited(
            self._ledger, self._clock, "thaw_engine", caller, engine_id=engine_id
        ):
            entry = entry_of(
                self._clock.now(), "thaw_engine", "accepted", caller, engine_id=engine_id
            )
            await self._ledger.freezes.lift(engine_id, entry)


def require_thawed(engine: Engine, now: datetime, *, override: bool) -> None:
    """Raises EngineFrozen. The ledger looks once more when it writes."""
    if engine.freeze is not None and not override:
        raise refusal_of(engine.freeze, now)
