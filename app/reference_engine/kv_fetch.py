"""Fetches the KV of a session from the engine that holds it; see ``kv_wire``."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.reference_engine.kv_peers import PeerList, PeerRefused
from app.reference_engine.kv_wire import (
    PIECE_BYTES,
    MalformedMessage,
    Offer,
    Part,
    proof,
    proves,
    receive,
    send,
)
from app.reference_engine.memory_file import MemoryFile


class FetchFailed(Exception):
    """``again``: the same session may be fetched by another try."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


class SessionGone(Exception):
    """There is no such session any more, or its secret is another one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What names a session and proves the right to it."""

    session_id: str
    secret: bytes
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """To be closed by whoever has it."""

    offer: Offer
    parts: tuple[MemoryFile, ...]

    def close(self) -> None:
        for part in self.parts:
            part.close()


async def fetch(
    claim: Claim, peers: PeerList, check: Callable[[Offer], None], deadline_s: float
) -> Fetched:
    """``check`` raises for an offer that is of no use; nothing is transferred then. Raises what it
    raises, PeerRefused, SessionGone or FetchFailed."""
    try:
        async with asyncio.timeout(deadline_s):
            address = await peers.resolved(claim.host, claim.port)
            reader, writer = await asyncio.open_connection(address, claim.port)
            try:
                return await _fetch(claim, check, reader, writer)
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise FetchFailed(f"not fetched within {deadline_s:g} s", again=True) from None
    except EOFError:
        raise FetchFailed("the connection broke off", again=True) from None
    except OSError as error:
        raise FetchFailed(error.strerror or type(error).__name__, again=True) from error
    except MalformedMessage as error:
        raise FetchFailed(str(error), again=False) from error


async def _fetch(
    claim: Claim,
    check: Callable[[Offer], None],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> Fetched:
    their_nonce, nonce = str((await receive(reader)).get("nonce")), secrets.token_hex(32)
    shown = proof(claim.secret, "claim", their_nonce, nonce)
    await send(writer, session=claim.session_id, nonce=nonce, proof=shown)
    answer = await receive(reader)
    match answer.get("refused"):
        case None:
            pass
        case "in_use":
            raise FetchFailed("somebody else is fetching that session", again=True)
        case _:
            raise SessionGone
    text = answer.get("offer")
    if not isinstance(text, str) or not proves(
        answer.get("proof"), claim.secret, "offer", nonce, text
    ):
        raise FetchFailed("the other side does not know the session's secret", again=False)
    offer = Offer.decode(text)
    check(offer)
    await send(writer, accepted=True)
    parts = await _parts(offer.parts, reader)
    try:
        await send(writer, taken=proof(claim.secret, "taken", their_nonce))
    except OSError:
        pass  # it is all here; the other side's lease ends without it
    except BaseException:
        _close(parts)
        raise
    return Fetched(offer, parts)


async def _parts(told: Sequence[Part], reader: asyncio.StreamReader) -> tuple[MemoryFile, ...]:
    parts: list[MemoryFile] = []
    try:
        for one in told:
            parts.append(MemoryFile("kv"))
            digest, left = hashlib.sha256(), one.size_bytes
            while left:
                piece = await reader.read(min(left, PIECE_BYTES))
                if not piece:
                    raise EOFError
                digest.update(piece)
                parts[-1].append(piece)
                left -= len(piece)
            if digest.hexdigest() != one.sha256:
                raise FetchFailed("what came has another checksum", again=True)
    except BaseException:
        _close(parts)
        raise
    return tuple(parts)


def _close(parts: Sequence[MemoryFile]) -> None:
    for part in parts:
        part.close()


__all__ = ["Claim", "FetchFailed", "Fetched", "PeerRefused", "SessionGone", "fetch"]
