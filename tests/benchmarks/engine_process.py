"""A reference engine as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.reference_engine.serving import ServedEngine
from tests.e2e.processes import START_S, environment


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[ServedEngine]:
    folder.mkdir()
    ready = folder / "ready.json"
    process = subprocess.Popen(
        [
            sys.executable, "-P", "-m", "app.reference_engine", "--insecure-loopback",
            f"--data-dir={folder / 'data'}", f"--ready-file={ready}", *arguments,
        ],
        env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None, "the engine did not start"
            assert time.monotonic() < until, "the engine does not get ready"
            time.sleep(0.05)
        yield ServedEngine(**json.loads(ready.read_text()))
    finally:
        process.terminate()
        process.wait()
