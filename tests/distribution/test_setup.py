"""scripts/setup says in one line what is wrong, and what to do about it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INPUTS = (
    "scripts/setup",
    "pyproject.toml",
    "constraints/pins.txt",
    "constraints/canaille.txt",
    "tests/idp/package-lock.json",
    "tests/browser/package-lock.json",
)
# What the script itself calls, beside Python.
TOOLS = ("bash", "cat", "dirname", "flock", "git", "id", "mktemp", "rm")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for part in INPUTS:
        target = tmp_path / "checkout" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, target)
    return tmp_path / "checkout"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH without any Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"{tool} is missing on this machine"
        (folder / tool).symlink_to(found)
    return folder


def pretend(path: Path, name: str, script: str) -> None:
    (path / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
    (path / name).chmod(0o755)


def setup(checkout: Path, path: Path, *arguments: str, **environment: str) -> str:
    """The one line the script ends with, after it has failed."""
    done = subprocess.run(
        [str(checkout / "scripts/setup"), *arguments],
        env={"PATH": str(path), **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


def test_purpose_is_required(checkout: Path, path: Path) -> None:
    assert setup(checkout, path) == "setup: usage: scripts/setup demo|dev"


def test_no_python(checkout: Path, path: Path) -> None:
    assert "apt-get install python3" in setup(checkout, path, "demo")


def test_python_too_old(checkout: Path, path: Path) -> None:
    pretend(path, "python3", "exit 1")
    assert "no Python 3.11 or later" in setup(checkout, path, "demo")


def test_named_python_too_old(checkout: Path, path: Path) -> None:
    pretend(path, "python3.10", "exit 1")
    said = setup(checkout, path, "demo", PYTHON="python3.10")
    assert said == "setup: PYTHON=python3.10 is not Python 3.11 or later"


def test_no_venv_module(checkout: Path, path: Path) -> None:
    """Python itself is fine, but can import neither ensurepip nor venv, and there is no apt."""
    pretend(path, "python3", '[[ "$*" == *version_info* ]]')
    said = setup(checkout, path, "demo")
    assert said.endswith("has no venv module (on Debian or Ubuntu, as root: apt-get install "
                         "python3-venv)")  # fmt: skip
