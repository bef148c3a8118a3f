"""Breaks the minimal engine and starts it again, for `chadburn conformance --fault-hook`.

    python examples/minimal_engine_hook.py DATA_DIR INFERENCE ADMIN kill-rank 0|restart

The engine's one rank is its process, so there is no stopping the rank alone: what would have to
answer for it would stand still too. The hook has to have started it: the first `restart` does.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path


def main(folder: str, inference: str, admin: str, fault: str, _rank: str = "0") -> None:
    if fault not in ("kill-rank", "restart"):
        sys.exit(f"{fault} cannot be done to an engine of one process")
    note = Path(folder) / "pid"
    pid = int(note.read_text()) if note.exists() else None
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if fault == "restart":
        note.parent.mkdir(parents=True, exist_ok=True)
        engine = Path(__file__).with_name("minimal_engine.py")
        process = subprocess.Popen(  # noqa: S603 (its own neighbour)
            [sys.executable, engine, folder, inference, admin],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # whoever reads ours would wait for the engine's end
            start_new_session=True,
        )
        note.write_text(str(process.pid))


if __name__ == "__main__":
    main(*sys.argv[1:])
