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
from pathlib import Path

import pytest

from app.domain.scopes import Scope

ADMIN = "https://gateway.test/admin"
INFERENCE = "https://gateway.test/inference"
OPAQUE = "https://gateway.test/opaque"
SECRET = "a secret the provider and its client share"

_HERE = Path(__file__).parent


@contextlib.contextmanager
def real_provider() -> Iterator[str]:
    """Run it while the block does; gives the issuer URL. Fails the test where it is not set up:
    a skipped test would pass for a proof."""
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
        ) as process,
    ):
        assert process.stdout is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], 60)
            line = process.stdout.readline() if ready else b""
            if not line:
                process.kill()
                process.wait()
                errors.seek(0)
                pytest.fail(f"the provider did not start: {errors.read().decode()}")
            yield str(json.loads(line)["issuer"])
        finally:
            process.kill()
