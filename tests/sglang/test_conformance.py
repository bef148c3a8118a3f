"""Real SGLang with the sidecar beside it keeps what an engine of this contract promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.beside import beside
from tests.real.conforming import conformance, own_models
from tests.sglang.servers import DATA, options, serving

OF_SGLANG: set[str] = set()


@pytest.mark.timeout(2400)
def test_conformance(models: Path, tmp_path: Path) -> None:
    """The report lies in .data/sglang/conformance.json, with what could not be tried and why."""
    root = own_models(models, tmp_path)
    with (
        serving(root / "a", lora=True) as server,
        beside(server, tmp_path, root, *options(tmp_path)) as sidecar,
    ):
        report = DATA / "conformance.json"
        failed = conformance(sidecar, root, report, "--shared-memory-prefix=chadburn-")
        assert set(failed) <= OF_SGLANG, failed
        assert server.is_alive()
