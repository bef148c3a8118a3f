"""The ledger as one object: opened at start, closed at the end."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from app.clock import Clock
from app.ledger.audit import Audit
from app.ledger.browser_sessions import BrowserSessions
from app.ledger.clocks import ClockComparison
from app.ledger.connections import WAIT_S, libpq_options, make_blocking_engine, make_engine
from app.ledger.database import Database, Statements, database_errors
from app.ledger.duties import Duties
from app.ledger.engines import Engines
from app.ledger.errors import LedgerUnavailable
from app.ledger.events import Events
from app.ledger.freezes import Freezes
from app.ledger.kept_states import KeptStates
from app.ledger.leases import Leases
from app.ledger.operations import Operations
from app.ledger.payloads import Payloads
from app.ledger.proofs import Proofs
from app.ledger.pruning import Pruning
from app.ledger.schema import ReleaseSchema, bring_up, check_connection, release_schema
from app.ledger.sealing import Sealing
from app.ledger.stages import Stages
from app.ledger.tables import ledger
from app.ledger.target import LedgerFile, sole_process, target_of
from app.ledger.wakes import Wakes

if TYPE_CHECKING:
    from app.ledger.watch import Watch

_CHECK_S = 3.0


class Ledger:
    """All writes are transactions of their own, and a caller that is cancelled does not cut one
    short: it is carried out to its end, only nobody waits for it.

    Every method may raise LedgerUnavailable. For one event loop.
    """

    identity: str
    """8 hex digits, made with the schema: which ledger a stream's cursor belongs to."""
    engines: Engines
    operations: Operations
    events: Events
    audit: Audit
    leases: Leases
    payloads: Payloads
    stages: Stages
    freezes: Freezes
    pruning: Pruning
    proofs: Proofs
    duties: Duties
    sealing: Sealing
    browser_sessions: BrowserSessions
    kept_states: KeptStates

    def __init__(
        self,
        database: Database,
        wakes: Wakes,
        clock: Clock,
        schema: ReleaseSchema,
        identity: str,
        probe: AsyncEngine,
        comparison: ClockComparison,
    ) -> None:
        """For `open`, which also prepares what has to be given back at the end."""
        self.identity = identity
        self.engines = Engines(database, clock)
        self.operations = Operations(database, clock)
        self.events = Events(database, wakes)
        self.audit = Audit(database)
        self.leases = Leases(database, clock)
        self.payloads = Payloads(database)
        self.stages = Stages(database, clock)
        self.freezes = Freezes(database, clock)
        self.pruning = Pruning(database, clock)
        self.proofs = Proofs(database, clock)
        self.duties = Duties(database, clock)
        self.sealing = Sealing(database, clock)
        self.browser_sessions = BrowserSessions(database, clock)
        self.kept_states = KeptStates(database)
        self._database = database
        self._schema = schema
        self._probe = probe
        self._comparison = comparison
        self._checking: asyncio.Task[None] | None = None
        self._held = AsyncExitStack()

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        clock: Clock,
        migrate: bool = False,
        pool_size: int = 10,
        wait_s: float = WAIT_S,
        poll_interval_s: float = 1.0,
    ) -> Ledger:
        """Open `sqlite+aiosqlite:///path` or `postgresql+psycopg://…`.

        `sqlite:///` and `postgresql://` mean the same drivers. `migrate`: bring the schema to
        this release first. `wait_s`: for a connection of the pool to come free; longer is
        LedgerBusy. `poll_interval_s`: how often subscriptions look for events that
        nobody announced. On SQLite this process becomes the only one that has the file, so all
        leases of earlier processes end here.

        Raises LedgerInUse, SchemaBehind, SchemaAhead, UpgradeBusy, LedgerUnavailable;
        InvalidArgument for another kind of URL.
        """
        target = target_of(url)
        if not migrate:
            target.require()
        async with AsyncExitStack() as held:
            held.enter_context(sole_process(target))
            if migrate:
                await bring_up(target)
            schema = await release_schema()
            engine = make_blocking_engine(target, pool_size=pool_size, pool_timeout_s=wait_s)
            held.push_async_callback(asyncio.to_thread, engine.dispose)
            # Apart, so that it says whether the database answers, and not how busy the pool is.
            probe = make_engine(target, pool_timeout_s=_CHECK_S)
            held.push_async_callback(probe.dispose)
            wakes = Wakes()
            watch: Watch | None = None
            if target.path is None:
                from app.ledger import watch as watching  # psycopg is an extra

                watch = watching.Watch(
                    libpq_options(engine, target),
                    wakes,
                    name=secrets.token_hex(8),
                    poll_interval_s=poll_interval_s,
                )
                held.push_async_callback(watch.stop)

            def tell() -> None:
                wakes.wake()
                if watch is not None:
                    watch.announce()

            file = None if target.path is None else LedgerFile.at(target.path)
            database = Database(engine, on_placed=tell, file=file, wait_s=wait_s)
            held.push_async_callback(database.close)

            comparison = ClockComparison(clock)

            async def look(connection: Statements) -> str:
                await check_connection(connection, schema)
                await comparison.look(connection)
                return str((await connection.execute(select(ledger.c.identity))).scalar_one())

            identity = await database.read(look)
            opened = cls(database, wakes, clock, schema, identity, probe, comparison)
            if watch is not None:
                watch.start()
            else:
                # The file's lock says that their holders are no more.
                await opened.leases.end_all()
                await opened.duties.end_all()
            opened._held = held.pop_all()
            return opened

    async def close(self) -> None:
        """Let running writes end, then give everything back. May be called twice."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        await self._held.aclose()

    async def check(self) -> None:
        """Raises LedgerUnavailable, SchemaBehind or SchemaAhead: not ready. Callers who come at the
        same time share one look, and none waits longer than a few seconds."""
        self._database.check_open()
        self._database.check_file()
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._look())
            # Whoever waited may have left by then.
            self._checking.add_done_callback(lambda done: done.cancelled() or done.exception())
        checking = self._checking
        await asyncio.wait({checking}, timeout=_CHECK_S)
        if not checking.done() or checking.cancelled():
            raise LedgerUnavailable("the ledger's database does not answer")
        checking.result()

    async def _look(self) -> None:
        with database_errors():
            async with self._probe.connect() as connection:
                await check_connection(connection, self._schema)
                await self._comparison.look(connection)
        await self._database.check_writable()

    def pool_in_use(self) -> int:
        """How many pooled connections are out at this moment."""
        return self._database.pool_in_use()
