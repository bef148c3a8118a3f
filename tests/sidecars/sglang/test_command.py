"""`chadburn sidecar sglang`, up to where it would serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import app
from app.commands.ending import CommandFailed


def _refusal(*words: str) -> str:
    with pytest.raises(CommandFailed) as failed:
        app(["sidecar", "sglang", "--url", "http://127.0.0.1:1", *words], standalone_mode=False)
    assert failed.value.exit == 2
    return failed.value.line


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    base = ("--data-dir", str(tmp_path / "d"), "--insecure-loopback")
    for option in ("--profile-dir", "--model-path"):
        assert "no directory" in _refusal(*base, option, str(tmp_path / "nowhere"))
    key = tmp_path / "key"
    key.write_text("two\nlines")
    for option in ("--engine-key-file", "--engine-admin-key-file"):
        assert "holds no key" in _refusal(*base, option, str(key))
