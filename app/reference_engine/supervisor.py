"""Watches the ranks of one group, and knows at any time which of them are alive.

The group lives and dies together. A rank is lost when its process ends (noticed at once, by its
connection), when it says itself that it can not go on, when it does not acknowledge an order in
time, and when it does not answer a ping or end its step in time. Then the others are killed too:
what the lost one held can not be had back, and ranks that wait for it in a collective would wait
for ever. So they are when an order could not be undone on one of them: ranks that may differ must
not compute together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from app.reference_engine.cache_changes import CacheChanged
from app.reference_engine.channel import Issued, OrderLog, RankConnection
from app.reference_engine.errors import OrderRejected, RankLost
from app.reference_engine.limits import CoreSettings
from app.reference_engine.messages import (
    Ack,
    Broken,
    Failed,
    Finished,
    FirstWeights,
    Ping,
    Pong,
    Prefilled,
    Ready,
    RequestReport,
    Shutdown,
    Tokens,
)
from app.reference_engine.nursery import Nursery
from app.reference_engine.rank_process import RankProcess, start_group
from app.reference_engine.wire import MalformedFrame, encode_frame

_SHUTDOWN_WAIT_S = 10.0
# How long ranks are given to show which one of them is the reason, once it is clear that one is.
_BLAME_WAIT_S = 2.0
_SILENT = "it stopped answering and was killed"


class Supervisor:
    """All ranks of one group. A lost group stays lost; an engine starts another one."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        ready: Sequence[Ready],
        *,
        on_report: Callable[[RequestReport], None],
        on_cache: Callable[[CacheChanged], None],
        on_lost: Callable[[int, str], None],
        order_deadline_s: float,
        step_deadline_s: float,
        rank_timeout_s: float,
        watch_interval_s: float,
    ) -> None:
        self._processes = {one.rank: one for one in processes}
        self.ready = tuple(ready)
        self._on_report = on_report
        self._on_cache = on_cache
        self._on_lost = on_lost
        self.order_deadline_s = order_deadline_s
        self._step_deadline_s = step_deadline_s
        timeout_s = min(rank_timeout_s, step_deadline_s)
        interval_s = min(watch_interval_s, timeout_s / 3)
        # Counted from a rank's last answer, which can be a whole interval before the next ping.
        self._silence_s = timeout_s - interval_s
        connections: dict[int, RankConnection] = {one.rank: one.connection for one in processes}
        self.log = OrderLog(connections, self._overdue)
        self._pings = 0
        self._pongs: dict[tuple[int, int], asyncio.Future[Pong]] = {}
        self._closing = False
        self._down = asyncio.Event()
        self.blamed: tuple[int, ...] = ()
        self._tasks = {asyncio.create_task(self._listen(one)) for one in processes}
        self._tasks.add(asyncio.create_task(self._watch(interval_s)))

    @classmethod
    async def start(
        cls,
        checkpoint: Path,
        settings: CoreSettings,
        *,
        on_report: Callable[[RequestReport], None],
        on_cache: Callable[[CacheChanged], None],
        on_lost: Callable[[int, str], None],
        startup_deadline_s: float = 300.0,
        order_deadline_s: float = 60.0,
        step_deadline_s: float = 60.0,
        rank_timeout_s: float = 10.0,
        watch_interval_s: float = 1.0,
        earlier: Mapping[int, FirstWeights] | None = None,
        nursery: Nursery,
    ) -> Supervisor:
        """Start every rank or none. ``on_lost`` gets rank and cause, once: of the rank that is to
        blame. Every rank is pinged each ``watch_interval_s``, busy or not, and is lost when it has
        said nothing for ``rank_timeout_s``, when it has been at one step for longer than
        ``step_deadline_s``, or when it does not acknowledge an order within ``order_deadline_s``.
        ``earlier``: what an earlier group served, for this one to serve. ``nursery`` makes the
        ranks' processes.

        Raises StartupFailed.
        """
        processes, ready = await start_group(
            *(checkpoint, settings, startup_deadline_s, earlier),
            nursery=nursery,
            rank_timeout_s=rank_timeout_s,
        )
        return cls(
            processes,
            ready,
            on_report=on_report,
            on_cache=on_cache,
            on_lost=on_lost,
            order_deadline_s=order_deadline_s,
            step_deadline_s=step_deadline_s,
            rank_timeout_s=rank_timeout_s,
            watch_interval_s=watch_interval_s,
        )

    def give_up(self, rank: int, cause: str) -> None:
        """Count that rank as lost, and with it the group."""
        self._lose_group((rank,), cause)

    async def close(self, *, kill: bool = False) -> None:
        """Stop the ranks and wait until their processes are gone. May be called again. ``kill``:
        without letting them end what they are at."""
        if self._closing:
            return
        self._closing = True
        if kill:
            for one in self._processes.values():
                one.kill()
        else:
            await self._shut_down()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank, one in self._processes.items():
            await one.reap()
            # For orders that were issued meanwhile: nobody is going to acknowledge them.
            self.log.lose(rank, "the engine was stopped")

    async def _shut_down(self) -> None:
        issued = self.log.issue(Shutdown())
        for rank, one in self._processes.items():
            try:
                await issued.ack(rank, _SHUTDOWN_WAIT_S)
            except (RankLost, OrderRejected):
                one.kill()

    async def _listen(self, one: RankProcess) -> None:
        """Hand on what a rank says, until its connection ends; that is how a death is noticed."""
        cause = "its connection could not be followed"
        try:
            while True:
                for message in await one.connection.receive():
                    self._take(one.rank, message)
        except (EOFError, OSError):
            cause = "its process ended"
        except MalformedFrame as error:
            cause = f"it wrote a frame that makes no sense ({error})"
        finally:
            # Whatever ended the listening, nobody may go on waiting for this rank; and it is told
            # before the exit code is known.
            if not self._closing:
                self._lose_group((one.rank,), cause)
        if not self._closing:
            await one.reap()

    def _take(self, rank: int, message: object) -> None:
        match message:
            case Ack():
                self.log.settle(message)
            case Tokens() | Finished() | Failed() | Prefilled():
                # Nothing after the loss: an id may belong to a request of the next group by then.
                if not self._down.is_set():
                    self._on_report(message)
            case CacheChanged():
                # With the group its cache is gone, and told to be: nothing may follow that.
                if not self._down.is_set():
                    self._on_cache(message)
            case Pong(number=number):
                waiting = self._pongs.get((number, rank))
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Broken():
                task = asyncio.create_task(self._blame(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _blame(self, broken: Broken) -> None:
        """A rank can not go on. If that is because another one is gone, the other one's end is
        about to arrive too, and is what has to be told."""
        if broken.by_peer:
            try:
                async with asyncio.timeout(_BLAME_WAIT_S):
                    await self._down.wait()
            except TimeoutError:
                pass
        self._lose_group((broken.rank,), f"it can not go on: {broken.message}")

    async def _watch(self, interval_s: float) -> None:
        """Look after the ranks also while nobody gives them orders: requests would otherwise wait
        for ever for one that hangs. Not through the log: an order that takes long is no fault."""
        limit_s = self._step_deadline_s
        while not self._down.is_set():
            await asyncio.sleep(interval_s)
            asked = time.monotonic()
            pongs = await self._ping(self._silence_s)
            if time.monotonic() - asked > self._silence_s + interval_s:
                continue  # this process itself was held up: it can not say who else was
            if silent := tuple(rank for rank in self.log.ranks if rank not in pongs):
                self._lose_group(silent, _SILENT)
                return
            stuck = [one for one in pongs.values() if (one.step_age_s or 0.0) > limit_s]
            if stuck:
                blamed = [one for one in stuck if not one.waits] or stuck
                ranks = tuple(sorted(one.rank for one in blamed))
                self._lose_group(ranks, f"its step took more than {limit_s:g} s and it was killed")
                return

    async def _ping(self, timeout_s: float) -> dict[int, Pong]:
        """Ask all ranks what they are at; the answers of those that gave one in time."""
        self._pings += 1
        number = self._pings
        waiting: dict[int, asyncio.Future[Pong]] = {}
        for rank, one in self._processes.items():
            waiting[rank] = asyncio.get_running_loop().create_future()
            self._pongs[number, rank] = waiting[rank]
            one.connection.send(encode_frame([Ping(number)]))
        try:
            await asyncio.wait(waiting.values(), timeout=timeout_s)
        finally:
            for rank in waiting:
                del self._pongs[number, rank]
        return {rank: pong.result() for rank, pong in waiting.items() if pong.done()}

    async def _overdue(self, issued: Issued) -> tuple[int, ...]:
        """An order is not acknowledged in time. Says which ranks are to blame; the group is killed,
        so that none can come back half-way."""
        if not self._down.is_set():
            pongs = await self._ping(min(_BLAME_WAIT_S, self._silence_s))
            missing = issued.missing
            blamed = [rank for rank in self.log.ranks if rank not in pongs]
            blamed = blamed or [rank for rank in missing if not pongs[rank].waits]
            self._lose_group(tuple(blamed or missing), _SILENT)
        return self.blamed

    def _lose_group(self, blamed: tuple[int, ...], cause: str) -> None:
        """All ranks are gone from now on, ``blamed`` as the reason why."""
        if self._down.is_set() or not blamed:
            return
        self._down.set()
        self.blamed = blamed
        for one in self._processes.values():
            one.kill()
        for rank in blamed:
            self.log.lose(rank, cause)
        names = ", ".join(map(str, blamed))
        for rank in self.log.ranks:
            self.log.lose(rank, f"it was stopped because rank {names} was lost: {cause}")
        self._on_lost(blamed[0], cause)
