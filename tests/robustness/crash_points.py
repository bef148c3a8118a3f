"""Named points in the course of an order at which the gateway's process can be killed.

The gateway passes some of them itself, the engine the others, each a process of its own; they meet
in a folder. The point that is armed there kills the gateway, once.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.robustness.history import Recorder, Struck

# In the gateway, in the order in which an order passes them.
ACCEPT_UNCOMMITTED = "accept.uncommitted"  # all is written, and the database has not said yes
ACCEPT_COMMITTED = "accept.committed"  # nobody has been told
BEFORE_CALL = "call.before"  # the ledger says that it is sent, and it is not
AFTER_CALL = "call.answered"  # the engine has said that it takes it, and nobody wrote it down
END_UNCOMMITTED = "end.uncommitted"
END_COMMITTED = "end.committed"  # and no stream has been told
# At the engine.
ARRIVED = "engine.arrived"  # before it has taken it on
ACCEPTED = "engine.accepted"  # it is at it
DONE = "engine.done"  # all ranks have done it; the engine's store does not say so yet
# In a gateway that comes after one that was killed.
LEASE_TAKEN = "take_over.lease"  # and nothing done under it
ENGINE_ASKED = "take_over.asked"  # what it said is not written down

POINTS = (
    ACCEPT_UNCOMMITTED,
    ACCEPT_COMMITTED,
    BEFORE_CALL,
    ARRIVED,
    AFTER_CALL,
    ACCEPTED,
    DONE,
    END_UNCOMMITTED,
    END_COMMITTED,
)
TAKE_OVER_POINTS = (LEASE_TAKEN, ENGINE_ASKED)


class CrashPoints:
    """`folder/armed` names one; `folder/gateway.pid` is whom it kills."""

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        self._folder = folder
        self._recorder = recorder

    def arm(self, point: str) -> None:
        """The next time that anybody passes it; once."""
        aside = self._folder / "arming"
        aside.write_text(point)
        aside.rename(self._folder / "armed")

    @property
    def armed(self) -> str | None:
        try:
            return (self._folder / "armed").read_text()
        except FileNotFoundError:
            return None

    def came(self) -> None:
        """This process is the gateway now."""
        aside = self._folder / "gateway.coming"
        aside.write_text(str(os.getpid()))
        aside.rename(self._folder / "gateway.pid")

    def reach(self, point: str) -> None:
        if self.armed != point:
            return
        try:
            (self._folder / "armed").rename(self._folder / "struck")
        except FileNotFoundError:
            return  # another one who passed it was first
        self._recorder.write(Struck(process="gateway", what="killed", point=point))
        os.kill(int((self._folder / "gateway.pid").read_text()), signal.SIGKILL)
