"""A child process that does not outlive its parent."""

from __future__ import annotations

import os
import signal
import threading
import time

GRACE_S = 20.0


def end_with_stdin() -> None:
    """End this process once its standard input is closed, as it is when the parent dies.

    The parent holds the other end of a pipe and never writes to it; even a killed parent lets go
    of it. First the orderly way; a process that hangs in it is ended after `GRACE_S`.
    """
    threading.Thread(target=_wait_for_the_end, name="end-with-stdin", daemon=True).start()


def _wait_for_the_end() -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass  # closed before it was read: the same
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
