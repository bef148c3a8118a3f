"""The belief about an engine, on disk: written before it could be needed."""

from __future__ import annotations

import json
import os
from pathlib import Path

from app.sidecars.vllm.belief import Belief
from app.sidecars.vllm.discovery import Identity

_NAME = "engine.json"


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
