"""`chadburn audit verify`: what it says and how it ends."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from app.clock import SystemClock
from app.ledger import Ledger
from app.ledger.sealing import seal_all
from tests.cli.conftest import Run
from tests.ledger.samples import entry

pytestmark = pytest.mark.anyio


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "gateway.toml"
    path.write_text(f'data_dir = "{tmp_path}"\n')
    return str(path)


async def written(tmp_path: Path, *actions: str) -> None:
    """Each under a seal of its own but the last, which has none."""
    url = f"sqlite:///{tmp_path}/chadburn.db"
    ledger = await Ledger.open(url, clock=SystemClock(), migrate=True)
    try:
        for number, action in enumerate(actions, start=1):
            await ledger.audit.append(entry(action))
            if number < len(actions):
                await seal_all(ledger.duties, ledger.sealing, "a test")
    finally:
        await ledger.close()


def changed(tmp_path: Path, statement: str) -> None:
    with closing(sqlite3.connect(tmp_path / "chadburn.db")) as database, database:
        database.execute(statement)


@pytest.fixture
async def there(tmp_path: Path) -> None:
    await written(tmp_path, "a", "b", "c", "d")


def test_what_holds_is_said_with_its_head(run: Run, config: str, there: None) -> None:
    del there
    told = run("audit", "verify", "--config", config)
    assert told.code == 0, told.err
    lines = told.out.splitlines()
    assert lines[0] == "verified: 3 entries under 3 seals"
    assert lines[1] == "unsealed: 1 entries, 4 to 4, since 2026-03-01T12:00:00.123456Z"
    assert lines[2].startswith("head: ")
    head = lines[2].split()[1]
    document = json.loads(run("audit", "verify", "--config", config, "--json").out)
    assert document["intact"] is True
    assert (document["verified_entries"], document["unsealed"]["entries"]) == (3, 1)
    assert document["head"]["digest"] == head
    again = run("audit", "verify", "--config", config, "--from-seal", head)
    assert (again.code, again.out.splitlines()[0]) == (0, "verified: 1 entries under 1 seals")
    wrong = run("audit", "verify", "--config", config, "--from-seal", "0" * 64)
    assert wrong.code == 3
    assert "no seal has the given digest" in wrong.err
    assert run("audit", "verify", "--config", config, "--from-seal", "head").code == 2


def test_what_does_not_hold_is_said(run: Run, config: str, tmp_path: Path, there: None) -> None:
    del there
    changed(tmp_path, "UPDATE audit SET outcome = 'refused' WHERE id = 1")
    changed(tmp_path, "DELETE FROM audit WHERE id = 3")
    told = run("audit", "verify", "--config", config)
    assert told.code == 3
    assert told.out.splitlines()[:5] == [
        "verified: 1 entries under 1 seals",
        "broken: seal 1, entries 1 to 1",
        "  entry 1 was changed",
        "broken: seal 3, entries 3 to 3",
        "  entry 3 was removed",
    ]
    line = "chadburn: seal 1 does not hold: entry 1 was changed; 1 more do not hold\n"
    assert told.err == line
    document = json.loads(run("audit", "verify", "--config", config, "--json").out)
    assert document["intact"] is False
    assert [broken["number"] for broken in document["broken"]] == [1, 3]
    assert document["broken"][1]["entries"] == {"3": "removed"}
    assert document["verified_entries"] == 1


def test_there_is_a_ledger_or_it_is_said_that_there_is_none(run: Run, config: str) -> None:
    missing = run("audit", "verify", "--config", config)
    assert (missing.code, missing.out) == (6, "")
    assert re.search(r"there is no ledger at /\S+/chadburn.db yet", missing.err)
