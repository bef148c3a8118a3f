"""The wheel holds what an installed `chadburn` needs, and nothing of the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--no-index", "-w", str(folder), str(ROOT)],
        check=True,
    )  # fmt: skip
    [built] = folder.glob("chadburn-*.whl")
    return built


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "app").rglob("*.py")
        if "__pycache__" not in str(p)
    }
    assert modules <= names
    migrations = {p.name for p in (ROOT / "migrations" / "versions").glob("*.py")}
    assert migrations
    assert {f"app/_migrations/versions/{name}" for name in migrations} <= names
    assert "app/_migrations/alembic.ini" in names
    assert "app/_migrations/env.py" in names
    assert "app/_proto/openengine/v1/admin.proto" in names
    outside = {n for n in names if not n.startswith(("app/", "chadburn-"))}
    assert outside == set()
    assert not [n for n in names if n.endswith((".binpb", ".pyc"))]


def test_licence_texts(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.rpartition("/")[2] for n in names if "/licenses/" in n} == {"LICENSE", "NOTICE"}
