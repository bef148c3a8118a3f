"""Faults from outside: a command of the engine's author that breaks the engine and starts it.

It is called as `CMD kill-rank N`, `CMD stop-rank N` and `CMD restart`. Each returns when it is
done, with code 0. `restart` ends what is left of the engine, also of one that was broken, and
starts it again with the same store at the same addresses; it need not wait until it answers.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from typing import Protocol

TIMEOUT_S = 120.0


class HookFailed(Exception):
    """The message is one line for the report. `declined`: it said no, by its code."""

    def __init__(self, line: str, *, declined: bool = False) -> None:
        super().__init__(line)
        self.declined = declined


class FaultHook(Protocol):
    async def run(self, *words: str) -> None:
        """Raises HookFailed."""


class CommandHook:
    """`command` is split like a shell would, and run without one. Raises ValueError when it
    cannot be split, or is empty."""

    def __init__(self, command: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._words = shlex.split(command)
        if not self._words:
            raise ValueError("the fault hook is empty")
        self._timeout_s = timeout_s

    async def run(self, *words: str) -> None:
        asked = " ".join(words)
        # The output goes to a pipe that an engine started by the hook would inherit and keep open;
        # hence nothing here waits for its end.
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                # A group of its own: Ctrl-C ends the suite, which still needs the hook to tidy up.
                start_new_session=True,
            )
        except OSError as error:
            raise HookFailed(f"the fault hook cannot be run: {error.strerror}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise HookFailed(
                f"the fault hook did not end within {self._timeout_s:g} s at {asked}"
            ) from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if code != 0:
            raise HookFailed(f"the fault hook ended with code {code} at {asked}", declined=True)
