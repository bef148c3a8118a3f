"""`chadburn` processes as a user or an init system would run them, and what may befall them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Ten times and more what an idle machine needs; a test that runs into one of these has failed.
START_S = 150.0
STOP_S = 60.0
POLL_S = 0.05


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without settings of the program, and one thread for torch."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CHADBURN_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", **variables}


def chadburn(
    *arguments: str | Path, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


# What the installed script does, also where the script is not on the path.
COMMAND = (sys.executable, "-P", "-m", "app.cli")


@dataclass
class Process:
    """A `chadburn`, or another command, that runs on; its output goes to `log`."""

    name: str
    arguments: list[str]
    log: Path
    cwd: Path
    command: tuple[str, ...] = COMMAND
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.log, "ab") as output:
            self.popen = subprocess.Popen(
                [*self.command, *self.arguments],
                cwd=self.cwd,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def kill(self) -> None:
        """As the out-of-memory killer does it: no goodbye, and nothing of the session is left."""
        assert self.popen is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.popen.pid, signal.SIGKILL)
        self.popen.wait(STOP_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit code."""
        assert self.popen is not None
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self.popen is not None
        try:
            return self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end:\n{self.said()}") from None

    def clean(self) -> None:
        """After a test, whatever became of it."""
        if self.running:
            self.stop()

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def ready(self, path: Path) -> dict[str, Any]:
        """What it writes into its ready file."""
        assert self.popen is not None
        until = time.monotonic() + START_S
        while not path.exists():
            assert self.popen.poll() is None, f"{self.name} ended early:\n{self.said()}"
            assert time.monotonic() < until, f"{self.name} is not ready:\n{self.said()}"
            time.sleep(POLL_S)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


@dataclass
class Demo:
    """A running `chadburn demo`; `ready` is its ready file."""

    process: Process
    folder: Path
    ready: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, folder: Path, *arguments: str) -> Demo:
        """Started, and not waited for."""
        folder.mkdir(parents=True, exist_ok=True)
        process = Process(
            "demo",
            [
                "demo",
                "--port=0",
                "--data-dir=data",
                f"--ready-file={folder / 'ready.json'}",
                *arguments,
            ],
            folder / "demo.log",
            folder,
        )
        process.start()
        return cls(process, folder)

    @classmethod
    def start(cls, folder: Path, *arguments: str) -> Demo:
        demo = cls.begin(folder, *arguments)
        demo.ready = demo.process.ready(folder / "ready.json")
        return demo

    def logs(self) -> str:
        """What all its processes said last, for a failing test."""
        parts = [f"--- demo\n{self.process.said()}"]
        for log in sorted((self.folder / "data" / "logs").glob("*.log")):
            parts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        return "\n".join(parts)


def descendants(pid: int) -> set[int]:
    """All processes below one, read from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text()
                parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found: set[int] = set()
    fresh = {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if (Path(f"/proc/{pid}/stat")).read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found


def gone(pids: set[int]) -> set[int]:
    """Waits for them to end; those that did not."""
    until = time.monotonic() + STOP_S
    while alive(pids) and time.monotonic() < until:
        time.sleep(POLL_S)
    return alive(pids)


@contextlib.contextmanager
def cleaned(*processes: Process) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.clean()
