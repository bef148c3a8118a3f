"""Starting the development issuer on a loopback socket."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from app.devidp.authority import Authority
from app.devidp.clients import demo_clients
from app.devidp.issuer import DevIssuer
from app.devidp.people import demo_people
from app.devidp.server import create_app

MIN_SECRET_CHARS = 16
WARNING = """\
######################################################################
  DEVELOPMENT TOKEN ISSUER at {issuer}
  Anyone with this run's secret or code gets administrator tokens from it.
  It is for trying Chadburn on this machine. Never trust it elsewhere.
######################################################################"""


class NotLoopback(ValueError):
    """The development issuer was asked to serve an address other machines could reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevIssuerSettings:
    """How to start a development issuer. Raises ValueError for settings that are not safe."""

    secret: str = field(repr=False)
    """Made anew for every run by whoever starts it; all clients share it."""
    admin_audience: str
    inference_audience: str
    engine_audience: str
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one, which changes the issuer's name and so ends earlier tokens."""
    data_dir: Path | None = None
    """Where the signing key is kept between runs; None for a key of this run only."""
    algorithm: str = "ES256"
    token_ttl_s: int = 3600
    device_interval_s: int = 5
    """The shortest time between two questions of a device that waits for a person."""

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_CHARS:
            raise ValueError(f"the secret needs at least {MIN_SECRET_CHARS} characters")
        audiences = {self.admin_audience, self.inference_audience, self.engine_audience}
        if len(audiences) != 3 or not all(audiences):
            raise ValueError("the three audiences must be set and differ")
        if self.host != "localhost" and not _is_loopback(self.host):
            raise NotLoopback(f"the development issuer serves loopback only, not {self.host!r}")


@contextlib.asynccontextmanager
async def running(settings: DevIssuerSettings) -> AsyncIterator[DevIssuer]:
    """Serve on a real socket while the block runs; gives the issuer, whose ``issuer`` is its URL.

    Raises OSError when the port is taken and :class:`NotLoopback` when the host's name turns
    out to mean another address.
    """
    with _bound(settings) as listener:
        port = listener.getsockname()[1]
        name = f"[{settings.host}]" if ":" in settings.host else settings.host
        issuer = DevIssuer(
            f"http://{name}:{port}",
            now=lambda: datetime.now(UTC),
            algorithm=settings.algorithm,
            data_dir=settings.data_dir,
        )
        authority = Authority(
            issuer,
            demo_clients(
                admin_audience=settings.admin_audience,
                inference_audience=settings.inference_audience,
                engine_audience=settings.engine_audience,
            ),
            demo_people(),
            secret=settings.secret,
            ttl_s=settings.token_ttl_s,
            device_interval_s=settings.device_interval_s,
        )
        app = create_app(
            authority,
            secret=settings.secret,
            hosts=[f"{host}:{port}" for host in (name, "127.0.0.1", "localhost", "[::1]")],
        )
        server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                access_log=False,
                log_level="warning",
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=3,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="dev-issuer")
        try:
            # The socket already listens, so a client that comes early waits in its backlog.
            yield issuer
        finally:
            server.should_exit = True
            await serving


def run(settings: DevIssuerSettings, ready: Callable[[DevIssuer], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``ready`` is called once tokens can be had."""
    asyncio.run(_run(settings, ready))


async def _run(settings: DevIssuerSettings, ready: Callable[[DevIssuer], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as issuer:
        print(WARNING.format(issuer=issuer.issuer), file=sys.stderr, flush=True)
        ready(issuer)
        await stop.wait()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process, which may run more than this server."""
        yield


@contextlib.contextmanager
def _bound(settings: DevIssuerSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named: asyncio turns Nagle's algorithm off only then, and each answer
    # would wait some 40 ms for an acknowledgement.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        # The name was only a promise; this is where other machines could or could not connect.
        address = listener.getsockname()[0]
        if not _is_loopback(address):
            raise NotLoopback(f"{settings.host!r} is {address} here, which is not loopback")
        listener.listen(128)
        yield listener


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
