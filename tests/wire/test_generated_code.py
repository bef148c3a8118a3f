"""The checks around app/rpc and proto/ notice what they are there to notice.

Each case changes a copy of the repository's contract files and runs the real check on it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("proto", "scripts", "constraints", "buf.yaml", "app/rpc", "docs/operation-fields.md")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that scripts/check-proto looks at, with the environments they are checked by."""
    for part in PARTS:
        source, target = ROOT / part, tmp_path / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for environment in (".venv", ".venv-proto"):
        (tmp_path / environment).symlink_to(ROOT / environment)
    return tmp_path


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "scripts" / "check-proto")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new))


def test_the_repository_passes(copy: Path) -> None:
    done = check(copy)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("openengine/v1/kv.proto", "uint32 dp_rank = 4;", "uint64 dp_rank = 4;"),
        ("openengine/v1/kv.proto", "uint32 dp_rank = 4;", "uint32 dp_rank = 6;"),
        ("openengine/v1/admin.proto", "PAUSE_MODE_KEEP = 3;", "PAUSE_MODE_KEEP = 4;"),
        ("openengine/v1/admin.proto", "uint64 pause_epoch = 10;", "string pause_epoch = 10;"),
        ("vllm/control.proto", "  bool paused = 1;", ""),
    ],
    ids=["wider", "renumbered", "enum", "another type", "removed"],
)
def test_a_breaking_change_is_refused(copy: Path, file: str, old: str, new: str) -> None:
    edit(copy / "proto" / file, old, new)
    done = check(copy)
    assert done.returncode != 0
    assert "buf breaking" in done.stderr


def test_bad_style_is_refused(copy: Path) -> None:
    edit(copy / "proto/openengine/v1/lora.proto", "bool already_loaded", "bool alreadyLoaded")
    done = check(copy)
    assert done.returncode != 0
    assert "buf lint" in done.stderr


def test_an_addition_needs_generation_and_nothing_else(copy: Path) -> None:
    edit(
        copy / "proto/openengine/v1/admin.proto",
        "message OperationCancelled {",
        "message OperationCancelled {\n  string detail = 9;",
    )
    done = check(copy)
    assert done.returncode != 0
    assert "buf" not in done.stderr
    assert "openengine/v1/admin_pb2.py" in done.stderr
    assert "docs/operation-fields.md is not what proto/ says" in done.stderr
    for script in ("gen-proto", "gen-operation-fields"):
        subprocess.run([sys.executable, str(copy / "scripts" / script)], check=True)
    assert check(copy).returncode == 0


@pytest.mark.parametrize("file", ["openengine/v1/admin_pb2.py", "openengine/v1/admin_pb2.pyi"])
def test_an_edited_generated_file_is_noticed(copy: Path, file: str) -> None:
    path = copy / "app/rpc" / file
    path.write_text(path.read_text() + "\n# by hand\n")
    done = check(copy)
    assert done.returncode != 0
    assert file in done.stderr


def test_a_leftover_generated_file_is_noticed(copy: Path) -> None:
    (copy / "app/rpc/openengine/v1/old_pb2.py").write_text("")
    done = check(copy)
    assert done.returncode != 0
    assert "old_pb2.py" in done.stderr


def test_generated_code_runs_with_protobuf_6() -> None:
    """Gencode demands a runtime at least as new as itself, of its own or the next major."""
    for path in (ROOT / "app/rpc").rglob("*_pb2.py"):
        assert re.search(r"Protobuf Python Version: 6\.31\.1$", path.read_text(), re.MULTILINE)


def test_stubs_are_typed_for_strict_callers(tmp_path: Path) -> None:
    """mypy --strict sees messages and asyncio stubs as what they are, and their misuse."""
    caller = tmp_path / "caller.py"
    caller.write_text(
        """\
from grpc import aio

from app.rpc.openengine.v1 import admin_pb2, admin_pb2_grpc


async def epoch(channel: aio.Channel) -> int:
    stub = admin_pb2_grpc.OpenEngineAdminStub(channel)
    async for event in stub.Pause(admin_pb2.PauseRequest(idempotency_key="k"), timeout=1.0):
        if event.WhichOneof("event") == "completed":
            return event.completed.pause.pause_epoch
    profile = await stub.GetAdminProfile(admin_pb2.GetAdminProfileRequest(), timeout=1.0)
    return profile.pause_epoch
"""
    )

    # A file of its own: mypy's cache takes one of the same size, changed within the same second,
    # for unchanged.
    misuse = tmp_path / "misuse.py"
    misuse.write_text(caller.read_text().replace("profile.pause_epoch", "profile.instance_id"))

    def mypy(path: Path) -> str:
        command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert mypy(caller) == ""
    assert 'got "str", expected "int"' in mypy(misuse)
