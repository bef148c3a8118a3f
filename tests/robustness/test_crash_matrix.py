"""The gateway is killed at every named point of an order's course, and everything promised holds.

After each kill it is started again; clients repeat what was not answered under the same key, and
readers come back with the last id they heard.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness import crash_points as points
from tests.robustness.bed import bed
from tests.robustness.history import History, Struck
from tests.robustness.traffic import Traffic

pytestmark = pytest.mark.anyio

SEED = 20_261_130
# Each is one kill, or several in a row: the later ones hit the successor at its start.
CASES = [
    *((point,) for point in points.POINTS),
    (points.ACCEPTED, points.LEASE_TAKEN),
    (points.ACCEPTED, points.ENGINE_ASKED),
    (points.ARRIVED, points.ENGINE_ASKED, points.LEASE_TAKEN),
]


def kills(history: History) -> list[str | None]:
    return [each.point for each in history.all(Struck) if each.what == "killed"]


async def play(
    folder: Path, name: str, cases: list[tuple[str, ...]], database_url: str | None
) -> History:
    async with bed(folder, name, SEED, database_url=database_url) as made:
        traffic = Traffic(made)
        await traffic.begin()
        await traffic.more(4)
        for case in cases:
            await made.kill_at(*case)
            await traffic.more(4)
        await traffic.end()
        history = await made.history()
    assert kills(history) == [point for case in cases for point in case]
    return history


async def test_killed_at_some_points_on_sqlite(tmp_path: Path) -> None:
    cases = [(points.ACCEPT_UNCOMMITTED,), (points.AFTER_CALL, points.ENGINE_ASKED)]
    await play(tmp_path, "crashes-sqlite-quick", cases, None)


async def test_killed_at_some_points_on_postgresql(tmp_path: Path, postgres_url: str) -> None:
    cases = [(points.END_UNCOMMITTED,), (points.ACCEPTED, points.LEASE_TAKEN)]
    await play(tmp_path, "crashes-postgresql-quick", cases, postgres_url)


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize("case", CASES, ids="+".join)
async def test_killed_at_every_point(
    tmp_path: Path, case: tuple[str, ...], database: str, request: pytest.FixtureRequest
) -> None:
    """Twice, since where the other orders are at that moment is up to chance."""
    url = request.getfixturevalue("postgres_url") if database == "postgresql" else None
    name = f"crash-{'+'.join(case)}-{database}"
    await play(tmp_path, name, [case, case], url)
