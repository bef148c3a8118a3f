"""`chadburn sidecar dynamo`, up to where it would serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import app
from app.commands.ending import CommandFailed


@pytest.mark.parametrize(
    ("option", "words"),
    [("--worker=tensorflow", "--worker is one of vllm"), ("--model-path=/none", "no directory")],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, option: str, words: str) -> None:
    base = ("sidecar", "dynamo", "--url=http://127.0.0.1:1", f"--data-dir={tmp_path / 'data'}")
    with pytest.raises(CommandFailed) as failed:
        app([*base, "--insecure-loopback", option], standalone_mode=False)
    assert failed.value.exit == 2
    assert words in failed.value.line
