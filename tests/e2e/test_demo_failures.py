"""What `chadburn demo` says when something is in the way, and what it leaves behind: nothing."""

from __future__ import annotations

import signal
import socket
import stat
import time
from pathlib import Path

import pytest

from tests.e2e.processes import Demo, chadburn, cleaned, descendants, gone


def said(folder: Path, *arguments: str | Path, **variables: str) -> str:
    """The one line on stderr of a demo that could not begin."""
    ran = chadburn("demo", *arguments, cwd=folder, **variables)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert ran.stderr.startswith("chadburn: demo: ")
    return ran.stderr


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_busy_port_is_named(tmp_path: Path, offset: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        line = said(tmp_path, "--port", str(number - offset))
    # One of the four is certainly taken; another process may have taken an earlier one.
    assert "is not free" in line
    assert "--port" in line


@pytest.mark.parametrize("port", ["-1", "65533", "70000"])
def test_a_port_without_room_for_the_others_is_refused(tmp_path: Path, port: str) -> None:
    assert "--port must leave room" in said(tmp_path, f"--port={port}")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    line = said(tmp_path, "--data-dir", tmp_path / "file" / "demo", "--port=0")
    assert "cannot be written" in line


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o755)
    (folder / "letter.txt").write_text("dear")
    line = said(tmp_path, "--data-dir", folder, "--port=0")
    assert "holds something else" in line
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]


def test_a_ready_file_that_cannot_be_written_is_found_before_anything_starts(
    tmp_path: Path,
) -> None:
    line = said(tmp_path, "--ready-file", tmp_path / "absent" / "ready.json", "--port=0")
    assert "cannot be written" in line
    assert not list((tmp_path / ".data/demo/logs").iterdir())


def test_a_ready_file_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "ready.json").mkdir()
    assert "cannot be replaced" in said(tmp_path, "--ready-file=ready.json", "--port=0")


def test_a_checkpoint_that_is_not_there_is_told_by_the_engine(tmp_path: Path) -> None:
    line = said(tmp_path, "--checkpoint", tmp_path / "absent", "--port=0")
    assert "demo: the engine ended with 1: engine: " in line


@pytest.mark.parametrize("after_s", [0.3, 1.5, 4.0])
def test_it_can_be_interrupted_while_it_starts(tmp_path: Path, after_s: float) -> None:
    demo = Demo.begin(tmp_path)
    with cleaned(demo.process):
        time.sleep(after_s)
        family = descendants(demo.process.pid)
        code = demo.process.stop(signal.SIGINT)
    assert gone(family) == set()
    if "Starting" in demo.process.said():  # else Python itself was still loading the program
        assert code == 0
        assert "Traceback" not in demo.process.said()


def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    """A sitecustomize that hides torch, as in an environment without the extra."""
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'torch' else found(name, *more)\n"
    )
    line = said(tmp_path, "--port=0", PYTHONPATH=str(hiding))
    assert "the package torch: pip install 'chadburn[engine]'" in line


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    import fcntl

    folder = tmp_path / "data"
    folder.mkdir()
    with open(folder / "demo.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another demo is running" in said(tmp_path, "--data-dir", folder, "--port=0")
