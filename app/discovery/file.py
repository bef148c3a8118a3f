"""Engines that a file lists."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from app.discovery.engine_list import ListRefused, read_list
from app.discovery.source import Listed

LOOK_S = 2.0
SETTLE_S = 0.5
MAX_BYTES = 8 << 20


class FileSource:
    """`path`: JSON if it ends in `.json`, else TOML.

    It is read again and again rather than watched by the kernel: a mounted ConfigMap is a link that
    is changed somewhere else, and a file of another machine tells this one's kernel nothing.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        look_s: float = LOOK_S,
        settle_s: float = SETTLE_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self.listed: Listed | None = None
        self.faults: tuple[str, ...] = ()
        self.remarks: Mapping[str, str] = {}
        self._path = path
        self._look_s = look_s
        self._settle_s = settle_s
        self._sleep = sleep
        self._seen: bytes | None = None

    async def follow(self, changed: Callable[[], None]) -> None:
        while True:
            if await asyncio.to_thread(self.look):
                changed()
            await asyncio.sleep(self._look_s)

    def look(self) -> bool:
        """Read it; whether anything is other than before. A file with a fault, or none, leaves what
        was listed as it is. Blocks for as long as the disk takes, and `settle_s`."""
        before = self.faults
        try:
            content = self._content()
            if content == self._seen:
                return False
            if self._is_being_written(content):
                return False  # looked at again the next time
            self._seen = content
            self.listed = read_list(content, is_json=self._path.suffix == ".json")
            self.faults = ()
            return True
        except ListRefused as refused:
            self.faults = refused.faults
            return self.faults != before

    def _is_being_written(self, content: bytes) -> bool:
        """Half of a list is a list too: of fewer engines."""
        if self._settle_s <= 0:
            return False
        self._sleep(self._settle_s)
        return self._content() != content

    def _content(self) -> bytes:
        """Raises ListRefused."""
        try:
            with open(self._path, "rb", opener=_at_once) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    self._refuse("is no file but something else")
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            self._refuse(f"can't be read: {error.strerror}")
        if len(content) > MAX_BYTES:
            self._refuse(f"is larger than {MAX_BYTES} bytes")
        return content

    def _refuse(self, why: str) -> None:
        self._seen = None
        raise ListRefused((why,))


def _at_once(path: str, flags: int) -> int:
    """A pipe in the file's place must not keep whoever looks until somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)
