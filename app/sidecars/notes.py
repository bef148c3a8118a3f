"""What is believed of an engine, on disk: written before it could be needed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAME = "engine.json"
_LOCK = "engine.lock"


class NotesInUse(Exception):
    """Another sidecar has them."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else reads or writes notes there meanwhile: what a second sidecar has read before an
    order of the first began, or believes of another engine, would be written over what the first
    one knows. Ends with the process. Raises NotesInUse, OSError."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NotesInUse(f"{folder} is in use by another sidecar") from error
        yield
    finally:
        os.close(lock)


class Notes:
    """Small, written whole, and synchronously: nothing may happen between thinking it and having it
    on the disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME

    def read(self) -> Any:
        """A document of JSON; whether it is of this life of the engine, the reader has to see.
        None: nothing was ever noted. Raises OSError; ValueError: it is damaged."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        return json.loads(text)

    def write(self, document: Any) -> None:
        """Raises OSError."""
        aside = self._path.with_suffix(".new")
        with aside.open("w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
