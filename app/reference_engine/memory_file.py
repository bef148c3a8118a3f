"""Files of memory that the front end makes for its ranks to write to or read from.

They have no name that could be left behind: the last process that has one open takes it along, and
only processes of the same user can reach it, by way of the one that made it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from app.reference_engine.handoff_messages import PartFile


class MemoryFile:
    """Closing it twice is harmless. Linux alone has them."""

    def __init__(self, name: str) -> None:
        """``name`` is seen in /proc alone. Raises OSError."""
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._closed = False

    @property
    def handle(self) -> PartFile:
        """For other processes of this user, while this one lives and has it open."""
        return PartFile(f"/proc/{os.getpid()}/fd/{self._fd}", os.fstat(self._fd).st_ino)

    def append(self, content: bytes) -> None:
        """Raises OSError, also where memory is short."""
        left = memoryview(content)
        while left:
            left = left[os.write(self._fd, left) :]

    def piece(self, start: int, size: int) -> bytes:
        """Shorter at the end of the file. Raises OSError, also once it is closed."""
        if self._closed:
            raise OSError(errno.EBADF, "the file is closed")
        return os.pread(self._fd, size, start)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)


@contextmanager
def memory_files(count: int, name: str = "chadburn-weights") -> Iterator[tuple[str, ...]]:
    """Paths of so many empty files for the time of the block. Raises OSError."""
    with ExitStack() as stack:
        files = [MemoryFile(name) for _ in range(count)]
        for file in files:
            stack.callback(file.close)
        yield tuple(file.handle.path for file in files)
