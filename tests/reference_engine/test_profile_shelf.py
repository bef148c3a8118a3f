"""Which finished profiles are kept, and that nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.reference_engine.profile_shelf import ProfileLimits, clear


def profile(root: Path, name: str, *, at: int, size: int = 10) -> Path:
    """Finished at that second, with the files of two ranks."""
    folder = root / name
    folder.mkdir()
    for rank in range(2):
        (folder / f"rank-{rank}.json.gz").write_bytes(b"x" * (size // 2))
    os.utime(folder, (at, at))
    return folder


def names(root: Path) -> list[str]:
    return sorted(one.name for one in root.iterdir())


def test_the_oldest_go_first(tmp_path: Path) -> None:
    for number in (3, 1, 2, 4):
        profile(tmp_path, f"p{number}", at=number)
    assert clear(tmp_path, ProfileLimits(count=2)) == ["p2", "p1"]
    assert names(tmp_path) == ["p3", "p4"]
    assert clear(tmp_path, ProfileLimits(count=2)) == []


def test_so_many_bytes_and_the_latest_whatever_its_size(tmp_path: Path) -> None:
    for number in range(1, 4):
        profile(tmp_path, f"p{number}", at=number, size=100)
    assert clear(tmp_path, ProfileLimits(size_bytes=200)) == ["p1"]
    assert clear(tmp_path, ProfileLimits(size_bytes=1)) == ["p2"]
    assert names(tmp_path) == ["p3"]


def test_what_is_no_profile_stays(tmp_path: Path) -> None:
    profile(tmp_path, "p1", at=1)
    own = profile(tmp_path, "p2", at=2)
    (own / "notes.txt").write_text("why it was slow")
    profile(tmp_path, "p3.unfinished", at=3)
    (tmp_path / "p3.unfinished" / "rank-0.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(own)
    profile(tmp_path, "p4", at=4)
    assert clear(tmp_path, ProfileLimits(count=1)) == ["p1"]
    assert names(tmp_path) == ["empty", "file", "link", "p2", "p3.unfinished", "p4"]
    assert clear(tmp_path / "gone", ProfileLimits()) == []


def test_one_at_least_is_kept() -> None:
    with pytest.raises(ValueError, match="one profile"):
        ProfileLimits(count=0)
