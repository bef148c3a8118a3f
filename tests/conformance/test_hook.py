"""The fault hook as a command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.conformance.hook import CommandHook, HookFailed

pytestmark = pytest.mark.anyio


def script(path: Path, body: str) -> str:
    path.write_text(body)
    return f"'{sys.executable}' '{path}'"


async def test_it_is_called_with_the_words(tmp_path: Path) -> None:
    out = tmp_path / "a file"
    body = f"import sys, pathlib; pathlib.Path({str(out)!r}).write_text(' '.join(sys.argv[1:]))"
    await CommandHook(script(tmp_path / "hook.py", body) + " 'my state'").run("kill-rank", "1")
    assert out.read_text() == "my state kill-rank 1"


async def test_another_code_is_a_failure(tmp_path: Path) -> None:
    hook = CommandHook(script(tmp_path / "hook.py", "import sys; sys.exit(3)"))
    with pytest.raises(HookFailed, match="code 3 at restart"):
        await hook.run("restart")


async def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    hook = CommandHook(script(tmp_path / "hook.py", "import time; time.sleep(600)"), timeout_s=0.5)
    with pytest.raises(HookFailed, match=r"within 0\.5 s at restart"):
        await hook.run("restart")


async def test_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HookFailed, match="cannot be run"):
        await CommandHook(str(tmp_path / "nothing")).run("restart")


@pytest.mark.parametrize("command", ["", "  ", "'unclosed"])
async def test_nonsense_is_refused_at_once(command: str) -> None:
    with pytest.raises(ValueError, match=r"empty|quotation"):
        CommandHook(command)
