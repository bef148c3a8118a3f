"""A sidecar as a service: for each life of the engine one life of the two listeners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from app.enginekit.runtime import Runtime, RuntimeFault
from app.enginekit.server import (
    EngineServer,
    KitSettings,
    SettingsError,
    StoreInUse,
    StoreUnreadable,
)
from app.sidecars.allowed import Allowed
from app.sidecars.http import CallError, NoAnswer, NotSent, Patience, Refused
from app.sidecars.notes import Notes, NotesInUse, held
from app.sidecars.watching import Watch, first_look

log = logging.getLogger(__name__)


class CannotServe(Exception):
    """One line for whoever started the sidecar."""


class Connection(Protocol):
    """The way to an engine's server, over all of its lives."""

    async def close(self) -> None: ...


class Found(Protocol):
    """What an engine was found to be."""

    @property
    def version(self) -> str: ...
    @property
    def models(self) -> tuple[str, ...]: ...


class Dialect(Protocol):
    """One kind of engine: its server's calls, and a runtime over them."""

    @property
    def name(self) -> str: ...

    def connect(self, url: str, patience: Patience) -> Connection:
        """With its keys. Asks nothing yet."""

    async def discover(self, http: Any, allowed: Allowed) -> Found:
        """Changes nothing. Raises NotSent, NoAnswer (both: not there yet), Refused (a key that is
        not taken among others), WrongAnswer."""

    async def attach(
        self, http: Any, found: Any, allowed: Allowed, notes: Notes, look_s: float
    ) -> tuple[Runtime, Watch]:
        """One life of the engine, of which `found` was just found. Raises RuntimeFault, OSError;
        ValueError: the notes are damaged, and what they knew may matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSettings:
    """`url` of the engine's server. `kit`: how the sidecar itself is served; its data directory
    holds the operations and the notes on the engine. `wait_s`: how long the engine may take to be
    there, at the start and after it has ended; None: for ever."""

    url: str
    kit: KitSettings
    dialect: Dialect
    allowed: Allowed = field(default_factory=Allowed)
    patience: Patience = field(default_factory=Patience)
    wait_s: float | None = None
    look_s: float = 5.0
    retry_s: float = 1.0
    stop_grace_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Addresses as bound. New with each life of the engine, but for them."""

    inference_address: str
    admin_address: str
    instance_id: str
    found: Found


Ready = Callable[[Served], None]


def run_sidecar(settings: SidecarSettings, ready: Ready, around: Around | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises CannotServe."""
    asyncio.run(_run(settings, ready, around or _as_is))


Around = Callable[[SidecarSettings], contextlib.AbstractAsyncContextManager[SidecarSettings]]
"""Settings with what needs an event loop, such as a verifier of tokens, for the time of a block."""


@contextlib.asynccontextmanager
async def _as_is(settings: SidecarSettings) -> AsyncIterator[SidecarSettings]:
    yield settings


async def _run(settings: SidecarSettings, ready: Ready, around: Around) -> None:
    async def live() -> None:
        async with around(settings) as complete:
            await serve_lives(complete, ready)

    life = asyncio.ensure_future(live())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, life.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await life


async def serve_lives(settings: SidecarSettings, ready: Ready) -> None:
    """For ever: an engine that was started anew is another instance, and what was ordered of the
    one before it ends as such orders do. Raises CannotServe."""
    http = settings.dialect.connect(settings.url, settings.patience)
    try:
        while True:
            async with served(settings, http) as (life, restarted):
                ready(life)
                settings = replace(settings, kit=_at(settings.kit, life))
                await restarted()
                log.warning("the engine was started anew")
    finally:
        await http.close()


def _at(kit: KitSettings, life: Served) -> KitSettings:
    """The next life is found where this one was."""
    return replace(kit, inference_address=life.inference_address, admin_address=life.admin_address)


@contextlib.asynccontextmanager
async def served(
    settings: SidecarSettings, http: Connection
) -> AsyncIterator[tuple[Served, Callable[[], Awaitable[object]]]]:
    """One life, and what returns when the engine has begun another. Raises CannotServe."""
    with _alone(settings.kit.data_dir):
        found, runtime, watch = await _there(settings, http)
        async with _served(settings, found, runtime, watch) as life:
            yield life


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Before anything in it is read. Raises CannotServe."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(held(folder))
        except NotesInUse as error:
            raise CannotServe(str(error)) from error
        except OSError as error:
            raise CannotServe(f"{folder}: {error}") from error
        yield


@contextlib.asynccontextmanager
async def _served(
    settings: SidecarSettings, found: Found, runtime: Runtime, watch: Watch
) -> AsyncIterator[tuple[Served, Callable[[], Awaitable[object]]]]:
    try:
        server = EngineServer(runtime, settings.kit)
        await server.start()
    except (SettingsError, StoreInUse, StoreUnreadable, OSError) as error:
        await runtime.close()
        raise CannotServe(str(error)) from error
    except BaseException:
        await runtime.close()
        raise
    try:
        life = Served(
            inference_address=server.inference_address,
            admin_address=server.admin_address,
            instance_id=server.instance_id,
            found=found,
        )
        yield life, watch.restarted.wait
    finally:
        await server.stop(settings.stop_grace_s)


async def _there(settings: SidecarSettings, http: Connection) -> tuple[Found, Runtime, Watch]:
    """An engine that is started takes its time, and whatever stands in front of it says so in its
    own way; one that ends again meanwhile is waited for like any other. Raises CannotServe."""
    loop = asyncio.get_running_loop()
    give_up_at = None if settings.wait_s is None else loop.time() + settings.wait_s
    told = False
    while True:
        try:
            found = await settings.dialect.discover(http, settings.allowed)
            return found, *await _attached(settings, http, found)
        except (CallError, RuntimeFault) as error:
            last = give_up_at is not None and loop.time() >= give_up_at
            if last or not _not_yet(error):
                raise CannotServe(f"{settings.url}: {_words(settings, error)}") from error
            if not told:
                log.warning("waiting for the engine at %s: %s", settings.url, error.message)
                told = True
            await asyncio.sleep(settings.retry_s)


def _words(settings: SidecarSettings, error: CallError | RuntimeFault) -> str:
    if isinstance(error, Refused) and error.status == _NOT_FOUND:
        return f"no server that `sidecar {settings.dialect.name}` is for: {error.message} (404)"
    return error.message


def _not_yet(error: CallError | RuntimeFault) -> bool:
    """Whether it may pass by itself."""
    match error:
        case RuntimeFault(reason=reason):
            return reason in _PASSING
        case Refused(status=status):
            return status >= _SERVER_ERROR
    return isinstance(error, NotSent | NoAnswer)


_PASSING = frozenset(
    {"ENGINE_UNREACHABLE", "ENGINE_NOT_ANSWERING", "ENGINE_DIED", "ENGINE_RESTARTED"}
)
_NOT_FOUND, _SERVER_ERROR = 404, 500


async def _attached(
    settings: SidecarSettings, http: Connection, found: Found
) -> tuple[Runtime, Watch]:
    """Raises RuntimeFault, CannotServe."""
    folder = settings.kit.data_dir
    try:
        runtime, watch = await settings.dialect.attach(
            http, found, settings.allowed, Notes(folder), settings.look_s
        )
    except (OSError, ValueError) as error:
        raise CannotServe(f"{folder}: {error}") from error
    try:
        await first_look(watch)
    except BaseException:
        await runtime.close()
        raise
    return runtime, watch
