"""One engine among replicas, what befalls it, and the history of it all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psycopg

from app.clock import SystemClock
from app.ledger import Ledger
from app.ledger.chain import verify
from tests.e2e.driving import Json
from tests.robustness.check import hold
from tests.robustness.clients import Clients
from tests.robustness.fault_proxy import FaultProxy, fault_proxy
from tests.robustness.final_ledger import write_ledger
from tests.robustness.held_engine import HeldEngineProcess
from tests.robustness.history import (
    Answered,
    Carried,
    Delivered,
    Entry,
    History,
    LedgerEvent,
    LedgerOperation,
    Recorder,
    Struck,
)
from tests.robustness.replicas import FLUSH, PRINCIPAL, Replica, Replicas, until

Order = tuple[str, str, Json]
"""Verb, kind, body."""


class _OfOneEngine(Recorder):
    """Others on the same ledger have histories of their own."""

    engine = ""

    def write(self, entry: Entry) -> None:
        foreign = isinstance(entry, LedgerOperation | LedgerEvent) and entry.engine != self.engine
        if not foreign:
            super().write(entry)


@dataclass
class Stand:
    """`clients`: of all gateways, which go on until they are answered."""

    fleet: Replicas
    recorder: Recorder
    engine: HeldEngineProcess
    proxy: FaultProxy
    clients: Clients
    chance: Random

    @property
    def name(self) -> str:
        return self.engine.name

    def carried(self, operation: Json) -> list[str]:
        """What the engine did for it, in order."""
        entries = self.recorder.read().all(Carried)
        return [each.phase for each in entries if each.key == operation["id"]]

    async def begun(self, at: Replica) -> tuple[Json, Replica]:
        """An order that the engine has begun and does not go on with, and who drives it."""
        self.engine.hold()
        operation = await at.gateway.accepted(self.name, *FLUSH)
        await until(lambda: self.carried(operation))
        return operation, await self.fleet.held(self.name)

    def struck(self, process: str, what: str) -> None:
        self.recorder.write(Struck(process=process, what=what))

    # ---- traffic ----

    async def under_traffic(
        self, orders: Sequence[Order], rounds: int, callers: int, pause_s: float
    ) -> None:
        """Each caller gives so many orders at whatever gateway, one after the other, and follows
        each that is taken to its end, elsewhere; beside them somebody hears everything. Returns
        when all that was ordered has ended and everybody has heard so."""
        heard = 0

        def on_event(told: Delivered) -> None:
            nonlocal heard
            heard = told.position

        self.clients.urls = [each.gateway.url for each in self.fleet.all]
        everything = asyncio.create_task(
            self.clients.hear("everything", engines=[self.name], on_event=on_event)
        )
        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(self._orders(orders, rounds, pause_s))
        last = await self._last_position()
        await until(lambda: heard >= last or everything.done())
        assert not everything.done(), everything
        everything.cancel()
        await asyncio.gather(everything, return_exceptions=True)

    async def _orders(self, orders: Sequence[Order], rounds: int, pause_s: float) -> None:
        for _ in range(rounds):
            await asyncio.sleep(self.chance.uniform(0.0, pause_s))
            verb, kind, body = self.chance.choice(orders)
            # The same principal gives orders to other engines on this ledger.
            key = f"{self.name}-{self.clients.name('key')}"
            name = await self.clients.order(self.name, verb, body, kind=kind, key=key)
            if name is None:
                continue
            async with asyncio.TaskGroup() as group:
                group.create_task(self.clients.ended(name))
                group.create_task(self.clients.hear(f"of-{name}", operation=name))

    async def _last_position(self) -> int:
        """Of the last event of this engine, when the database is there to say so."""
        query = "SELECT max(position) FROM events WHERE engine_id = %s"
        while True:
            try:
                with self.fleet.connection() as connection:
                    found = connection.execute(query, (self.name,)).fetchone()
            except psycopg.OperationalError:
                await asyncio.sleep(0.1)
            else:
                return int(found[0] or 0) if found else 0

    async def holds(self) -> History:
        """Every named guarantee, by what was written down."""
        ledger = await Ledger.open(self.fleet.database_url, clock=SystemClock())
        try:
            await write_ledger(self.recorder, ledger)
        finally:
            await ledger.close()
        assert (await verify(self.fleet.database_url)).broken is None, "the audit's chain"
        assert self.clients.trouble == []
        return hold(self.recorder.path)


def taken(history: History) -> set[str]:
    return {each.operation for each in history.all(Answered) if each.operation is not None}


@asynccontextmanager
async def stand(
    fleet: Replicas, path: Path, name: str, seed: int, *, delay_s: float = 0.0
) -> AsyncIterator[Stand]:
    """An engine of its own behind a proxy, registered under that name. `path`: of the history."""
    # Sent in time, an order may have to wait for this machine's attention.
    recorder = _OfOneEngine.begin(path, seed, transit_s=3.0, engine=name)
    assert isinstance(recorder, _OfOneEngine)
    recorder.engine = name
    chance = Random(seed)
    clients = Clients([], fleet.token, PRINCIPAL, recorder, Random(chance.random()))
    engine = HeldEngineProcess(fleet.folder / name, path, name, seed, delay_s)
    async with AsyncExitStack() as held:
        held.callback(recorder.close)
        held.callback(engine.process.clean)
        await held.enter_async_context(clients.connected())
        await asyncio.to_thread(engine.start)
        proxy = await held.enter_async_context(fault_proxy(engine.address, seed))
        await fleet.register(proxy.address, name)
        yield Stand(fleet, recorder, engine, proxy, clients, chance)
