from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.reference_engine.kernels import choose


@pytest.mark.parametrize(
    ("vendor", "before", "after"),
    [
        ("GenuineIntel", None, "AUTO,STRICT"),
        ("GenuineIntel", "AVX2", "AVX2"),
        ("AuthenticAMD", None, None),
    ],
)
def test_by_the_processor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vendor: str,
    before: str | None,
    after: str | None,
) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if before is not None:
        monkeypatch.setenv("MKL_CBWR", before)
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    choose(tmp_path / "cpuinfo")
    assert os.environ.get("MKL_CBWR") == after
    choose(tmp_path / "none")
    assert os.environ.get("MKL_CBWR") == after
