"""Starting Canaille for a test."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx2
import pytest

from app.domain.scopes import Scope

# Nothing that a form would escape: Canaille takes Basic credentials without undoing that.
SECRET = "what-Canaille-and-its-clients-share"
PASSWORD = "correct horse battery staple"

_PROGRAM = Path(__file__).with_name("provider.py")
_INTERPRETER = Path(".venv-canaille", "bin", "python")


@contextlib.contextmanager
def canaille() -> Iterator[str]:
    """Run it while the block does; gives the issuer URL. Fails the test where it is not set up."""
    # Beside the project's own environment, which may be a link to another checkout's.
    beside = (Path(sys.prefix).parent, Path(sys.prefix).resolve().parent)
    python = next((at for folder in beside if (at := folder / _INTERPRETER).exists()), None)
    if python is None:
        pytest.fail("Canaille is not installed; run: scripts/setup dev")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as said,
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(
            [str(python), "-W", "ignore", str(_PROGRAM)],
            env={"PATH": os.environ["PATH"]},
            cwd=folder,
            stdin=subprocess.PIPE,  # its end ends the provider, also if this process is killed
            stdout=said,
            stderr=said,
            pass_fds=[listener.fileno()],
        ) as process,
    ):
        port = listener.getsockname()[1]
        wanted = {
            "folder": folder,
            "descriptor": listener.fileno(),
            "port": port,
            "secret": SECRET,
            "password": PASSWORD,
            "scopes": list(Scope),
        }
        assert process.stdin is not None
        try:
            process.stdin.write(f"{json.dumps(wanted)}\n".encode())
            process.stdin.flush()
            issuer = f"http://127.0.0.1:{port}"
            _wait(issuer, process, said)
            yield issuer
        finally:
            process.kill()


def _wait(issuer: str, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    """The socket listens already, so the first request waits for the answer."""
    try:
        httpx2.get(
            f"{issuer}/.well-known/openid-configuration", timeout=280, trust_env=False
        ).raise_for_status()
    except httpx2.HTTPError as error:
        process.kill()
        process.wait()
        said.seek(0)
        pytest.fail(f"Canaille did not start ({error!r}): {said.read().decode()}")
