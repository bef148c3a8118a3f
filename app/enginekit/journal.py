"""The store as the event loop sees it: one writer at a time, committed before it is told.

Each write runs to its end in a task of its own: a caller that is cancelled in the middle (an RPC
whose client has gone, an order whose deadline passed) must not leave memory and file apart.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from app.domain.errors import TooManyOperations, UnknownOperation
from app.domain.idempotency import KeyRecord
from app.domain.kinds import OperationKind
from app.domain.operation import Operation, OperationEvent
from app.domain.transitions import Advanced, Fact, Rejected, Started, accepted_event, advance
from app.enginekit.records import NO_CHANGE, Change, Counters, FurtherKey, Record
from app.enginekit.refusals import StoreUnavailable
from app.enginekit.store import OperationStore, StoreFull, StoreUnreadable

log = logging.getLogger(__name__)
T = TypeVar("T")


class LiveOperation:
    """An open operation of this life, with all its events and keys. Followers wait on it."""

    def __init__(self, record: Record, accepted: OperationEvent) -> None:
        self.record = record
        self.keys = [record.key]
        self.events: list[OperationEvent] = [accepted]
        self._changed = asyncio.Event()

    @property
    def operation(self) -> Operation:
        return self.record.operation

    def take(self, advanced: Advanced) -> None:
        self.record = self.record.at(advanced.operation)
        if advanced.event is not None:
            self.events.append(advanced.event)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def event(self, index: int) -> OperationEvent | None:
        """The event at that index, waited for; None when there will be none."""
        while len(self.events) <= index:
            if self.operation.done:
                return None
            await self._changed.wait()
        return self.events[index]


class Journal:
    """`counters` are those of the last commit. `broken`: the last write failed."""

    def __init__(
        self,
        store: OperationStore,
        counters: Counters,
        thread: ThreadPoolExecutor,
        *,
        now: Callable[[], datetime],
        keep: int,
        retention: timedelta,
    ) -> None:
        self._store = store
        self._thread = thread
        self._now = now
        self._keep = keep
        self._retention = retention
        self._lock = asyncio.Lock()
        self._writes: set[asyncio.Task[Any]] = set()
        self._live: dict[str, LiveOperation] = {}
        self._live_by_key: dict[str, tuple[LiveOperation, str]] = {}  # with the fingerprint
        self.counters = counters
        self.broken = False

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        new_identity: str,
        life: str,
        now: Callable[[], datetime],
        keep: int,
        retention: timedelta,
    ) -> tuple[Journal, str]:
        """The journal, and the instance id: the store's identity followed by `life`.

        Raises StoreInUse, StoreUnreadable, OSError.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="operation-store")

        def begin() -> tuple[OperationStore, str, Counters]:
            store = OperationStore.open(folder, new_identity=new_identity)
            instance_id = f"{store.identity}-{life}"
            try:
                return store, instance_id, store.begin_life(instance_id, now())
            except sqlite3.Error as error:
                # For one, on a disk that is full.
                store.close()
                raise StoreUnreadable(str(error)) from error
            except BaseException:
                store.close()
                raise

        try:
            running = asyncio.get_running_loop().run_in_executor(thread, begin)
            store, instance_id, counters = await running
        except BaseException:
            thread.shutdown(wait=False)
            raise
        journal = cls(store, counters, thread, now=now, keep=keep, retention=retention)
        return journal, instance_id

    @property
    def identity(self) -> str:
        return self._store.identity

    def open_operations(self) -> tuple[Record, ...]:
        """Oldest first."""
        return tuple(live.record for live in self._live.values())

    def running_exclusive(self) -> Record | None:
        return next((r for r in self.open_operations() if r.operation.kind.exclusive), None)

    def running_profile(self) -> Record | None:
        of_profiles = (
            r for r in self.open_operations() if r.operation.kind is OperationKind.PROFILE
        )
        return next(of_profiles, None)

    def live(self, operation_id: str) -> LiveOperation | None:
        return self._live.get(operation_id)

    async def by_id(self, operation_id: str) -> Record | None:
        live = self._live.get(operation_id)
        return live.record if live else await self._call(self._store.by_id, operation_id)

    async def by_key(self, key: str) -> Record | None:
        live = self._live_by_key.get(key)
        return live[0].record if live else await self._call(self._store.by_key, key)

    async def known(self, key: str) -> KeyRecord | None:
        """The call that the key was used for, and its operation."""
        live = self._live_by_key.get(key)
        if live is not None:
            return KeyRecord(live[1], live[0].operation.id)
        return await self._call(self._store.known, key)

    async def follow(
        self, operation_id: str
    ) -> AsyncGenerator[tuple[Record, OperationEvent], None]:
        """Every event from the first, ending after the terminal one."""
        live = self._live.get(operation_id)
        if live is None:
            record = await self.by_id(operation_id)
            if record is None:
                raise UnknownOperation("there is no operation of that id here")
            for event in await self._call(self._store.events, operation_id):
                yield record, event
            return
        index = 0
        while (told := await live.event(index)) is not None:
            yield live.record, told
            index += 1

    async def accept(self, operation: Operation, fingerprint: str) -> LiveOperation:
        """Commit a new operation and its first event. Raises TooManyOperations, StoreUnavailable.

        The caller makes sure that nobody accepts beside it.
        """
        return await self._whole(self._accept(operation, fingerprint))

    async def _accept(self, operation: Operation, fingerprint: str) -> LiveOperation:
        accepted = accepted_event(operation)
        started = advance(operation, Started(), operation.created_at)
        assert isinstance(started, Advanced)
        record = Record(
            operation=started.operation,
            fingerprint=fingerprint,
            accepted_revision=self.counters.revision,
        )
        async with self._lock:
            try:
                await self._write(
                    lambda: self._store.accept(
                        record,
                        accepted,
                        keep=self._keep,
                        evictable_before=self._now() - self._retention,
                    )
                )
            except StoreFull:
                raise TooManyOperations(
                    "all operations that this engine may keep are open or within their retention"
                ) from None
            live = LiveOperation(record, accepted)
            self._live[operation.id] = live
            self._live_by_key[record.key] = live, fingerprint
        return live

    async def record(
        self,
        live: LiveOperation,
        fact_of: Callable[[Counters], Fact],
        *,
        change: Change = NO_CHANGE,
        then: Callable[[], None] | None = None,
        further: FurtherKey | None = None,
    ) -> bool:
        """Commit what has happened, with the counters it raises. `fact_of` is given the counters
        as they will be; `then` runs after the commit and before anyone is told. `further`: of the
        call that made it happen; the operation is found by that key from now on.

        False when the operation's state admits no such fact: nothing was written. Raises
        StoreUnavailable.
        """
        return await self._whole(self._record(live, fact_of, change, then, further))

    async def _record(
        self,
        live: LiveOperation,
        fact_of: Callable[[Counters], Fact],
        change: Change,
        then: Callable[[], None] | None,
        further: FurtherKey | None,
    ) -> bool:
        async with self._lock:
            counters = self.counters.after(change)
            before = live.operation
            advanced = advance(before, fact_of(counters), self._now())
            if isinstance(advanced, Rejected):
                return False
            await self._write(lambda: self._store.record(before, advanced, counters, further))
            self.counters = counters
            if further is not None:
                self._live_by_key[further.key] = live, further.fingerprint
                live.keys.append(further.key)
            if then is not None:
                then()
            if advanced.operation.done:
                del self._live[before.id]
                for key in live.keys:
                    del self._live_by_key[key]
            live.take(advanced)
        return True

    async def raise_counters(
        self, change: Change, then: Callable[[], None], unless: Callable[[], bool] | None = None
    ) -> None:
        """An administrative fact changed without an order. `unless`: asked when it is this write's
        turn, whether it has become pointless. Raises StoreUnavailable."""
        await self._whole(self._raise(change, then, unless))

    async def _raise(
        self, change: Change, then: Callable[[], None], unless: Callable[[], bool] | None
    ) -> None:
        async with self._lock:
            if unless is not None and unless():
                return
            counters = self.counters.after(change)
            await self._write(lambda: self._store.set_counters(counters))
            self.counters = counters
            then()

    async def try_again(self) -> None:
        """Find out whether a broken store has come back."""
        try:
            await self.raise_counters(NO_CHANGE, lambda: None)
        except StoreUnavailable:
            return

    async def close(self) -> None:
        """Lets writes under way finish."""
        while self._writes:
            await asyncio.wait(set(self._writes))
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown(wait=False)

    async def _write(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            log.error("the operation store cannot be written: %s", error)
            self.broken = True
            raise StoreUnavailable("the engine cannot write its operations down") from error
        self.broken = False

    async def _call(self, read: Callable[[str], T], value: str) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._thread, read, value)
        try:
            return await running
        except sqlite3.Error as error:
            raise StoreUnavailable("the engine cannot read its operations") from error

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._writes.add(task)
        task.add_done_callback(self._written)
        return await asyncio.shield(task)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even where the caller has gone
