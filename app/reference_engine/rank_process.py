"""One rank's process as the front end has it, and how a group of them is started."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.reference_engine.channel import SocketConnection
from app.reference_engine.errors import StartupFailed
from app.reference_engine.limits import CoreSettings
from app.reference_engine.messages import FirstWeights, Ready, Start, StartFailed
from app.reference_engine.nursery import ForkedProcess, Nursery
from app.reference_engine.processes import stopped
from app.reference_engine.wire import encode_frame

_KILL_WAIT_S = 10.0
_LOOK_S = 0.25


class RankProcess:
    """One rank's process and connection."""

    def __init__(self, rank: int, process: ForkedProcess, connection: SocketConnection) -> None:
        self.rank = rank
        self.process = process
        self.connection = connection

    @classmethod
    async def spawn(
        cls, rank: int, peers: Sequence[socket.socket], nursery: Nursery
    ) -> RankProcess:
        """It inherits nothing of this process but its ends of socket pairs: one with the front end,
        the others with its ``peers``."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                numbers = [theirs.fileno(), *(peer.fileno() for peer in peers)]
                process = await nursery.rank(numbers)
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return cls(rank, process, SocketConnection(reader, writer))

    async def ready(self, start: Start) -> Ready:
        """Hand over the settings and wait for the rank to load. Raises StartupFailed."""
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

    @property
    def stopped(self) -> bool:
        return stopped(self.process.pid)

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


async def start_group(
    checkpoint: Path,
    settings: CoreSettings,
    deadline_s: float,
    earlier: Mapping[int, FirstWeights] | None = None,
    *,
    nursery: Nursery,
    rank_timeout_s: float,
) -> tuple[list[RankProcess], list[Ready]]:
    """Start every rank or none, within the deadline. Raises StartupFailed, also as soon as a rank
    has been stopped for ``rank_timeout_s``. One that loads is not asked for signs of life: torch
    alone can keep it from giving one for longer than that."""
    processes: list[RankProcess] = []
    try:
        async with asyncio.timeout(deadline_s):
            # A file in a folder of its own, not a port: nobody else can come first, or come along.
            with tempfile.TemporaryDirectory(prefix="chadburn-ranks-") as folder:
                await _spawn_all(processes, settings.tensor_parallel_size, nursery)
                starts = [
                    Start(
                        rank=one.rank,
                        checkpoint=str(checkpoint),
                        rendezvous=str(Path(folder) / "rendezvous"),
                        settings=settings,
                        weights=None if earlier is None else earlier[one.rank],
                    )
                    for one in processes
                ]
                ready = await _ready(processes, starts, rank_timeout_s)
    except BaseException as error:
        for one in processes:
            one.kill()
        for one in processes:
            await one.reap()
        if isinstance(error, TimeoutError):
            raise StartupFailed(f"not ready within {deadline_s:g} s") from None
        raise
    return processes, ready


async def _ready(
    processes: Sequence[RankProcess], starts: Sequence[Start], rank_timeout_s: float
) -> list[Ready]:
    """What each rank reports once it is ready. Raises StartupFailed."""
    loading = asyncio.gather(
        *(one.ready(start) for one, start in zip(processes, starts, strict=True))
    )
    watching = asyncio.create_task(_until_stopped(processes, rank_timeout_s))
    both: set[asyncio.Future[Any]] = {loading, watching}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            return loading.result()
        raise StartupFailed(f"rank {watching.result()} was stopped and did not go on")
    finally:
        for one in both:
            one.cancel()
        await asyncio.wait(both)
        for one in both:
            if not one.cancelled():
                one.exception()  # who cares has been told


async def _until_stopped(processes: Sequence[RankProcess], rank_timeout_s: float) -> int:
    """The first rank that has been stopped for so long."""
    since: dict[int, float] = {}
    while True:
        now = asyncio.get_running_loop().time()
        for one in processes:
            if not one.stopped:
                since.pop(one.rank, None)
            elif now - since.setdefault(one.rank, now) >= rank_timeout_s:
                return one.rank
        await asyncio.sleep(_LOOK_S)


async def _spawn_all(processes: list[RankProcess], world_size: int, nursery: Nursery) -> None:
    """Fills ``processes`` as they come, so that none is forgotten when one can not be started."""
    pairs = [socket.socketpair() for _ in range(1, world_size)]
    try:
        processes.append(await RankProcess.spawn(0, [first for first, _ in pairs], nursery))
        for rank, (_, other) in enumerate(pairs, start=1):
            processes.append(await RankProcess.spawn(rank, [other], nursery))
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def _end(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
