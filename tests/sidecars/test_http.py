"""What comes over the connection to an engine, and is no answer that such a server gives."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

import pytest

from app.sidecars.http import EngineHttp, NoAnswer, Patience

pytestmark = pytest.mark.anyio

ENDLESS = b"Content-Length: 100000000000\r\n\r\n"


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnone", "cannot be read"),
        (ENDLESS, "too long"),
        (b"Content-Length: 9\r\n\r\nhalf", "broke"),
        (b"no header\r\n\r\n", "broke"),
    ],
)
async def test_what_is_no_answer_proves_nothing(rest: bytes, words: str) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n" + rest)
            while rest is ENDLESS:
                writer.write(bytes(1 << 20))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        http = EngineHttp(f"http://127.0.0.1:{port}", patience=Patience(read_s=60.0))
        try:
            with pytest.raises(NoAnswer, match=words):
                await http.get("/metrics")
        finally:
            await http.close()


async def test_who_goes_while_a_silent_engine_is_looked_at_leaves_nothing_unheard() -> None:
    """The call has come to its end by then, and nobody is told."""
    asked: list[bytes] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.read()
        writer.close()

    unheard: list[Any] = []
    gc.collect()  # what other tests left behind is told now
    asyncio.get_running_loop().set_exception_handler(lambda _, told: unheard.append(told))
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        patience = Patience(read_s=60.0, watch_s=0.01)
        http = EngineHttp(f"http://127.0.0.1:{port}", patience=patience)
        calling = asyncio.create_task(http.post("/order", within_s=0.2))
        await asyncio.wait({calling}, timeout=0.5)
        assert not calling.done()
        assert {one.split()[1] for one in asked} == {b"/order", b"/health"}
        calling.cancel()
        await asyncio.wait({calling})
        await http.close()
    del calling
    gc.collect()
    assert not unheard
