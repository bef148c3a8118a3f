"""scripts/need installs what it may, and else says the one line for root."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")


@dataclass(frozen=True)
class Machine:
    """A PATH with nothing on it but what is put there."""

    bin: Path

    def has(self, name: str, script: str = "") -> None:
        (self.bin / name).write_text(f"#!{BASH}\n{script}\n")
        (self.bin / name).chmod(0o755)

    def need(self, *programs: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BASH), str(ROOT / "scripts/need"), *programs],
            env={"PATH": str(self.bin)}, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_is_there_needs_nothing(machine: Machine) -> None:
    machine.has("chromium")
    done = machine.need("chromium")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_ordinary_user_is_told_the_line_for_root(machine: Machine) -> None:
    machine.has("id", "echo 1000")
    machine.has("apt-get", "exit 9")
    done = machine.need("chromium")
    assert done.returncode == 1
    assert done.stderr == "need: missing; run as root: apt-get install -y chromium\n"


def test_root_gets_it_installed_with_old_lists_too(machine: Machine) -> None:
    said = machine.bin / "said"
    machine.has("id", "echo 0")
    machine.has(
        "apt-get",
        f'echo "$*" >>{said}\n'
        f'case "$(<{said})" in *update*) exit 0 ;; esac; echo "E: no such package" >&2; exit 100',
    )
    done = machine.need("chromium")
    assert (done.returncode, done.stderr) == (0, "need: installing chromium\n")
    first, update, again = said.read_text().splitlines()
    assert update.startswith("update")
    assert first == again
    assert first.startswith("install -y")
    assert first.endswith(" chromium")


def test_a_failed_installation_is_one(machine: Machine) -> None:
    machine.has("id", "echo 0")
    machine.has("apt-get", 'echo "E: no network" >&2; exit 100')
    done = machine.need("chromium")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "E: no network",
        "need: apt-get could not install chromium (its message stands above)",
    ]


def test_an_unknown_program_is_refused(machine: Machine) -> None:
    done = machine.need("firefox")
    assert (done.returncode, done.stderr) == (1, "need: no package is known for firefox\n")
