"""Processes that are killed and started again, many times: each is forked from one that has
imported everything and done nothing, so that a start costs what the start of a gateway costs.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.e2e.processes import POLL_S, START_S, STOP_S

_PRELOADED = ["tests.robustness.breaking_gateway", "tests.robustness.counting_engine"]


class EndedEarly(Exception):
    """Before it was ready; says what it said."""


@dataclass
class Killed:
    """One process; its output goes to `log`."""

    log: Path
    process: ForkServerProcess

    @classmethod
    def start(cls, log: Path, main: Callable[..., None], *arguments: Any) -> Killed:
        """`main` is a function of a module, called with `arguments` in the new process."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        process = context.Process(target=_run, args=(str(log), main, *arguments), daemon=True)
        process.start()
        return cls(log, process)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(STOP_S)

    async def stop(self) -> int:
        """By SIGTERM; the exit code."""
        self.process.terminate()
        async with asyncio.timeout(STOP_S):
            return await self.ended()

    async def ended(self) -> int:
        """The exit code, once it has ended; negative: the signal that it was killed by."""
        while self.process.exitcode is None:  # noqa: ASYNC110 - another process ends it
            await asyncio.sleep(POLL_S)
        return self.process.exitcode

    async def ready(self, path: Path) -> dict[str, str]:
        """What it writes into its ready file. Raises EndedEarly."""
        async with asyncio.timeout(START_S):
            while (found := _read(path)) is None:
                if self.process.exitcode is not None:
                    raise EndedEarly(self.said())
                await asyncio.sleep(POLL_S)
        return found

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def tell(path: Path, found: dict[str, str]) -> None:
    """Write a ready file: whole, or not there yet."""
    aside = path.with_suffix(".coming")
    aside.write_text(json.dumps(found))
    aside.rename(path)


def _read(path: Path) -> dict[str, str] | None:
    try:
        found: dict[str, str] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found


def _run(log: str, main: Callable[..., None], *arguments: Any) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(*arguments)
