"""Where a demo keeps its data: for its user's eyes alone, and for one demo at a time."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class FolderRefused(Exception):
    """The folder cannot be used; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Paths below one data directory."""

    path: Path

    @property
    def ready_file(self) -> Path:
        return self.path / "ready.json"

    @property
    def issuer_secret(self) -> Path:
        return self.path / "issuer.secret"

    @property
    def session_key(self) -> Path:
        """Seals what the gateway keeps for people in browsers."""
        return self.path / "session.key"

    @property
    def operator_header(self) -> Path:
        """For `curl -H @FILE`: a token on a command line could be read by others."""
        return self.path / "operator.header"

    @property
    def gateway_config(self) -> Path:
        return self.path / "gateway.toml"

    @property
    def adapters(self) -> Path:
        """From where its engine loads adapters."""
        return self.path / "adapters"

    @property
    def weights(self) -> Path:
        """From here the engine reads new weights."""
        return self.path / "weights"

    @property
    def profiles(self) -> Path:
        """Where the engine keeps its profiles, and the gateway finds them."""
        return self.path / "profiles"

    @property
    def lock(self) -> Path:
        return self.path / "demo.lock"

    def log(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.log"

    def own(self, process: str) -> Path:
        """The data directory of one process."""
        return self.path / process

    def create(self) -> None:
        """Make what is missing, mode 0700. Raises FolderRefused.

        A folder that holds other things is refused: its mode is not ours to change, and what is
        put beside them could be taken for theirs.
        """
        try:
            if self.path.is_dir() and any(self.path.iterdir()) and not self.lock.is_file():
                raise FolderRefused(f"the folder {self.path} holds something else than a demo")
            for directory in (self.path, self.log("x").parent):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                directory.chmod(0o700)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        check_writable(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held while a demo runs; the kernel lets go of it when the process ends, however."""
        with open(self.lock, "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise FolderRefused(
                    f"another demo is running in {self.path}, where {self.ready_file.name} has its"
                    " address; without that file it begins or ends: try again in some seconds"
                ) from error
            yield


def check_writable(directory: Path) -> None:
    """Raises FolderRefused where a file cannot be made."""
    probe = directory / f".probe-{secrets.token_hex(4)}"
    try:
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: Path, error: OSError) -> FolderRefused:
    return FolderRefused(f"the folder {directory} cannot be written: {error.strerror}")


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, mode 0600. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_private(path, json.dumps(document, indent=2) + "\n")
