"""A rank that breaks where a test says so: the real worker, with its connections watched.

Started as a rank's process in the place of `app.reference_engine.worker`. On its way through the
order log a rank passes points, named after the order: `CommitChange.received` before it does
anything about it, `.applied` when it has done it and not yet said so, `.acknowledged` when it has.
Each point passed is written down; where a fault is armed for it, the process gets the signal.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from app.reference_engine import messages as m
from app.reference_engine.pulse import Pulse
from app.reference_engine.rank_connection import FrontEnd, Inbox, LogItem
from app.reference_engine.worker import run

FOLDER = "CHADBURN_TEST_FAULTS"  # the environment variable that names it
MODULE = "tests.robustness.breaking_rank"


class Faults:
    """The folder through which test and ranks meet. `rank-N.log` has the points that rank N passed,
    one a line, over all its lives; `rank-N.pid` is its process; `armed-N` holds one fault, and
    `broke-N` says when the latest struck."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arm(self, rank: int, point: str, number: signal.Signals) -> None:
        """The next time that rank passes the point; once."""
        self._armed(rank).write_text(f"{point} {number.name}")

    def armed(self, rank: int) -> bool:
        return self._armed(rank).exists()

    def disarm(self, rank: int) -> None:
        self._armed(rank).unlink(missing_ok=True)

    def passed(self, rank: int) -> list[str]:
        log = self._folder / f"rank-{rank}.log"
        return log.read_text().splitlines() if log.exists() else []

    def broke_at(self, rank: int) -> float:
        """When it last broke, in seconds of the clock that all processes have in common."""
        return float((self._folder / f"broke-{rank}").read_text())

    def pid(self, rank: int) -> int:
        """Of the latest process."""
        return int((self._folder / f"rank-{rank}.pid").read_text())

    def came(self, rank: int) -> None:
        aside = self._folder / f"rank-{rank}.coming"
        aside.write_text(str(os.getpid()))
        aside.rename(self._folder / f"rank-{rank}.pid")

    def reach(self, rank: int, point: str) -> None:
        with (self._folder / f"rank-{rank}.log").open("a") as log:
            log.write(f"{point}\n")
        try:
            where, _, name = self._armed(rank).read_text().partition(" ")
        except FileNotFoundError:
            return
        if where == point:
            self.disarm(rank)
            (self._folder / f"broke-{rank}").write_text(str(time.monotonic()))
            # To this thread: the whole process stops, and this thread does not get one step on.
            signal.pthread_kill(threading.get_ident(), signal.Signals[name])

    def _armed(self, rank: int) -> Path:
        return self._folder / f"armed-{rank}"


class Points:
    """What both connections know of this rank's way."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._rank = 0
        self._names: dict[int, str] = {}

    def began(self, rank: int) -> None:
        self._rank = rank
        self._faults.came(rank)

    def received(self, entry: m.Entry) -> None:
        self._names[entry.index] = type(entry.order).__name__
        self._faults.reach(self._rank, f"{self._names[entry.index]}.received")

    def answered(self, reports: Sequence[m.Report], point: str) -> None:
        for report in reports:
            if isinstance(report, m.Ack) and report.error is None:
                self._faults.reach(self._rank, f"{self._names[report.index]}.{point}")


class WatchedInbox(Inbox):
    def __init__(self, points: Points) -> None:
        super().__init__()
        self._points = points

    def next(self, timeout_s: float | None) -> LogItem | None:
        item = super().next(timeout_s)
        if isinstance(item, m.Entry):
            self._points.received(item)
        return item


class WatchedFrontEnd(FrontEnd):
    def __init__(
        self, connected: socket.socket, inbox: Inbox, pulse: Pulse, points: Points
    ) -> None:
        super().__init__(connected, inbox, pulse)
        self._points = points

    def receive_start(self) -> m.Start:
        start = super().receive_start()
        self._points.began(start.rank)
        return start

    def send(self, reports: Sequence[m.Report]) -> None:
        self._points.answered(reports, "applied")
        super().send(reports)
        self._points.answered(reports, "acknowledged")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connected, *peers = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    points, pulse = Points(Faults(Path(os.environ[FOLDER]))), Pulse()
    inbox = WatchedInbox(points)
    run(WatchedFrontEnd(connected, inbox, pulse, points), inbox, peers, pulse)


if __name__ == "__main__":
    main()
