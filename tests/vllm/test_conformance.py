"""Real vLLM with the sidecar beside it keeps what an engine of this contract promises."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.processes import COMMAND, environment
from tests.real.beside import beside
from tests.vllm.servers import DATA, serving

# Seen of vLLM itself on a CPU: what the base model answers greedily can come out otherwise while an
# adapter is loaded and used.
OF_VLLM = {"lora.others-unchanged"}


@pytest.mark.timeout(2400)
def test_conformance(models: Path, tmp_path: Path) -> None:
    """The report lies in .data/vllm/conformance.json, with what could not be tried and why."""
    root = tmp_path / "models"
    shutil.copytree(models, root)
    (root / "scratch").mkdir()
    with serving(root / "a") as server, beside(server, tmp_path, root) as sidecar:
        done = subprocess.run(
            [
                *COMMAND, "conformance", sidecar.admin, f"--inference={sidecar.inference}",
                "--destructive", f"--weights={root / 'b'}", f"--lora={root / 'lora-one'}",
                f"--scratch={root / 'scratch'}", "--json",
            ],
            env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        DATA.joinpath("conformance.json").write_text(done.stdout)
        told = json.loads(done.stdout)
        failed = {case["id"]: case for case in told["cases"] if case["verdict"] == "fail"}
        assert set(failed) <= OF_VLLM, failed
        assert not told["left_behind"], done.stderr
        assert server.is_alive()
