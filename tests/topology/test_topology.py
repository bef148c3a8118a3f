"""The deployment as plain processes: a short course over engines that are doubles, and the whole of
`make topology`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.engine import running_engine
from tests.e2e.driving import server_sent
from tests.e2e.processes import environment
from tests.enginekit.minimal_engine import until as released_by
from tests.topology.course import Course
from tests.topology.load import gaps
from tests.topology.plant import ROOT, plant


@pytest.fixture
def folder() -> Iterator[Path]:
    """nginx's workers run as somebody else, and the path of a socket has to stay short."""
    with tempfile.TemporaryDirectory(prefix="cb-", dir="/tmp") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.mark.anyio
@pytest.mark.parametrize("proxy", ["nginx", pytest.param("caddy", marks=pytest.mark.long)])
async def test_gateways_behind_a_proxy_are_rolled_and_nothing_is_lost(
    folder: Path, proxy: str
) -> None:
    async with running_engine(folder / "double") as engine:
        made = plant(folder, others={"double": engine.admin_address}, proxy=proxy)
        standing = await asyncio.to_thread(made.__enter__)
        said: list[str] = []
        course = Course(standing, said.append, ["double"])
        try:
            await course.engines_are_found()
            await course.one_key_is_one_order()

            go = asyncio.Event()
            engine.engine.script("prepare", released_by(go))
            held = await course.load.order("double", "pause", {"mode": "drain"})
            path = f"/v1/operations/{held}/events"
            async with course.gateway.stream(path) as response:
                kinds = []
                async for one in server_sent(response.aiter_lines()):
                    kinds.append(one.type)
                    go.set()  # it has come through the proxy before the operation could end
            assert (kinds[0], kinds[-1]) == ("accepted", "completed")

            await course.begin_load(workers=2)
            await course.gateways_are_rolled(orders=3)
            await course.end_load()
            assert not await course.nothing_is_lost()
            await course.engines_agree()
            assert len(engine.calls) >= len(course.load.taken)
            await course.a_broken_list_changes_nothing()
        except BaseException:
            print(standing.said())
            raise
        finally:
            await course.close()
            await asyncio.to_thread(made.__exit__, None, None, None)


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([], "ended 0 times"),
        ([(1, "accepted")], "ended 0 times"),
        ([(1, "accepted"), (3, "completed")], "sequences [1, 3]"),
        ([(1, "accepted"), (1, "accepted"), (2, "completed")], "sequences [1, 1, 2]"),
        ([(1, "accepted"), (2, "completed"), (3, "failed")], "ended 2 times"),
        ([(1, "accepted"), (2, "completed"), (3, "warning")], "ended 1 times"),
    ],
)
def test_what_is_lost_is_seen(events: list[tuple[int, str]], fault: str) -> None:
    assert any(fault in one for one in gaps("o", events))
    assert not gaps("o", [(1, "accepted"), (2, "completed")])


@pytest.mark.long
def test_the_whole_course() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.topology"],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "topology: all as promised" in done.stdout
