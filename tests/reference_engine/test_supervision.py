"""Processes that die, hang or are killed: nobody waits for them, none is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.reference_engine import messages as m
from app.reference_engine.engine import Engine
from app.reference_engine.errors import RankLost, StartupFailed
from app.reference_engine.limits import CoreSettings
from app.reference_engine.nursery import Nursery
from tests.reference_engine.ranks import alive, children
from tests.reference_engine.serving import PATIENCE_S, ask, eventually, serving
from tests.reference_engine.test_checkpoint import GATE, edit_tensors

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


async def test_dead_rank_is_noticed_at_once(tiny: Path) -> None:
    async with serving(tiny, step_delay_ms=2) as engine:
        asked = [ask(engine, str(n), max_tokens=1000) for n in range(3)]
        for one in asked:
            await one.after(1)
        os.kill(engine.pids[0], signal.SIGKILL)
        for one in asked:
            end = (await one.whole()).end
            assert isinstance(end, m.Failed)
            assert end.retryable
            assert "rank 0" in end.message
        assert engine.lost.keys() == {0}
        with pytest.raises(RankLost):
            await engine.load()
        with pytest.raises(RankLost):
            await ask(engine, "later").whole()
        assert engine.open_requests == ()


async def test_rank_that_dies_while_an_order_is_open(tiny: Path) -> None:
    async with serving(tiny) as engine:
        os.kill(engine.pids[0], signal.SIGSTOP)
        order = asyncio.create_task(engine.flush_prefix_cache())
        await asyncio.sleep(0)
        os.kill(engine.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match="ended"):
            await order


async def test_order_that_is_not_acknowledged_makes_the_rank_lost(tiny: Path) -> None:
    async with serving(tiny, order_deadline_s=0.5) as engine:
        os.kill(engine.pids[0], signal.SIGSTOP)
        with pytest.raises(RankLost, match=r"within 0\.5 s"):
            await engine.flush_prefix_cache()
        assert engine.lost.keys() == {0}

        async def gone() -> bool:
            return not alive(engine.pids[0])

        await eventually(gone)


async def test_hung_rank_is_found_though_nobody_gives_orders(tiny: Path) -> None:
    async with serving(tiny, step_delay_ms=2, step_deadline_s=0.5, watch_interval_s=0.1) as engine:
        asked = await ask(engine, "a", max_tokens=1000).after(1)
        os.kill(engine.pids[0], signal.SIGSTOP)
        assert isinstance((await asked.whole()).end, m.Failed)


async def test_close_leaves_no_process(tiny: Path) -> None:
    async with serving(tiny) as engine:
        (pid,) = engine.pids
        assert alive(pid)
    assert not alive(pid)


async def test_signals_for_the_whole_group_leave_the_rank_to_the_front_end(tiny: Path) -> None:
    async with serving(tiny) as engine:
        os.kill(engine.pids[0], signal.SIGINT)
        os.kill(engine.pids[0], signal.SIGTERM)
        assert len((await ask(engine, "a").whole()).ids) == 20


@pytest.mark.parametrize("busy", [False, True])
def test_killed_front_end_takes_its_rank_along(tiny: Path, busy: bool) -> None:
    """kill -9: no handler of the front end runs. The rank sees its connection end."""
    program = f"""
import asyncio
from pathlib import Path
from tests.reference_engine.serving import ask, serving
async def main():
    async with serving(Path({str(tiny)!r}), step_delay_ms=1) as engine:
        if {busy}:
            await ask(engine, "a", max_tokens=4000).after(1)
        print(engine.pids[0], flush=True)
        await asyncio.sleep({PATIENCE_S})
asyncio.run(main())
"""
    front = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    with front:
        assert front.stdout is not None
        rank = int(front.stdout.readline())
        assert alive(rank)
        front.kill()
    until = time.monotonic() + PATIENCE_S
    while alive(rank):
        assert time.monotonic() < until, "an orphan"
        time.sleep(0.01)


async def test_start_that_fails_says_why_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(tiny, tmp_path / "damaged"))
    edit_tensors(lambda tensors: tensors.pop(GATE))(damaged)
    before = children()
    with pytest.raises(StartupFailed, match=GATE):
        await Engine.start(damaged, CoreSettings())
    assert children() == before


async def test_start_has_a_deadline(tiny: Path) -> None:
    before = children()
    with pytest.raises(StartupFailed, match=r"within 0\.01 s"):
        await Engine.start(tiny, CoreSettings(), startup_deadline_s=0.01)
    assert children() == before


async def test_rank_that_is_stopped_during_start(tiny: Path) -> None:
    """Long before the deadline, which a slow start needs."""
    nursery = Nursery("tests.reference_engine.stopping_rank")
    before = children()
    with (
        contextlib.closing(nursery),
        pytest.raises(StartupFailed, match="rank 1 was stopped"),
    ):
        await Engine.start(
            tiny,
            CoreSettings(tensor_parallel_size=2),
            rank_timeout_s=0.5,
            nursery=nursery,
        )
    assert children() == before


async def test_rank_that_ends_during_start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that can not even begin: its exit code is told."""
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(StartupFailed, match="exit code 1"):
        await Engine.start(tiny, CoreSettings())
