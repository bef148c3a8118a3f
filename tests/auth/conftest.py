"""A clock to turn, an issuer's web origin that misbehaves on request, and tokens from it."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx2
import pytest

from app.auth.tokens.issuers import IssuerConfig
from app.auth.tokens.verifier import TokenVerifier
from app.devidp.issuer import DevIssuer
from app.ledger import upgrade

ADMIN = "https://gateway.test/admin"
INFERENCE = "https://gateway.test/inference"


class Clock:
    """Wall and monotonic time that pass only when told to."""

    def __init__(self) -> None:
        self.wall = datetime(2026, 11, 2, 12, 0, 0, tzinfo=UTC)
        self.ticks = 1000.0

    def now(self) -> datetime:
        return self.wall

    def monotonic(self) -> float:
        return self.ticks

    def advance(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)
        self.ticks += seconds


@dataclass
class Answer:
    """What the origin says at one path."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    """Where set, the answer comes only once the event is."""


class Origin:
    """A real HTTP server on loopback, down to the socket, with answers set by path."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: Counter[str] = Counter()
        self.posted: list[tuple[dict[str, str], dict[str, str]]] = []
        """Headers and form of each POST."""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._issuer: DevIssuer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Connections are refused from here on."""
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    def publish(self, issuer: DevIssuer) -> None:
        """Serve the issuer's metadata and keys as they are at each request."""
        self._issuer = issuer

    def say(self, path: str, body: bytes, **how: Any) -> None:
        """Answer so at ``path`` from now on."""
        self.answers[path] = Answer(body, **how)

    def _answer(self, path: str) -> Answer:
        if path in self.answers:
            return self.answers[path]
        if self._issuer is not None and path == "/.well-known/openid-configuration":
            return Answer(json.dumps(self._issuer.metadata()).encode())
        if self._issuer is not None and path == "/jwks":
            return Answer(json.dumps(self._issuer.jwks()).encode())
        return Answer(b"{}", status=404)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            self.requests[path] += 1
            if head.startswith(b"POST"):
                lines = head.decode().split("\r\n")[1:-2]
                sent = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(sent["content-length"]))
                self.posted.append((sent, dict(parse_qsl(body.decode()))))
            answer = self._answer(path)
            if answer.gate is not None:
                await answer.gate.wait()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(answer.body)),
                "connection": "close",
                **answer.headers,
            }
            lines = [f"HTTP/1.1 {answer.status} X", *(f"{k}: {v}" for k, v in headers.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + answer.body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def tls() -> ssl.SSLContext:
    """One context for all clients: loading the authorities anew for each costs most of a test."""
    return ssl.create_default_context()


@pytest.fixture
async def http(tls: ssl.SSLContext) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(verify=tls, trust_env=False) as client:
        yield client


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    origin = Origin()
    await origin.start()
    yield origin
    await origin.stop()


@pytest.fixture
async def issuer(origin: Origin, clock: Clock) -> DevIssuer:
    issuer = DevIssuer(origin.url, now=clock.now)
    origin.publish(issuer)
    return issuer


class KeptProofs:
    """Which proofs were shown, in this process alone."""

    def __init__(self) -> None:
        self.until: dict[str, datetime] = {}

    async def first_use(self, digest: str, until: datetime) -> bool:
        if digest in self.until:
            return False
        self.until[digest] = until
        return True


@dataclass
class Verifiers:
    """Makes verifiers for the test's issuer, and ends them with the test."""

    issuer: DevIssuer
    http: httpx2.AsyncClient
    clock: Clock
    made: list[TokenVerifier] = field(default_factory=list)
    proofs: KeptProofs = field(default_factory=KeptProofs)

    def config(self, **changes: Any) -> IssuerConfig:
        settings: dict[str, Any] = {
            "issuer": self.issuer.issuer,
            "audience": ADMIN,
            "inference_audiences": (INFERENCE,),
            **changes,
        }
        return IssuerConfig(**settings)

    def make(self, *configs: IssuerConfig, **options: Any) -> TokenVerifier:
        verifier = TokenVerifier(
            configs or (self.config(),),
            http=self.http,
            now=self.clock.now,
            monotonic=self.clock.monotonic,
            proofs=self.proofs,
            **options,
        )
        self.made.append(verifier)
        return verifier


@pytest.fixture
async def verifiers(
    issuer: DevIssuer, http: httpx2.AsyncClient, clock: Clock
) -> AsyncIterator[Verifiers]:
    verifiers = Verifiers(issuer, http, clock)
    yield verifiers
    for verifier in verifiers.made:
        await verifier.aclose()


@pytest.fixture(scope="session")
async def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger on SQLite that nobody has used: to make one anew costs more than most tests."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    await upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def ledger_url(migrated: Path, tmp_path: Path) -> str:
    """Of a ledger for one test."""
    copy = tmp_path / "ledger.db"
    shutil.copyfile(migrated, copy)
    return f"sqlite+aiosqlite:///{copy}"
