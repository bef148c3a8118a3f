"""A TCP proxy in front of an engine that does to connections what networks do.

    async with fault_proxy(target, seed) as proxy:
        proxy.address                   # where the gateway finds the engine
        proxy.delay_s = (0.0, 0.05)     # each piece waits so long, by chance
        proxy.cut()                     # every connection is reset
        proxy.black_hole()              # nothing passes, nothing is closed, until `heal`
        proxy.lose_replies()            # orders still arrive, answers do not; the next order's
                                        # connection is reset behind it
        proxy.double()                  # what is sent reaches the engine on a second connection too
        proxy.heal()

What is in a black hole comes out of it when it is healed, also where its sender has gone in the
meantime: a piece that is under way cannot be called back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# A gateway names its order by a UUID, which stands in the message as it is.
_ORDER = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PIECE = 65_536


class FaultProxy:
    def __init__(self, target: str, seed: int) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._chance = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.address = ""
        self.delay_s = (0.0, 0.0)
        self.losing = False
        self.doubling = False
        self.connections = 0
        """How many were taken, ever."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._taken, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [link.task for link in self._links if link.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- faults ----

    def cut(self) -> None:
        for link in self._links:
            link.reset()

    def black_hole(self) -> None:
        self._flowing.clear()

    def lose_replies(self) -> None:
        self.losing = True

    def double(self) -> None:
        """From the next connection on."""
        self.doubling = True
        self.cut()

    def heal(self) -> None:
        self.losing = self.doubling = False
        self.delay_s = (0.0, 0.0)
        self._flowing.set()

    # ---- passing on ----

    def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = _Link(self, reader, writer)
        self._links.add(link)
        link.task = asyncio.get_running_loop().create_task(self._serve(link))

    async def _serve(self, link: _Link) -> None:
        try:
            await link.run()
        except OSError:
            pass  # one of both sides has gone, which is what this is for
        finally:
            self._links.discard(link)
            link.reset()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port)

    async def passage(self) -> None:
        await asyncio.sleep(self._chance.uniform(*self.delay_s))
        await self._flowing.wait()


class _Link:
    """One connection of a gateway, and the one or two of its own to the engine."""

    def __init__(
        self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self.task: asyncio.Task[None] | None = None
        self._onward: list[asyncio.StreamWriter] = []

    async def run(self) -> None:
        await self._proxy.passage()
        reader, writer = await self._proxy.connect()
        self._onward = [writer]
        pumps = [self._down(reader)]
        if self._proxy.doubling:
            second, writer = await self._proxy.connect()
            self._onward.append(writer)
            pumps.append(_swallow(second))
        try:
            async with asyncio.TaskGroup() as group:
                downs = [group.create_task(pump) for pump in pumps]
                await self._up()
                for down in downs:
                    down.cancel()
        except* OSError:
            pass

    async def _up(self) -> None:
        while piece := await self._reader.read(_PIECE):
            await self._proxy.passage()
            for writer in self._onward:
                writer.write(piece)
                await writer.drain()
            if self._proxy.losing and _ORDER.search(piece):
                # Behind the order: it is delivered, and the engine's side ends in good order.
                self._close_onward()
                _reset(self._writer)
                return
        self._close_onward()

    async def _down(self, reader: asyncio.StreamReader) -> None:
        while piece := await reader.read(_PIECE):
            await self._proxy.passage()
            if not self._proxy.losing:
                self._writer.write(piece)
                await self._writer.drain()
        self._writer.close()

    def reset(self) -> None:
        """Towards the gateway; the engine sees an end."""
        _reset(self._writer)
        self._close_onward()

    def _close_onward(self) -> None:
        for writer in self._onward:
            writer.close()


async def _swallow(reader: asyncio.StreamReader) -> None:
    while await reader.read(_PIECE):
        pass


def _reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() != -1:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def fault_proxy(target: str, seed: int) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(target, seed)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
