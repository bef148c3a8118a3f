"""Starting the real OpenID provider for a test."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.domain.scopes import Scope

ADMIN = "https://gateway.test/admin"
INFERENCE = "https://gateway.test/inference"
OPAQUE = "https://gateway.test/opaque"
SECRET = "a secret the provider and its client share"

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class RealProvider:
    issuer: str
    _process: subprocess.Popen[bytes]

    def rotate(self) -> str:
        """Sign with a new RS256 key from now on, and publish the old ones too; its id."""
        return str(self._told("rotate")["kid"])

    def register(self, **client: Any) -> None:
        """A client with this metadata, in the place of any of its id."""
        self._told(f"client {json.dumps(client)}")

    def _told(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        answer = _line(self._process)
        assert answer, "the provider has gone"
        return dict(json.loads(answer))


@contextlib.contextmanager
def real_provider() -> Iterator[RealProvider]:
    """Run it while the block does. Fails the test where it is not set up: a skipped test would
    pass for a proof."""
    node = shutil.which(
        "node", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if node is None:
        pytest.fail("Node is not installed; run: scripts/setup dev")
    if not (_HERE.parent / "node_modules" / "oidc-provider").is_dir():
        pytest.fail("npm oidc-provider is not installed; run: scripts/setup dev")
    environment = {
        "PATH": os.environ["PATH"],
        "NODE_ENV": "test",
        "ADMIN": ADMIN,
        "INFERENCE": INFERENCE,
        "OPAQUE": OPAQUE,
        "ADMIN_SCOPES": " ".join(Scope),
        "SECRET": SECRET,
    }
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [node, "provider.mjs"],
            cwd=_HERE,
            env=environment,
            stdin=subprocess.PIPE,  # its end ends the provider, also if this process is killed
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,  # else a line could wait in our buffer, where select does not see it
        ) as process,
    ):
        try:
            line = _line(process)
            if not line:
                process.kill()
                process.wait()
                errors.seek(0)
                pytest.fail(f"the provider did not start: {errors.read().decode()}")
            yield RealProvider(str(json.loads(line)["issuer"]), process)
        finally:
            process.kill()


def _line(process: subprocess.Popen[bytes]) -> bytes:
    """The next one that is for us: the provider prints notices too."""
    assert process.stdout is not None
    line = b"notice"
    while line and not line.startswith(b"{"):
        ready, _, _ = select.select([process.stdout], [], [], 60)
        line = process.stdout.readline() if ready else b""
    return line
