"""Serves the KV of sessions to the engines that were given them; see ``kv_wire``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets

from app.reference_engine.kv_sessions import KvSession, KvSessions, SessionEnd
from app.reference_engine.kv_wire import (
    PIECE_BYTES,
    MalformedMessage,
    proof,
    proves,
    receive,
    send,
)

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64


class KvServer:
    """Started once. Whoever connects has ``deadline_s`` from the first byte to the last."""

    def __init__(self, sessions: KvSessions, *, deadline_s: float) -> None:
        self._sessions = sessions
        self._deadline_s = deadline_s
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int] | None:
        """As bound; None while it is closed."""
        if self._server is None:
            return None
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def start(self, host: str, port: int) -> None:
        """Nothing happens where it has started. Raises OSError for an address that cannot be
        had."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, host, port)

    async def close(self) -> None:
        """Cuts off whoever fetches. May be started again."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._serving) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._hand_out(reader, writer)
        except (OSError, EOFError, TimeoutError, MalformedMessage) as error:
            # The session stays for another try, until its lease is over.
            log.info("KV was not fetched: %s", str(error) or type(error).__name__)
        finally:
            writer.transport.abort()

    async def _hand_out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own_nonce = secrets.token_hex(32)
        await send(writer, nonce=own_nonce)
        claim = await receive(reader)
        nonce = str(claim.get("nonce"))
        session = self._sessions.find(str(claim.get("session")))
        # A wrong secret looks like no session at all, and takes as long.
        secret = session.secret if session is not None else secrets.token_bytes(32)
        right = proves(claim.get("proof"), secret, "claim", own_nonce, nonce)
        if session is None or not right:
            await _refuse(writer, "not_found")
        elif session.break_off is not None:
            await _refuse(writer, "in_use")
        else:
            session.break_off = writer.transport.abort
            try:
                taken = await self._offer(session, nonce, own_nonce, reader, writer)
            finally:
                session.break_off = None
            if taken:
                self._sessions.end(session, SessionEnd.FETCHED)

    @staticmethod
    async def _offer(
        session: KvSession,
        nonce: str,
        own_nonce: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Whether it was taken."""
        offer = session.offer.encode()
        await send(writer, offer=offer, proof=proof(session.secret, "offer", nonce, offer))
        if (await receive(reader)).get("accepted") is not True:
            return False
        for part, told in zip(session.parts, session.offer.parts, strict=True):
            for start in range(0, told.size_bytes, PIECE_BYTES):
                if writer.transport.is_closing():
                    raise ConnectionAbortedError("the session ended meanwhile")
                writer.write(part.piece(start, PIECE_BYTES))
                await writer.drain()
        answer = await receive(reader)
        return proves(answer.get("taken"), session.secret, "taken", own_nonce)


async def _refuse(writer: asyncio.StreamWriter, why: str) -> None:
    await send(writer, refused=why)
    writer.write_eof()
    with contextlib.suppress(OSError):
        await writer.drain()
