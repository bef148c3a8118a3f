"""The wheel holds what an installed `chadburn` needs, and nothing of the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_FROM_THE_WHEEL = "import app, app.cli; assert '/site/' in app.__file__; app.cli.main()"


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
    assert "app/_migrations/env.py" in names
    assert "app/_proto/openengine/v1/admin.proto" in names
    static = ROOT / "static"
    dashboard = {str(p.relative_to(static)) for p in static.rglob("*") if p.is_file()}
    assert {f"app/_static/{name}" for name in dashboard} <= names
    outside = {n for n in names if not n.startswith(("app/", "chadburn-"))}
    assert outside == set()
    assert not [n for n in names if n.endswith((".binpb", ".pyc"))]


def test_licence_texts(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.rpartition("/")[2] for n in names if "/licenses/" in n} == {"LICENSE", "NOTICE"}


def test_an_installed_wheel_makes_its_database(wheel: Path, tmp_path: Path) -> None:
    """From another folder, so that nothing of the checkout can help."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    database = tmp_path / "ledger.db"
    for verb in ("upgrade", "check"):
        done = subprocess.run(
            [sys.executable, "-c", _FROM_THE_WHEEL, "db", verb],
            cwd=tmp_path,
            env={"PYTHONPATH": str(site), "CHADBURN_DATABASE_URL": f"sqlite+aiosqlite:///{database}"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("schema ")
    assert database.exists()
