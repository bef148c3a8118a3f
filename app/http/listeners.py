"""Listeners of callers that are known by the way they come: sockets of this machine, and TLS with
certificates of clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from app.auth.identities.certificates import LiveCertificates
from app.auth.identities.known import UnixSocket
from app.http.connection import Connection
from app.observability.log import logger

_BACKLOG = 256
_MODE = 0o600
_LOOK_S = 5.0
_HANDSHAKE_S = 10.0
_FAREWELL_S = 2.0
_MOST_HANDSHAKES = 64
"""At once. One more takes the place of the one that has been at it for longest, so that whoever
comes to say nothing keeps nobody out."""
_AFTER_ERROR_S = 0.5

_log = logger("chadburn.listeners")


class SocketRefused(Exception):
    """Why there is no socket at a path."""


@contextmanager
def unix_socket(wanted: UnixSocket) -> Iterator[socket.socket]:
    """Listens at a path, for its user alone, and takes it away again. One that a process has left
    behind is replaced; one that is answered is not. Raises SocketRefused, OSError."""
    path = wanted.path
    if not hasattr(socket, "SO_PEERCRED"):
        raise SocketRefused("this system does not say who connects to a socket")
    _check_folder(path.parent)
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Never open to others, not even until its mode is set. No thread runs beside this yet.
        before = os.umask(0o777 & ~_MODE)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        ours = path.lstat()
        try:
            if wanted.uid != os.geteuid():
                _give_to(path, wanted.uid)
            listener.listen(_BACKLOG)
            yield listener
        finally:
            with contextlib.suppress(OSError):
                now = path.lstat()
                if (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino):
                    path.unlink()
    finally:
        listener.close()


def _check_folder(folder: Path) -> None:
    """Whoever may write there can put a socket of its own in the place of ours."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise SocketRefused("its folder belongs to somebody else")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        raise SocketRefused("others may write in its folder")


def _clear(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise SocketRefused("there is something else")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass
    raise SocketRefused("somebody listens there")


def _give_to(path: Path, uid: int) -> None:
    try:
        os.chown(path, uid, -1, follow_symlinks=False)
    except PermissionError:
        raise SocketRefused("only root can have a socket for another user") from None


class TlsListener:
    """Takes connections over TLS that show a certificate. Each handshake is by the files as they
    are then; connections that were let in under authorities which count no more are ended."""

    def __init__(self, identity: str, listener: socket.socket, live: LiveCertificates) -> None:
        """`listener` listens already, and is closed at the end."""
        self.identity = identity
        self._socket = listener
        self._live = live
        self._greeting: dict[asyncio.Task[None], None] = {}
        self._open: WeakSet[Connection] = WeakSet()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, make: Callable[[], Connection]) -> None:
        self._socket.setblocking(False)
        self._begin(self._accept(make))
        self._begin(self._keep_looking())

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    def look(self) -> None:
        """Take replaced files."""
        if self._live.look():
            _log.info("authorities_replaced", identity=self.identity)
            for connection in list(self._open):
                connection.shutdown()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    async def _accept(self, make: Callable[[], Connection]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                taken, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # no more files, most likely; those who have come wait
                _log.warning("not_accepted", identity=self.identity, why=type(error).__name__)
                await asyncio.sleep(_AFTER_ERROR_S)
                continue
            if len(self._greeting) >= _MOST_HANDSHAKES:
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]
                oldest.cancel()
            greeting = self._begin(self._greet(taken, make))
            self._greeting[greeting] = None
            greeting.add_done_callback(lambda done: self._greeting.pop(done, None))

    async def _greet(self, taken: socket.socket, make: Callable[[], Connection]) -> None:
        def made() -> Connection:
            connection = make()
            connection.identity = self.identity
            self._open.add(connection)
            return connection

        try:
            self.look()
            await asyncio.get_running_loop().connect_accepted_socket(
                made,
                taken,
                ssl=self._live.context,
                ssl_handshake_timeout=_HANDSHAKE_S,
                ssl_shutdown_timeout=_FAREWELL_S,
            )
        except (OSError, asyncio.CancelledError) as error:  # ssl.SSLError is an OSError
            taken.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            why = getattr(error, "verify_message", None) or type(error).__name__
            _log.info("handshake_failed", identity=self.identity, why=why)
