"""The engines: registered, read, and watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime, timedelta

from app.backends.port import Discovery, EngineBackend
from app.backends.registry import Backends
from app.clock import Clock
from app.domain.engine import Engine, Registration
from app.domain.errors import ChadburnError, UnknownEngine
from app.domain.operation import JsonObject
from app.ledger.ledger import Ledger
from app.ledger.values import Watched
from app.operations.auditing import entry_of, refusals_audited
from app.operations.callers import Caller
from app.operations.lookout import READ_TIMEOUT_S, LoadSample, Lookout, Reading
from app.operations.registering import EngineChange, EngineDraft, check_id, check_labels
from app.operations.watching import BUSY_S, Rounds

log = logging.getLogger(__name__)

FRESH_FOR = timedelta(seconds=2)
REFRESH_WAIT_S = 0.3

Judge = Callable[[], Awaitable[None]]
"""Raises what speaks against a change of the register that is sound in itself."""


class Fleet:
    def __init__(
        self,
        ledger: Ledger,
        backends: Backends,
        clock: Clock,
        *,
        observe_interval_s: float = 5.0,
    ) -> None:
        self._ledger = ledger
        self._backends = backends
        self._clock = clock
        self._interval_s = observe_interval_s
        self._lookouts: dict[str, Lookout] = {}
        self._watching: asyncio.Task[None] | None = None
        self._samples: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to watch every registered engine."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """End the watching and give back the connections. May be called twice."""
        watching, self._watching = self._watching, None
        tasks = [task for task in (watching, *self._samples) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(lookout.stop() for lookout in self._lookouts.values()))
        await self._backends.close()

    # ---- the register ----

    async def register(
        self,
        draft: EngineDraft,
        caller: Caller,
        *,
        back_from: tuple[str, str] | None = None,
        judge: Judge | None = None,
    ) -> Engine:
        """`back_from`: as the ledger's register takes it. `judge`: has the last word.

        Raises InvalidArgument (id, labels, members, address out of reach, credential),
        UnsupportedDialect, EngineExists."""
        async with self._audited("register_engine", caller, draft.id):
            check_id(draft.id)
            check_labels(draft.labels)
            self._backends.check(draft.dialect, draft.members, draft.tls)
            if judge is not None:
                await judge()
            now = self._clock.now()
            registration = Registration(
                id=draft.id,
                dialect=draft.dialect,
                members=draft.members,
                tls=draft.tls,
                labels=dict(draft.labels),
                created_at=now,
                updated_at=now,
            )
            entry = entry_of(now, "register_engine", "accepted", caller, engine_id=draft.id)
            engine = await self._ledger.engines.register(registration, entry, back_from=back_from)
        self._lookout(draft.id).read(anew=True)
        return engine

    async def change(
        self,
        engine_id: str,
        change: EngineChange,
        expected_generation: int,
        caller: Caller,
        *,
        judge: Judge | None = None,
    ) -> Engine:
        """Raises UnknownEngine, GenerationMismatch, and InvalidArgument as `register`."""
        async with self._audited("change_engine", caller, engine_id):
            known = (await self.engine(engine_id)).registration
            now = self._clock.now()
            changed = replace(
                known,
                members=known.members if change.members is None else change.members,
                tls=known.tls if change.tls is None else change.tls,
                labels=known.labels if change.labels is None else dict(change.labels),
                updated_at=now,
            )
            check_labels(changed.labels)
            self._backends.check(changed.dialect, changed.members, changed.tls)
            if judge is not None:
                await judge()
            entry = entry_of(now, "change_engine", "accepted", caller, engine_id=engine_id)
            engine = await self._ledger.engines.change(changed, expected_generation, entry)
        self._lookout(engine_id).read(anew=True)
        return engine

    async def remove(self, engine_id: str, expected_generation: int, caller: Caller) -> None:
        """Raises UnknownEngine, GenerationMismatch, EngineHasOpenOperation."""
        async with self._audited("remove_engine", caller, engine_id):
            now = self._clock.now()
            entry = entry_of(now, "remove_engine", "accepted", caller, engine_id=engine_id)
            await self._ledger.engines.remove(engine_id, expected_generation, entry)
        self._forget(engine_id)

    # ---- what is known ----

    async def engine(self, engine_id: str) -> Engine:
        """As last known, without a call to the engine. Raises UnknownEngine."""
        engine = await self._ledger.engines.get(engine_id)
        if engine is None:
            raise UnknownEngine("there is no engine of that id")
        return engine

    async def fresh(self, engine_id: str) -> Engine:
        """Facts older than 2 s are read again first, for 300 ms at most; else as known.

        Raises UnknownEngine, and nothing about the engine: that shows in its health.
        """
        return await self.refreshed(await self.engine(engine_id))

    async def refreshed(self, engine: Engine) -> Engine:
        """The same for one that has just been read from the ledger."""
        if self.knows_well(engine):
            return engine
        engine_id = engine.id
        lookout = self._lookout(engine_id)
        if self._is_young(lookout.told_at):
            # Another reading has ended while this caller looked at what was stored before.
            return await self.engine(engine_id)
        reading = await _within(lookout.read(), REFRESH_WAIT_S)
        return engine if reading is None else replace(engine, observed=reading.observed)

    def knows_well(self, engine: Engine) -> bool:
        """Whether an order can be judged by these facts: they are young, and none that are younger
        have been stored here since."""
        at, lookout = engine.observed.observed_at, self._lookouts.get(engine.id)
        told_at = None if lookout is None else lookout.told_at
        return self._is_young(at) and (told_at is None or at is None or at >= told_at)

    def _is_young(self, at: datetime | None) -> bool:
        return at is not None and abs(self._clock.now() - at) <= FRESH_FOR

    async def look(self, engine_id: str, timeout_s: float) -> None:
        """Read the engine now whatever the age of the facts, if it answers in time."""
        await _within(self._lookout(engine_id).read(anew=True), timeout_s)

    async def reread(self, engine_id: str, timeout_s: float) -> Engine:
        """The same, and how it stands then; as known if it does not answer in time. Raises
        UnknownEngine."""
        await self.look(engine_id, timeout_s)
        return await self.engine(engine_id)

    async def discover(self, engine_id: str) -> Discovery:
        """A round trip. Raises UnknownEngine, EngineUnreachable, EngineFault."""
        await self.engine(engine_id)
        reading = await asyncio.shield(self._lookout(engine_id).read(anew=True))
        if reading.discovery is None:
            assert reading.failure is not None
            raise reading.failure
        return reading.discovery

    async def load(self, engine_id: str) -> JsonObject:
        """A round trip. Raises UnknownEngine, EngineUnreachable, EngineFault."""
        return await self.load_of(await self.engine(engine_id))

    async def load_of(self, engine: Engine) -> JsonObject:
        """The same of one that has just been read from the ledger."""
        return await self._lookout(engine.id).load(READ_TIMEOUT_S, engine)

    async def kv_event_sources(self, engine_id: str) -> tuple[JsonObject, ...]:
        """A round trip. Raises UnknownEngine, UnsupportedOperation, EngineUnreachable,
        EngineFault."""
        await self.engine(engine_id)
        return await self._lookout(engine_id).kv_event_sources(READ_TIMEOUT_S)

    async def load_history(self, engine_id: str, since: datetime) -> tuple[LoadSample, ...]:
        """What this process saw in the last hour, oldest first. Raises UnknownEngine."""
        await self.engine(engine_id)
        return self._lookout(engine_id).history(since)

    async def backend(self, engine_id: str) -> EngineBackend:
        """The way to the engine as it is registered now. Raises UnknownEngine, and what
        `Backends.of` raises."""
        return self.backend_of(await self.engine(engine_id))

    def backend_of(self, engine: Engine) -> EngineBackend:
        """The same for one that has just been read from the ledger."""
        return self._backends.of(engine.registration)

    # ---- watching ----

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        rounds = Rounds(self._interval_s)
        while True:
            began = loop.time()
            try:
                await self._look_at_all(rounds)
            except Exception:
                # Whatever it is, engines must not go unwatched for it.
                log.exception("the engines could not be looked at")
            await asyncio.sleep(began + rounds.look_s - loop.time())

    async def _look_at_all(self, rounds: Rounds) -> None:
        """One after the other: all at once, orders would stand in line behind their readings."""
        loop = asyncio.get_running_loop()
        before = set(self._lookouts)  # What is registered meanwhile may be missing in the answer.
        fleet = await self._ledger.engines.watched()
        for engine_id in before - {each.engine_id for each in fleet}:
            self._forget(engine_id)
        began = loop.time()
        told = {name for name, each in self._lookouts.items() if each.told_at is not None}
        chosen = rounds.due(fleet, began, told)
        for place, (each, in_turn) in enumerate(chosen):
            ahead_s = began + rounds.look_s * place / len(chosen) - loop.time()
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)
            self._look_at(each, in_turn=in_turn)

    def _look_at(self, watched: Watched, *, in_turn: bool) -> None:
        """`in_turn`: also ask for its load."""
        lookout = self._lookout(watched.engine_id)
        tried_at = watched.observed_at
        if lookout.told_at is not None and (tried_at is None or lookout.told_at > tried_at):
            tried_at = lookout.told_at  # since the fleet was looked at
        # Another gateway on the same ledger may just have looked.
        half = timedelta(seconds=(BUSY_S if watched.busy else self._interval_s) / 2)
        if not lookout.reading and (tried_at is None or self._clock.now() - tried_at > half):
            lookout.read(lookout.known(watched))
        if not in_turn:
            return
        sample = asyncio.get_running_loop().create_task(lookout.sample_load(watched))
        self._samples.add(sample)
        sample.add_done_callback(self._samples.discard)

    def _lookout(self, engine_id: str) -> Lookout:
        lookout = self._lookouts.get(engine_id)
        if lookout is None:
            lookout = Lookout(engine_id, self._ledger, self._backends, self._clock)
            self._lookouts[engine_id] = lookout
        return lookout

    def _forget(self, engine_id: str) -> None:
        self._lookouts.pop(engine_id, None)
        self._backends.forget(engine_id)

    def _audited(
        self, action: str, caller: Caller, engine_id: str
    ) -> AbstractAsyncContextManager[None]:
        return refusals_audited(self._ledger, self._clock, action, caller, engine_id=engine_id)


async def _within(task: asyncio.Task[Reading], timeout_s: float) -> Reading | None:
    """Its result, if there is one in time. It goes on either way, for the next caller."""
    await asyncio.wait({task}, timeout=timeout_s)
    if not task.done() or task.cancelled():
        return None
    try:
        return task.result()
    except ChadburnError:
        return None
