"""KV over TCP: what each side does when the other is not as it should be."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from app.reference_engine import kv_wire
from app.reference_engine.handoff import HandoffSettings
from app.reference_engine.kv_fetch import Claim, Fetched, FetchFailed, SessionGone, fetch
from app.reference_engine.kv_peers import PeerList, PeerRefused
from app.reference_engine.kv_server import KvServer
from app.reference_engine.kv_sessions import KvSession, KvSessions, SessionEnd
from app.reference_engine.kv_wire import MalformedMessage, Offer, Part, proof
from app.reference_engine.memory_file import MemoryFile
from tests.reference_engine.serving import PATIENCE_S

pytestmark = pytest.mark.anyio

SECRET = b"s" * 32
CONTENT = (os.urandom(3_000_000), b"second rank")
OFFER = Offer(
    model="m",
    weights=("w0", "w1"),
    weight_version="v1",
    prompt="p",
    tokens=7,
    parts=tuple(Part(len(one), hashlib.sha256(one).hexdigest()) for one in CONTENT),
)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Holder:
    """A server with sessions."""

    def __init__(self, *, lease_s: float = 3600, deadline_s: float = PATIENCE_S) -> None:
        names = count(1)
        self.sessions = KvSessions(lease_s=lease_s, new_id=lambda: f"session-{next(names)}")
        self.server = KvServer(self.sessions, deadline_s=deadline_s)

    def session(self) -> KvSession:
        parts = []
        for one in CONTENT:
            parts.append(MemoryFile("test"))
            parts[-1].append(one)
        return self.sessions.open(SECRET, OFFER, parts)

    def claim(self, session: KvSession, secret: bytes = SECRET) -> Claim:
        assert self.server.address is not None
        return Claim(session.id, secret, *self.server.address)


@pytest.fixture
async def holder() -> AsyncIterator[Holder]:
    made = Holder()
    await made.server.start("127.0.0.1", 0)
    yield made
    await made.server.close()
    made.sessions.end_all()


async def fetched(
    claim: Claim, check: Callable[[Offer], None] = lambda _: None, deadline_s: float = PATIENCE_S
) -> Fetched:
    return await fetch(claim, PeerList(), check, deadline_s)


async def ended(holder: Holder, session: KvSession, how: SessionEnd) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while holder.sessions.find(session.id) is not None:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.005)
    assert holder.sessions.ended(session.id) is how


async def test_what_comes_is_what_was_held_and_is_held_no_more(holder: Holder) -> None:
    session = holder.session()
    there = await fetched(holder.claim(session))
    assert there.offer == OFFER
    assert tuple(part.piece(0, 1 << 30) for part in there.parts) == CONTENT
    there.close()
    await ended(holder, session, SessionEnd.FETCHED)
    with pytest.raises(SessionGone):
        await fetched(holder.claim(session))


async def test_without_the_secret_there_is_no_session(holder: Holder) -> None:
    session = holder.session()
    for secret in (b"", b"t" * 32):
        with pytest.raises(SessionGone):
            await fetched(holder.claim(session, secret))
    with pytest.raises(SessionGone):
        await fetched(replace(holder.claim(session), session_id="unheard-of"))
    assert len(holder.sessions) == 1


async def test_what_is_of_no_use_is_not_transferred_and_stays(holder: Holder) -> None:
    class NoUse(Exception):
        pass

    def check(_: Offer) -> None:
        raise NoUse

    session = holder.session()
    with pytest.raises(NoUse):
        await fetched(holder.claim(session), check)
    (await fetched(holder.claim(session))).close()


async def test_one_at_a_time(holder: Holder) -> None:
    session = holder.session()
    session.break_off = lambda: None
    with pytest.raises(FetchFailed, match="somebody else") as failed:
        await fetched(holder.claim(session))
    assert failed.value.again
    session.break_off = None
    (await fetched(holder.claim(session))).close()


async def test_who_breaks_off_may_try_again(holder: Holder) -> None:
    """Also in the middle of the parts; the session is his until its lease is over."""
    session = holder.session()
    claim = holder.claim(session)
    reader, writer = await asyncio.open_connection(claim.host, claim.port)
    nonce = (await kv_wire.receive(reader))["nonce"]
    shown = proof(SECRET, "claim", nonce, "mine")
    await kv_wire.send(writer, session=session.id, nonce="mine", proof=shown)
    offer = await kv_wire.receive(reader)
    assert offer["proof"] == proof(SECRET, "offer", "mine", offer["offer"])
    await kv_wire.send(writer, accepted=True)
    await reader.readexactly(100)
    writer.transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        while session.break_off is not None:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.005)
    (await fetched(claim)).close()
    await ended(holder, session, SessionEnd.FETCHED)


async def test_a_session_that_is_ended_is_cut_off(holder: Holder) -> None:
    session = holder.session()

    def check(_: Offer) -> None:
        holder.sessions.end(session, SessionEnd.ABORTED)

    with pytest.raises(FetchFailed) as failed:
        await fetched(holder.claim(session), check)
    assert failed.value.again
    assert holder.sessions.ended(session.id) is SessionEnd.ABORTED
    with pytest.raises(OSError, match="closed"):
        session.parts[0].piece(0, 1)


async def test_a_lease_ends_what_nobody_fetches() -> None:
    holder = Holder(lease_s=0.01)
    session = holder.session()
    session.break_off = lambda: None  # somebody does
    await asyncio.sleep(0.05)
    assert len(holder.sessions) == 1
    session.break_off = None
    await ended(holder, session, SessionEnd.LAPSED)
    assert holder.sessions.size_bytes == 0


async def test_who_stays_silent_is_let_go() -> None:
    holder = Holder(deadline_s=0.05)
    await holder.server.start("127.0.0.1", 0)
    claim = holder.claim(holder.session())
    reader, writer = await asyncio.open_connection(claim.host, claim.port)
    async with asyncio.timeout(PATIENCE_S):
        await reader.read()
    writer.close()
    await holder.server.close()
    holder.sessions.end_all()


# ---- a serving side that is not what it should be ----


@asynccontextmanager
async def served_by(handler: Handler) -> AsyncIterator[Claim]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield Claim("session", SECRET, host, port)
    finally:
        server.close()
        await server.wait_closed()


def saying(
    *,
    offer: str = OFFER.encode(),
    secret: bytes = SECRET,
    parts: tuple[bytes, ...] = CONTENT,
    raw: bytes | None = None,
) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if raw is not None:
            writer.write(raw)
            await reader.read()
            return
        await kv_wire.send(writer, nonce="theirs")
        claim = await kv_wire.receive(reader)
        shown = proof(secret, "offer", claim["nonce"], offer)
        await kv_wire.send(writer, offer=offer, proof=shown)
        await kv_wire.receive(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.write_eof()
        await reader.read()

    return handler


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4) + body


@pytest.mark.parametrize(
    ("handler", "message", "again"),
    [
        (saying(secret=b"other"), "secret", False),
        (saying(offer="{}"), "not an offer", False),
        (saying(parts=(CONTENT[0][:-1] + b"x", CONTENT[1])), "checksum", True),
        (saying(parts=(CONTENT[0],)), "broke off", True),
        (saying(parts=()), "broke off", True),
        (saying(raw=b"\xff\xff\xff\xff"), "a message of 4294967295 bytes", False),
        (saying(raw=frame(b"hello")), "not JSON", False),
        (saying(raw=frame(b"[1]")), "not a message of schema 1", False),
        (saying(raw=frame(b'{"schema": 2}')), "not a message of schema 1", False),
    ],
)
async def test_what_is_not_as_it_should_be_is_not_taken(
    handler: Handler, message: str, again: bool
) -> None:
    async with served_by(handler) as claim:
        with pytest.raises(FetchFailed, match=message) as failed:
            await fetched(claim)
    assert failed.value.again is again


async def test_a_silent_side_ends_with_the_deadline() -> None:
    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with served_by(silent) as claim:
        with pytest.raises(FetchFailed, match="within"):
            await fetched(claim, deadline_s=0.05)


async def test_nobody_there() -> None:
    async with served_by(saying()) as claim:
        pass
    with pytest.raises(FetchFailed) as failed:
        await fetched(claim)
    assert failed.value.again


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": "7"},
        {"tokens": True},
        {"weights": "ab"},
        {"weights": []},
        {"model": 3},
        {"parts": [[1, "x"]]},
        {"parts": [{"size_bytes": 1}]},
        {"parts": [{"size_bytes": -1, "sha256": "x"}] * 2},
        {"more": 1},
    ],
)
def test_offers_are_read_strictly(change: dict[str, Any]) -> None:
    raw = json.loads(OFFER.encode()) | change
    with pytest.raises(MalformedMessage):
        Offer.decode(json.dumps(raw))


def test_an_offer_comes_back_equal() -> None:
    assert Offer.decode(OFFER.encode()) == OFFER


# ---- whom an engine fetches from ----


@pytest.mark.parametrize(
    ("entries", "host", "port", "address"),
    [
        ((), "127.0.0.1", 7, "127.0.0.1"),
        ((), "localhost", 7, None),
        ((), "192.0.2.1", 7, None),
        (("192.0.2.0/24",), "192.0.2.1", 7, "192.0.2.1"),
        (("192.0.2.0/24",), "127.0.0.1", 7, None),
        (("192.0.2.1:8", "192.0.2.1:7"), "192.0.2.1", 7, "192.0.2.1"),
        (("192.0.2.1:8",), "192.0.2.1", 7, None),
        (("[2001:db8::1]:7", "2001:db8::2"), "2001:db8::1", 7, "2001:db8::1"),
        (("[2001:db8::1]:7",), "2001:db8::1", 8, None),
        ((), "127.0.0.1", 0, None),
        ((), "127.0.0.1", 65536, None),
        ((), "x" * 70, 7, None),
    ],
)
async def test_peers(entries: tuple[str, ...], host: str, port: int, address: str | None) -> None:
    peers = PeerList(entries, beyond_loopback=True)
    if host == "localhost":
        assert await peers.resolved(host, port) in ("127.0.0.1", "::1")
    elif address is None:
        with pytest.raises(PeerRefused):
            await peers.resolved(host, port)
    else:
        assert await peers.resolved(host, port) == address


@pytest.mark.parametrize(
    "entry", ["", "engine-1", "10.0.0.1:x", "10.0.0.1:0", "10.0.0.1/8", "[::1"]
)
def test_entries_that_are_none(entry: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        PeerList((entry,), beyond_loopback=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"address": "127.0.0.1"},
        {"address": "127.0.0.1:x"},
        {"address": "127.0.0.1:65536"},
        {"address": "engine-1:7003"},
        {"address": "10.0.0.1:7003"},
        {"address": "0.0.0.0:7003", "beyond_loopback": True},
        {"address": "[::]:7003", "beyond_loopback": True},
        {"peers": ("10.0.0.1",)},
        {"lease_s": 0},
        {"max_held_bytes": 0},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each has words of its own)
        HandoffSettings(**settings)


def test_settings_that_can_be() -> None:
    assert HandoffSettings(address="[::1]:7").place == ("::1", 7)
    beyond = HandoffSettings(address="10.0.0.1:7", peers=("10.0.0.0/8",), beyond_loopback=True)
    assert beyond.place == ("10.0.0.1", 7)


def test_peers_beyond_this_machine_have_to_be_allowed() -> None:
    with pytest.raises(ValueError, match="beyond this machine"):
        PeerList(("10.0.0.1",))
