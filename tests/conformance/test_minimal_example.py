"""The engine of docs/write-an-engine.md, tried as that page says, with its own fault hook."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.conformance.test_command import chadburn

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

HOOK = Path(__file__).resolve().parents[2] / "examples" / "minimal_engine_hook.py"
# Its one rank is its process: who would have to answer for it stands still, or is gone.
NOT_PROVEN = {"rank.stopped", "rank.loss-is-told"}
# It asks for no token.
NOT_GIVEN = ("credentials.",)


async def broken(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(*words)
    async with asyncio.timeout(60):
        assert await process.wait() == 0


async def test_it_passes_and_the_report_says_what_that_does_not_prove(tmp_path: Path) -> None:
    inference, admin = (f"unix:{tmp_path}/{name}.sock" for name in ("inference", "admin"))
    hook = (sys.executable, str(HOOK), str(tmp_path), inference, admin)
    await broken(*hook, "restart")
    try:
        done = await chadburn(
            *(admin, "--inference", inference, "--destructive", "--json", "--wait", "120"),
            *("--fault-hook", " ".join(f"'{word}'" for word in hook)),
            within_s=800,
        )
    finally:
        await broken(*hook, "kill-rank", "0")
    assert done.code in (0, 3), done.err
    report = json.loads(done.out)
    failed = [case for case in report["cases"] if case["verdict"] == "fail"]
    assert not failed
    assert done.code == 0, done.err
    reached = {
        case["id"] for case in report["cases"] if case["lack"] in ("not-reached", "not-tried")
    }
    assert reached == NOT_PROVEN
    missing = {case["id"] for case in report["cases"] if case["lack"] == "option-missing"}
    assert {id_ for id_ in missing if not id_.startswith(NOT_GIVEN)} == set()
