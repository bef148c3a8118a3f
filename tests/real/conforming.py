"""`chadburn conformance` on a sidecar beside a running server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.processes import COMMAND, environment
from tests.real.beside import Sidecar


def own_models(models: Path, folder: Path) -> Path:
    """A copy of the models, with a place for damaged ones."""
    root = folder / "models"
    shutil.copytree(models, root)
    (root / "scratch").mkdir()
    return root


def conformance(sidecar: Sidecar, root: Path, report: Path, *more: str) -> dict[str, Any]:
    """Everything that it can try; by their ids, the cases that failed. The report lies in `report`,
    with what could not be tried and why."""
    done = subprocess.run(
        [
            *COMMAND, "conformance", sidecar.admin, f"--inference={sidecar.inference}",
            "--destructive", f"--weights={root / 'b'}", f"--lora={root / 'lora-one'}",
            f"--scratch={root / 'scratch'}", "--json", *more,
        ],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    report.write_text(done.stdout)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert not told["left_behind"], done.stderr
    return {case["id"]: case for case in told["cases"] if case["verdict"] == "fail"}
