"""Bringing the register to what a source lists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from app.clock import Clock
from app.discovery.plan import (
    LABEL,
    Change,
    LeaveAlone,
    Register,
    Remove,
    Step,
    planned,
)
from app.discovery.source import Source
from app.domain.engine import Registration
from app.domain.errors import ChadburnError, GenerationMismatch, UnknownEngine
from app.domain.operation import Actor
from app.ledger.errors import LedgerUnavailable
from app.ledger.ledger import Ledger
from app.ledger.values import AuditEntry, Duty, EngineFilter
from app.observability.log import logger
from app.operations.callers import Caller
from app.operations.fleet import Fleet

ISSUER = "urn:chadburn:discovery"
_CLIENT = "discovery"
_PAGE = 500
_FAULTS_AT_MOST = 10
_log = logger("chadburn.discovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """`tick_s`: between two looks at what there is to do. `whole_s`: how long the register may
    differ from the list by somebody else's doing; reading all of it every two seconds would cost
    more than watching the engines. `duty_s`: how long the work stays with a gateway
    that says nothing any more. `again_s`: until an engine that was refused is tried again, since
    each refusal is written down."""

    tick_s: float = 2.0
    whole_s: float = 30.0
    duty_s: float = 15.0
    again_s: float = 300.0


@dataclass(slots=True)
class _Refused:
    step: Step
    why: str
    again_at: datetime


@dataclass(slots=True)
class _Memory:
    """Of what one gateway saw while it did the work."""

    missing_since: dict[str, datetime] = field(default_factory=dict)
    refused: dict[str, _Refused] = field(default_factory=dict)
    whole_at: datetime | None = None


class Follower:
    """One source's, in one gateway. Of all gateways on the ledger one at a time does the work, so
    that two whose lists differ for a while, as when a new one is rolled out, do not undo each
    other's. What is registered is changed only as it was looked at: by its generation.

    `remove_after_s`: how long an engine has to be missing from the list. `on_state`: is told how
    much could not be followed, whenever that changes.
    """

    def __init__(
        self,
        source: Source,
        ledger: Ledger,
        fleet: Fleet,
        clock: Clock,
        *,
        owner: str,
        remove_after_s: float = 0.0,
        rhythm: Rhythm = Rhythm(),
        on_state: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        self.source = source
        self.problems: tuple[str, ...] = ()
        """Of single engines, as this gateway last saw them: what could not be done, and why."""
        self._ledger = ledger
        self._fleet = fleet
        self._clock = clock
        self._owner = owner
        self._remove_after = timedelta(seconds=remove_after_s)
        self._rhythm = rhythm
        self._on_state = on_state
        self._caller = Caller(
            actor=Actor(ISSUER, f"discovery:{source.name}", _CLIENT),
            note=f"listed by discovery:{source.name}",
        )
        self._duty: Duty | None = None
        self._asked_at: datetime | None = None
        self._memory = _Memory()
        self._changed = asyncio.Event()
        self._told: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """What the source says now is what is followed."""
        return not self.source.faults

    async def run(self) -> None:
        """For ever. Nothing that befalls it ends it."""
        following = asyncio.create_task(self._follow())
        try:
            while True:
                try:
                    await self.round()
                except Exception as failed:
                    self._memory.whole_at = None
                    _log.warning("discovery_interrupted", source=self.source.name, exc_info=failed)
                self._changed.clear()
                try:
                    async with asyncio.timeout(self._rhythm.tick_s):
                        await self._changed.wait()
                    self._memory.whole_at = None
                except TimeoutError:
                    pass
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def stop(self) -> None:
        """Another gateway does it from now on. May raise nothing of the ledger's: the duty's time
        is up soon anyway."""
        if self._duty is None:
            return
        try:
            await self._ledger.duties.give_back(self._duty)
        except ChadburnError as failed:
            _log.warning("discovery_not_given_back", source=self.source.name, exc_info=failed)
        self._duty = None

    async def round(self) -> None:
        """Look once at what there is to do, and do it if this gateway is the one that does."""
        await self._tell_faults()
        listed = self.source.listed
        if listed is None or not await self._has_duty():
            self._say(())
            return
        memory, now = self._memory, self._clock.now()
        whole = timedelta(seconds=self._rhythm.whole_s)
        if memory.whole_at is not None and now - memory.whole_at < whole:
            return
        steps = planned(self.source.name, listed, await self._registered())
        outstanding = False
        problems = [f"{name}: {why}" for name, why in sorted(self.source.remarks.items())]
        here = {step.engine_id for step in steps if isinstance(step, Remove)}
        memory.missing_since = {
            one: since for one, since in memory.missing_since.items() if one in here
        }
        memory.refused = {
            one: refused
            for one, refused in memory.refused.items()
            if refused.step in steps and refused.again_at > now
        }
        for step in steps:
            if not await self._has_duty():
                return  # it took so long that another gateway has gone on
            problem, done = await self._taken(step, now)
            outstanding = outstanding or not done
            if problem is not None:
                problems.append(problem)
        memory.whole_at = None if outstanding else now
        self._say(tuple(problems))

    # ---- one step ----

    async def _taken(self, step: Step, now: datetime) -> tuple[str | None, bool]:
        """What is wrong with it, if anything, and whether it needs no look before the next whole
        one."""
        if isinstance(step, LeaveAlone):
            return f"{step.engine_id}: {step.why}", True
        engine_id = step.draft.id if isinstance(step, Register) else step.engine_id
        refused = self._memory.refused.get(engine_id)
        if refused is not None:
            return refused.why, True
        if isinstance(step, Remove):
            since = self._memory.missing_since.setdefault(engine_id, now)
            if now - since < self._remove_after:
                return None, False
            if await self._ledger.operations.open_ones(engine_id):
                # Asked first, since the door would write down each refusal.
                return f"{engine_id}: is gone, and stays until its last operation has ended", False
        try:
            await self._do(step)
        except (GenerationMismatch, UnknownEngine):
            return None, False  # somebody else was at it; looked at again
        except LedgerUnavailable:
            raise
        except ChadburnError as error:
            why = f"{engine_id}: {error.reason}: {error.message}"
            again = now + timedelta(seconds=self._rhythm.again_s)
            self._memory.refused[engine_id] = _Refused(step, why, again)
            return why, True
        self._memory.missing_since.pop(engine_id, None)
        return None, True

    async def _do(self, step: Register | Change | Remove) -> None:
        if isinstance(step, Register):
            await self._fleet.register(
                step.draft, self._caller, back_from=(LABEL, self.source.name)
            )
        elif isinstance(step, Change):
            await self._fleet.change(step.engine_id, step.change, step.generation, self._caller)
        else:
            await self._fleet.remove(step.engine_id, step.generation, self._caller)

    async def _registered(self) -> tuple[Registration, ...]:
        found: list[Registration] = []
        after: str | None = None
        while True:
            page = await self._ledger.engines.page(EngineFilter(), after, _PAGE)
            found.extend(engine.registration for engine in page.items)
            if page.next is None:
                return tuple(found)
            after = str(page.next)

    # ---- who does it ----

    async def _has_duty(self) -> bool:
        """Asked of the ledger three times in the duty's time, be it had or not."""
        now = self._clock.now()
        between = timedelta(seconds=self._rhythm.duty_s / 3)
        if self._asked_at is not None and timedelta() <= now - self._asked_at < between:
            return self._duty is not None
        had, duties = self._duty, self._ledger.duties
        self._duty = None  # also if the ledger does not answer
        if had is not None:
            self._duty = await duties.keep(had, self._rhythm.duty_s)
        if self._duty is None:
            name = f"discovery:{self.source.name}"
            self._duty = await duties.take(name, self._owner, self._rhythm.duty_s)
            self._memory = _Memory()
        self._asked_at = now
        return self._duty is not None

    # ---- saying it ----

    async def _follow(self) -> None:
        while True:
            try:
                await self.source.follow(self._changed.set)
            except Exception as failed:
                _log.error("discovery_source_broken", source=self.source.name, exc_info=failed)
            await asyncio.sleep(self._rhythm.tick_s)

    def _say(self, problems: tuple[str, ...]) -> None:
        if problems != self.problems:
            for problem in problems:
                if problem not in self.problems:
                    _log.warning("discovery_problem", source=self.source.name, why=problem)
        self.problems = problems
        self._on_state(self.source.name, len(problems) + len(self.source.faults))

    async def _tell_faults(self) -> None:
        """A list that is refused is written down once, and so is the next one that is taken."""
        faults = self.source.faults
        if faults == self._told:
            return
        if faults:
            _log.error("discovery_refused", source=self.source.name, faults=_some(faults))
        else:
            _log.warning("discovery_taken_again", source=self.source.name)
        detail: dict[str, Any] = {"source": self.source.name, "gateway": self._owner}
        if faults:
            detail["faults"] = _some(faults)
        entry = AuditEntry(
            at=self._clock.now(),
            action="load_engine_list",
            outcome="refused" if faults else "accepted",
            actor=self._caller.actor,
            reason="ENGINE_LIST_REFUSED" if faults else None,
            detail=detail,
        )
        await self._ledger.audit.append(entry)
        self._told = faults


def _some(faults: Iterable[str]) -> list[str]:
    return list(faults)[:_FAULTS_AT_MOST]
