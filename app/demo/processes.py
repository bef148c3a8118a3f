"""The demo's child processes: started one by one, ended in the opposite order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.demo.folder import Folder

STOP_S = 20.0
POLL_S = 0.05


class ChildEnded(Exception):
    """A process of the demo ended by itself; the message says which one and what it said last."""


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    process: asyncio.subprocess.Process
    log: Path

    def ended(self) -> ChildEnded | None:
        code = self.process.returncode
        if code is None:
            return None
        if code < 0:  # what it said last has nothing to do with it
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with {code}: {last_line(self.log)}"
        return ChildEnded(f"the {self.name} {how} (log: {self.log})")


class Children:
    """All processes of one demo. `stop` must be called, whatever happened before."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._children: list[Child] = []

    @property
    def pids(self) -> dict[str, int]:
        return {child.name: child.process.pid for child in self._children}

    async def start(self, name: str, arguments: Sequence[str]) -> None:
        """`chadburn ARGUMENTS` as a process; what it says goes to its log.

        A session of its own: Ctrl-C reaches the demo alone, which then ends its processes in
        order. Its standard input is a pipe that closes when the demo is gone, even when killed.
        """
        log = self._folder.log(name)
        output = _emptied(log)
        try:
            process = await asyncio.create_subprocess_exec(
                # -P: a folder named `app` where the demo is started must not be taken for ours.
                sys.executable,
                "-P",
                "-m",
                "app.cli",
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=_own_variables(),
            )
        finally:
            os.close(output)
        child = Child(name, process, log)
        self._children.append(child)

    def check(self) -> None:
        """Raises ChildEnded for the first one that is gone."""
        for child in self._children:
            if (ended := child.ended()) is not None:
                raise ended

    async def said(self, path: Path) -> Mapping[str, Any]:
        """What a child writes into its ready file, whole as soon as it is there. Raises
        ChildEnded."""
        while (found := _read(path)) is None:
            self.check()
            await asyncio.sleep(POLL_S)
        return found

    async def first_end(self) -> ChildEnded:
        """Waits for a child to end by itself."""
        waiting = [asyncio.ensure_future(child.process.wait()) for child in self._children]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        return next(filter(None, (child.ended() for child in self._children)))

    async def stop(self) -> None:
        """Last started, first ended: SIGTERM, and SIGKILL for one that does not heed it."""
        for child in reversed(self._children):
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.terminate()
                try:
                    async with asyncio.timeout(STOP_S):
                        await child.process.wait()
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.kill()
                    await child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()


def _emptied(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return "nothing in its log"
    return lines[-1].strip().removeprefix("chadburn: ") if lines else "nothing in its log"


def _own_variables() -> dict[str, str]:
    """The environment without settings of ours: a demo is the same whatever is set around it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CHADBURN_")}
