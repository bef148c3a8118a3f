"""The belief about an engine, on disk: written before it could be needed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.sidecars.vllm.belief import Belief
from app.sidecars.vllm.discovery import Identity

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

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._path = folder / _NAME
        self._identity = identity

    def read(self) -> Belief | None:
        """None: none of this life of the engine. Raises OSError; ValueError: they are damaged."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        return Belief.of(json.loads(text), self._identity)

    def write(self, belief: Belief) -> None:
        """Raises OSError."""
        aside = self._path.with_suffix(".new")
        with aside.open("w") as file:
            json.dump(belief.document(self._identity), file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
