"""Where logins are kept: a folder of the user's own, a file for each gateway.

Files are found by their gateway's address alone, and say it inside as well, so that no token is
taken for another's. Whoever can read one can act as its user, hence what is checked here: nothing
is read that others could have read or written, and nothing is followed elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.commands.ending import CommandFailed, Exit, usage

LOCK_S = 90.0
"""Longer than a renewal may take."""
_POLL_S = 0.05
_VERSION = 1
_MAX_BYTES = 256 * 1024
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Where a client's secret is read from each time: a file, a variable, or here."""

    kind: Literal["file", "variable", "kept"]
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A login. ``secret`` None: a person's. ``parameters``: what the issuer is asked with, beside
    the grant. Times in seconds since 1970."""

    gateway: str
    issuer: str
    client_id: str
    auth: str = "none"
    secret: Secret | None = None
    parameters: Mapping[str, str]
    access_token: str = field(repr=False)
    lifetime_s: float
    expires_at: float
    refresh_token: str | None = field(default=None, repr=False)
    session: str | None = None
    """What the issuer calls it; None: it does not say."""


class Logins:
    """Raises CommandFailed for whatever can't be read or written as it should."""

    def __init__(
        self,
        folder: Path,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._sleep = sleep
        self._clock = clock

    def read(self, gateway: str) -> Kept | None:
        """None: nobody has logged in there."""
        name = _name(gateway)
        try:
            with _opened(self.folder) as folder, _file(name, folder) as file:
                self._own(folder, self.folder, "folder")
                self._own(file, self.folder / name, "file")
                text = os.read(file, _MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            # A home that is no folder holds nothing; a link in place of ours may lead anywhere.
            if isinstance(error, NotADirectoryError) and not self.folder.is_symlink():
                return None
            raise self._refused(f"{self.folder / name} can't be read: {error.strerror}") from error
        try:
            return _kept(json.loads(text), gateway)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            line = f"{self.folder / name} is damaged: delete it, and log in again"
            raise self._refused(line) from error

    @contextlib.contextmanager
    def held(self, gateway: str) -> Iterator[Held]:
        """While the block runs no other process changes this login."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(self.folder) as folder:
                self._own(folder, self.folder, "folder")
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                name = f"{_name(gateway)}.lock"
                lock = os.open(name, flags, 0o600, dir_fd=folder)
                try:
                    self._lock(lock)
                    yield Held(folder, gateway)
                finally:
                    os.close(lock)  # which lets go of it; the kernel does so for a dead process
        except OSError as error:
            raise self._refused(f"{self.folder} can't be used: {error.strerror}") from error

    def _lock(self, lock: int) -> None:
        ends_at = self._clock() + LOCK_S
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock() > ends_at:
                    line = "another chadburn is renewing this login and does not finish"
                    raise CommandFailed(Exit.UNREACHABLE, line) from None
                self._sleep(_POLL_S)

    def _own(self, descriptor: int, path: Path, what: str) -> None:
        """Of what is open, so that nothing can be put in its place meanwhile."""
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise self._refused(f"the {what} {path} belongs to another user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            mode = "700" if what == "folder" else "600"
            raise self._refused(f"others may use the {what} {path}: chmod {mode} {path}")
        if what == "file" and not stat.S_ISREG(status.st_mode):
            raise self._refused(f"{path} is no file")

    def _refused(self, line: str) -> CommandFailed:
        return CommandFailed(Exit.REFUSED, line)


class Held:
    """One login, while it is nobody else's to change."""

    def __init__(self, folder: int, gateway: str) -> None:
        self._folder = folder
        self._gateway = gateway

    @contextlib.contextmanager
    def place(self) -> Iterator[Callable[[Kept], None]]:
        """What puts a login into its place, whole or not at all. The room for it is taken before
        the block begins: a refresh token that has been spent and can't be replaced is lost."""
        name = _name(self._gateway)
        self.clear()
        draft = f".{name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(draft, flags, 0o600, dir_fd=self._folder)
        try:
            with contextlib.suppress(OSError):  # not every file system can promise room
                os.posix_fallocate(file, 0, 4 * 16 * 1024)

            def put(kept: Kept) -> None:
                text = json.dumps({"version": _VERSION, **asdict(kept)}, indent=2).encode()
                os.ftruncate(file, 0)
                written = 0
                while written < len(text):
                    written += os.write(file, text[written:])
                os.fsync(file)
                os.replace(draft, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                os.fsync(self._folder)

            yield put
        finally:
            os.close(file)
            with contextlib.suppress(FileNotFoundError):  # where it is in its place
                os.unlink(draft, dir_fd=self._folder)

    def remove(self) -> None:
        self.clear()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_name(self._gateway), dir_fd=self._folder)
            os.fsync(self._folder)

    def clear(self) -> None:
        """Drafts of processes that were killed at them: there may be tokens in one."""
        for left in os.listdir(self._folder):
            if left.startswith(f".{_name(self._gateway)}."):
                os.unlink(left, dir_fd=self._folder)


def user_folder(variables: Mapping[str, str]) -> Path | None:
    """By the XDG base directory specification, which has a relative path ignored. None: this user
    has no home, as in some containers."""
    configured = Path(variables.get("XDG_CONFIG_HOME", ""))
    try:
        base = configured if configured.is_absolute() else Path.home() / ".config"
    except RuntimeError:
        return None
    return base / "chadburn"


def user_logins(variables: Mapping[str, str]) -> Logins:
    """Raises CommandFailed."""
    folder = user_folder(variables)
    if folder is None:
        raise usage("logins are kept in your home: set HOME, or XDG_CONFIG_HOME")
    return Logins(folder)


def _name(gateway: str) -> str:
    return f"{hashlib.sha256(gateway.encode()).hexdigest()[:32]}.json"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, _READ | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _file(name: str, folder: int) -> Iterator[int]:
    descriptor = os.open(name, _READ, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _kept(found: Any, gateway: str) -> Kept:
    """Raises ValueError, TypeError, KeyError or AttributeError for what `Held.place` does not
    write."""
    if found.pop("version") != _VERSION or found["gateway"] != gateway:
        raise ValueError("another version, or another gateway")
    secret = found.pop("secret")
    kept = Kept(**found, secret=None if secret is None else Secret(**secret))
    texts = (
        *(kept.issuer, kept.client_id, kept.auth, kept.access_token),
        *(kept.refresh_token or "", kept.session or ""),
    )
    numbers = (kept.lifetime_s, kept.expires_at)
    if not all(isinstance(text, str) for text in (*texts, *kept.parameters.values())):
        raise TypeError("a text is none")
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("a number is none")
    return kept
