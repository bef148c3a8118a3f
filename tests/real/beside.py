"""`chadburn sidecar` as a process beside a running server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.processes import Process, cleaned
from tests.real.servers import Server


@dataclass(frozen=True)
class Sidecar:
    process: Process
    admin: str
    inference: str


@contextmanager
def beside(server: Server, folder: Path, root: Path, *options: str) -> Iterator[Sidecar]:
    """It may read weights and adapters below `root`."""
    ready = folder / "sidecar.json"
    process = Process(
        "sidecar",
        [
            "sidecar",
            server.engine,
            f"--url={server.url}",
            f"--data-dir={folder / 'sidecar'}",
            "--admin-address=127.0.0.1:0",
            "--inference-address=127.0.0.1:0",
            "--insecure-loopback",
            f"--weights-root={root}",
            f"--lora-root={root}",
            f"--ready-file={ready}",
            *options,
        ],
        folder / "sidecar.log",
        folder,
    )
    with cleaned(process):
        process.start()
        found = process.ready(ready)
        yield Sidecar(process, found["admin_address"], found["inference_address"])
