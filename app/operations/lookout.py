"""Reading one engine: what it says of itself goes into the ledger, and its silence too."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from app.backends.port import Discovery, EngineSilent, Silence
from app.backends.registry import Backends
from app.backends.telling import Trouble
from app.clock import Clock
from app.domain.engine import Engine, HealthState, Observed
from app.domain.errors import (
    ChadburnError,
    EngineAuthRefused,
    EngineFault,
    EngineReplyMalformed,
    EngineUnreachable,
    UnknownEngine,
    UnsupportedOperation,
)
from app.domain.facts import EXTERNAL, EngineFacts
from app.domain.operation import JsonObject
from app.ledger.ledger import Ledger
from app.ledger.values import Watched

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 3.0
HISTORY_KEPT = timedelta(hours=1)
_OPERATION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class LoadSample:
    """`load`: as `EngineBackend.load` gives it. `at` is UTC."""

    at: datetime
    load: JsonObject


@dataclass(frozen=True, slots=True)
class Reading:
    """One try. Either the engine answered, or `failure` says why there is nothing new."""

    observed: Observed
    discovery: Discovery | None
    failure: ChadburnError | None


class Lookout:
    """One engine. Readings of callers who come at the same time are shared."""

    def __init__(self, engine_id: str, ledger: Ledger, backends: Backends, clock: Clock) -> None:
        self._engine_id = engine_id
        self._ledger = ledger
        self._backends = backends
        self._clock = clock
        self._latest: asyncio.Task[Reading] | None = None
        self._running: set[asyncio.Task[Reading]] = set()
        self._history: deque[LoadSample] = deque()
        self._told_at: datetime | None = None
        self._stored: Engine | None = None
        self._trouble = Trouble(log, f"engine {engine_id}")

    @property
    def told_at(self) -> datetime | None:
        """When the latest reading that is stored was asked for. UTC; None: none yet."""
        return self._told_at

    def known(self, watched: Watched) -> Engine | None:
        """As it was stored here, if that is still what the ledger has."""
        stored = self._stored
        if stored is None or stored.registration.generation != watched.generation:
            return None
        return stored if stored.observed.observed_at == watched.observed_at else None

    @property
    def reading(self) -> bool:
        return bool(self._running)

    def read(self, engine: Engine | None = None, *, anew: bool = False) -> asyncio.Task[Reading]:
        """Not to be cancelled by who waits for it. `engine`: as the ledger has just had it; None:
        look. `anew`: one that begins now, for a caller who knows that something has just changed;
        else one under way is joined."""
        if self._latest is None or self._latest.done() or anew:
            task = asyncio.get_running_loop().create_task(self._read(engine))
            self._running.add(task)
            task.add_done_callback(self._finished)
            self._latest = task
        return self._latest

    async def sample_load(self, watched: Watched) -> None:
        """One entry of the history, if the engine answers."""
        stored = self._stored
        same = stored is not None and stored.registration.generation == watched.generation
        try:
            load = await self.load(READ_TIMEOUT_S, stored if same else None)
        except ChadburnError:
            return
        now = self._clock.now()
        self._history.append(LoadSample(now, load))
        while self._history[0].at < now - HISTORY_KEPT:
            self._history.popleft()

    async def load(self, timeout_s: float, engine: Engine | None = None) -> JsonObject:
        """`engine`: as the ledger has it at this moment; None: look. Raises UnknownEngine,
        EngineUnreachable, EngineFault."""
        engine = engine or await self._registered()
        try:
            return await self._backends.of(engine.registration).load(timeout_s)
        except EngineSilent as silent:
            raise failure_of(silent) from silent

    async def kv_event_sources(self, timeout_s: float) -> tuple[JsonObject, ...]:
        """Raises UnknownEngine, UnsupportedOperation, EngineUnreachable, EngineFault."""
        engine = await self._registered()
        try:
            backend = self._backends.of(engine.registration)
            found = await backend.kv_event_sources(timeout_s)
        except EngineSilent as silent:
            raise failure_of(silent) from silent
        if found is None:
            raise UnsupportedOperation("this engine does not offer cache events")
        return found

    def history(self, since: datetime) -> tuple[LoadSample, ...]:
        return tuple(sample for sample in self._history if sample.at >= since)

    async def stop(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _finished(self, task: asyncio.Task[Reading]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._trouble.seen(logging.INFO, f"it was not read: {task.exception()!r}")

    async def _registered(self) -> Engine:
        engine = await self._ledger.engines.get(self._engine_id)
        if engine is None:
            raise UnknownEngine("there is no engine of that id")
        return engine

    async def _read(self, engine: Engine | None) -> Reading:
        engine = engine or await self._registered()
        # The moment of asking: of two readings the one asked for later is the newer one, however
        # long the answers took.
        asked_at = self._clock.now()
        try:
            found = await self._backends.of(engine.registration).discover(READ_TIMEOUT_S)
        except EngineSilent as silent:
            return await self._keep(silent, asked_at)
        except ChadburnError as refused:
            # The settings no longer allow what is registered.
            self._trouble.seen(logging.ERROR, f"it may not be reached: {refused.message}")
            return await self._keep(EngineSilent(Silence.UNREACHABLE), asked_at)
        facts = await self._attributed(found.facts, engine.observed.facts)
        found = replace(found, facts=replace(facts, observed_at=asked_at))
        self._notice_restart(engine.observed.facts, facts)
        known = engine.observed
        same_life = known.facts is not None and known.facts.instance_id == facts.instance_id
        observed = Observed(
            health=HealthState.DEGRADED if found.troubles else HealthState.SERVING,
            observed_at=asked_at,
            facts=found.facts,
            capabilities=found.capabilities,
            info=found.info or (known.info if same_life else {}),
            models=found.models or (known.models if same_life else ()),
        )
        self._trouble.over()
        if known.health is HealthState.UNREACHABLE:
            log.warning("engine %s is %s: it answers again", self._engine_id, observed.health)
        await self._store(engine, observed, asked_at)
        return Reading(observed, found, None)

    async def _keep(self, silent: EngineSilent, asked_at: datetime) -> Reading:
        """What was known stays known; that it is not confirmed shows in the health."""
        # While this one waited in vain, another reading may have had its answer.
        engine = await self._registered()
        away = silent.reason in (Silence.UNREACHABLE, Silence.DEADLINE)
        health = HealthState.UNREACHABLE if away else HealthState.DEGRADED
        failure = failure_of(silent)
        if health is not engine.observed.health:  # once, and not with each reading
            log.warning("engine %s is %s: %s", self._engine_id, health, failure.message)
        observed = replace(engine.observed, health=health, observed_at=asked_at)
        await self._store(engine, observed, asked_at)
        return Reading(observed, None, failure)

    async def _store(self, engine: Engine, observed: Observed, asked_at: datetime) -> None:
        await self._ledger.engines.observe(self._engine_id, observed)
        self._told_at = asked_at
        self._stored = replace(engine, observed=observed)

    async def _attributed(self, facts: EngineFacts, before: EngineFacts | None) -> EngineFacts:
        """Say who paused it: an operation of this ledger, or somebody else."""
        pause = facts.pause
        if pause is None:
            return facts
        known = None if before is None else before.pause
        if known is not None and (known.epoch, known.since) == (pause.epoch, pause.since):
            return replace(facts, pause=replace(pause, by=known.by))
        by = EXTERNAL
        if _OPERATION_ID.fullmatch(pause.by):
            operation = await self._ledger.operations.get(pause.by)
            if operation is not None and operation.engine_id == self._engine_id:
                by = operation.id
        return replace(facts, pause=replace(pause, by=by))

    def _notice_restart(self, before: EngineFacts | None, now: EngineFacts) -> None:
        if before is not None and before.instance_id != now.instance_id:
            log.warning(
                "engine %s is another process now: %s, before %s",
                self._engine_id,
                now.instance_id,
                before.instance_id,
            )


def failure_of(silent: EngineSilent) -> ChadburnError:
    match silent.reason:
        case Silence.AUTH_REFUSED:
            return EngineAuthRefused("the engine refused the gateway's credential")
        case Silence.MALFORMED:
            return EngineReplyMalformed("the engine's answer can't be read")
        case Silence.REFUSED:
            return EngineFault("the engine refused to answer")
        case _:
            return EngineUnreachable("the engine does not answer")
