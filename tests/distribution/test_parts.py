"""What the tests need from outside Python is there, and came without root."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "missing; run: scripts/setup dev"


def test_node_runs_the_identity_provider() -> None:
    node = Path(sys.executable).with_name("node")
    assert node.exists(), f"node is {INSTALL}"
    assert (ROOT / "tests/idp/node_modules").is_dir(), f"tests/idp/node_modules is {INSTALL}"
    script = (
        "import { Provider } from 'oidc-provider';"
        "console.log(new Provider('http://localhost:1', {}).issuer);"
    )
    done = subprocess.run(
        [str(node), "--input-type=module", "--no-warnings", "-e", script],
        cwd=ROOT / "tests" / "idp", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["http://localhost:1"], done.stderr
