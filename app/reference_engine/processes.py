"""Starting modules of this package as processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import app

WORKER = "app.reference_engine.worker"


def own_module(name: str) -> tuple[str, ...]:
    """The command that runs a module. Without ``-P``, a folder named ``app`` in the directory
    where the engine was started would be taken for this package."""
    return (sys.executable, "-P", "-m", name)


def stopped(pid: int) -> bool:
    """Whether a signal, or a debugger, keeps that child from running at all."""
    try:
        how = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, pid, how) is not None
    except ChildProcessError:  # its end has been seen
        return False


def own_environment() -> dict[str, str]:
    """This process's environment, with the place from which it has this package."""
    environment = dict(os.environ)
    roots = [str(Path(app.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
    return environment
