"""What `chadburn demo` says when something is in the way, and what it leaves behind: nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.processes import chadburn


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
