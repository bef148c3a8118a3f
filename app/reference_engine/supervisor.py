"""Starts the ranks, each a process of its own, and knows at any time which of them are alive."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from app.reference_engine.channel import OrderLog, RankConnection, SocketConnection
from app.reference_engine.errors import OrderRejected, RankLost, StartupFailed
from app.reference_engine.limits import CoreSettings
from app.reference_engine.messages import (
    Ack,
    Failed,
    Finished,
    ReadLoad,
    Ready,
    RequestReport,
    Shutdown,
    Start,
    StartFailed,
    Tokens,
)
from app.reference_engine.processes import own_environment, own_module
from app.reference_engine.wire import MalformedFrame, encode_frame

# Everything here counts ranks; what more than one needs is a first rank that hands the log on.
_WORLD_SIZE = 1
_KILL_WAIT_S = 10.0


class RankProcess:
    """One rank's process and connection."""

    def __init__(
        self, rank: int, process: asyncio.subprocess.Process, connection: SocketConnection
    ) -> None:
        self.rank = rank
        self.process = process
        self.connection = connection

    @classmethod
    async def spawn(cls, rank: int) -> RankProcess:
        """A fresh interpreter that inherits nothing but its end of a socket pair."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *own_module("app.reference_engine.worker"),
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env=own_environment(),
                )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return cls(rank, process, SocketConnection(reader, writer))

    async def ready(self, checkpoint: Path, settings: CoreSettings) -> Ready:
        """Hand over the settings and wait for the rank to load. Raises StartupFailed."""
        start = Start(rank=self.rank, checkpoint=str(checkpoint), settings=settings)
        self.connection.send(encode_frame([start]))
        try:
            (first,) = await self.connection.receive()
        except (EOFError, OSError):
            code = await self.process.wait()
            raise StartupFailed(f"rank {self.rank} ended during start-up ({_end(code)})") from None
        match first:
            case Ready():
                return first
            case StartFailed(message=message):
                raise StartupFailed(message)
        raise StartupFailed(f"rank {self.rank} spoke out of turn")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def reap(self) -> int:
        """Make sure the process is gone and give its exit code; negative is a signal's number."""
        try:
            async with asyncio.timeout(_KILL_WAIT_S):
                return await self.process.wait()
        except TimeoutError:
            self.kill()
            return await self.process.wait()
        finally:
            self.connection.close()


class Supervisor:
    """All ranks of one engine. A lost rank stays lost: what it held can not be had back, and going
    on without it would serve wrong results."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        ready: Sequence[Ready],
        *,
        on_report: Callable[[RequestReport], None],
        on_lost: Callable[[int, str], None],
        order_deadline_s: float,
        watch_interval_s: float,
    ) -> None:
        self._processes = {one.rank: one for one in processes}
        self.ready = tuple(ready)
        self._on_report = on_report
        self._on_lost = on_lost
        self.order_deadline_s = order_deadline_s
        connections: dict[int, RankConnection] = {one.rank: one.connection for one in processes}
        self.log = OrderLog(connections, self._hung)
        self._closing = False
        self._tasks = [asyncio.create_task(self._listen(one)) for one in processes]
        self._tasks.append(asyncio.create_task(self._watch(watch_interval_s)))

    @classmethod
    async def start(
        cls,
        checkpoint: Path,
        settings: CoreSettings,
        *,
        on_report: Callable[[RequestReport], None],
        on_lost: Callable[[int, str], None],
        startup_deadline_s: float = 300.0,
        order_deadline_s: float = 60.0,
        watch_interval_s: float = 5.0,
    ) -> Supervisor:
        """Start every rank or none. ``on_lost`` gets rank and cause, at most once per rank; an
        order that is not acknowledged within ``order_deadline_s`` makes a rank lost.

        Raises StartupFailed.
        """
        processes: list[RankProcess] = []
        try:
            async with asyncio.timeout(startup_deadline_s):
                for rank in range(_WORLD_SIZE):
                    processes.append(await RankProcess.spawn(rank))
                ready = await asyncio.gather(
                    *(one.ready(checkpoint, settings) for one in processes)
                )
        except BaseException as error:
            for one in processes:
                one.kill()
            for one in processes:
                await one.reap()
            if isinstance(error, TimeoutError):
                raise StartupFailed(f"not ready within {startup_deadline_s:g} s") from None
            raise
        return cls(
            processes,
            ready,
            on_report=on_report,
            on_lost=on_lost,
            order_deadline_s=order_deadline_s,
            watch_interval_s=watch_interval_s,
        )

    async def close(self) -> None:
        """Stop the ranks and wait until their processes are gone. May be called again."""
        if self._closing:
            return
        self._closing = True
        issued = self.log.issue(Shutdown())
        for rank, one in self._processes.items():
            try:
                await issued.ack(rank, _KILL_WAIT_S)
            except (RankLost, OrderRejected):
                one.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank, one in self._processes.items():
            await one.reap()
            # For orders that were issued meanwhile: nobody is going to acknowledge them.
            self.log.lose(rank, "the engine was stopped")

    async def _listen(self, one: RankProcess) -> None:
        """Hand on what a rank says, until its connection ends; that is how a death is noticed."""
        cause = "its connection could not be followed"
        try:
            while True:
                for message in await one.connection.receive():
                    if isinstance(message, Ack):
                        self.log.settle(message)
                    elif isinstance(message, Tokens | Finished | Failed):
                        self._on_report(message)
        except (EOFError, OSError):
            cause = "its process ended"
        except MalformedFrame as error:
            cause = f"it wrote a frame that makes no sense ({error})"
        finally:
            # Whatever ended the listening, nobody may go on waiting for this rank; and it is told
            # before the exit code is known.
            if not self._closing:
                one.kill()
                self._lose(one.rank, cause)
        if not self._closing:
            await one.reap()

    async def _watch(self, interval_s: float) -> None:
        """Ask for something small now and then: a rank that hangs while nobody gives it orders
        would otherwise keep its requests waiting for ever."""
        while not self.log.lost:
            await asyncio.sleep(interval_s)
            issued = self.log.issue(ReadLoad())
            for rank in self.log.ranks:
                with contextlib.suppress(RankLost):
                    await issued.ack(rank, self.order_deadline_s)

    def _hung(self, rank: int) -> None:
        """A rank missed a deadline. It is killed, so that it can not come back half-way."""
        self._processes[rank].kill()
        self._lose(rank, "it stopped answering and was killed")

    def _lose(self, rank: int, cause: str) -> None:
        if rank not in self.log.lost:
            self.log.lose(rank, cause)
            self._on_lost(rank, cause)


def _end(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
