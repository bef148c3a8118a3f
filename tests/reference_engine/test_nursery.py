"""What becomes of ranks when the process that makes them does not do well."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.reference_engine.errors import StartupFailed
from app.reference_engine.nursery import Nursery
from tests.reference_engine.ranks import alive, children, ranks
from tests.reference_engine.serving import PATIENCE_S, ask, eventually, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


def made_by() -> int:
    """The youngest child of this process that makes ranks, and is none itself."""
    makers = [
        pid
        for pid in children()
        if pid not in ranks() and b".nursery" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return makers[-1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_ranks_outlive_it_and_others_come_from_another_one(
    tiny: Path, nursery: Nursery, number: signal.Signals
) -> None:
    async with serving(tiny, ranks_from=nursery, tensor_parallel_size=2) as engine:
        before = made_by()
        os.kill(before, number)
        assert len((await ask(engine, "a", max_tokens=5).whole()).ids) == 5
        os.kill(engine.pids[1], signal.SIGKILL)

        async def lost() -> bool:
            return bool(engine.lost)

        await eventually(lost)
        await engine.restart()
        assert len((await ask(engine, "b", max_tokens=5).whole()).ids) == 5
        assert made_by() != before
        assert not alive(before)


async def test_the_end_of_a_rank_is_told_to_whoever_asked_for_it(nursery: Nursery) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank = await nursery.rank([theirs.fileno()])
        assert rank.pid in ranks()
        rank.kill()
        async with asyncio.timeout(PATIENCE_S):
            assert await rank.wait() == -signal.SIGKILL
        assert rank.pid not in ranks()


async def test_a_rank_for_which_nobody_waited_is_gone(nursery: Nursery) -> None:
    before = ranks()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        waiting = asyncio.create_task(nursery.rank([theirs.fileno()]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        # Comes after it, from the same process.
        rank = await nursery.rank([theirs.fileno()])

        async def alone() -> bool:
            return [pid for pid in ranks() if pid not in before] == [rank.pid]

        await eventually(alone)
        rank.kill()
        await rank.wait()


async def test_one_that_can_not_begin_says_how_it_ended(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(StartupFailed, match="exit code 1"):
            await nursery.rank([theirs.fileno()])
        monkeypatch.delenv("PYTHONHOME")
        rank = await nursery.rank([theirs.fileno()])
        rank.kill()
        await rank.wait()
