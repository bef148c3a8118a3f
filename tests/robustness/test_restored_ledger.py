"""A ledger that comes from a backup, made while its gateway ran: what is true afterwards.

Each of it stands in docs/backup-and-restore.md.
"""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.bed import Bed, bed, until
from tests.robustness.history import Carried

pytestmark = pytest.mark.anyio

FLUSH = {"caches": ["prefix"]}
QUEUED = {**FLUSH, "when_busy": "queue"}


def chadburn(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "app.cli", *arguments, f"--config={folder}/gateway.toml"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


async def ordered(made: Bed, key: str, body: dict[str, Any] = FLUSH) -> dict[str, Any]:
    answer = await made.clients.http.post(
        f"{made.url}/v1/engines/e1/flush-caches", json=body, headers={"idempotency-key": key}
    )
    assert answer.status_code in (200, 202), answer.text
    found: dict[str, Any] = answer.json()
    return found


async def events(made: Bed, after: str | None = None) -> dict[str, Any]:
    answer = await made.clients.http.get(
        f"{made.url}/v1/events",
        params={} if after is None else {"after": after},
        headers={"accept": "application/json"},
    )
    found: dict[str, Any] = answer.json()
    return found


def carried(made: Bed, operation: dict[str, Any]) -> list[str]:
    entries = made.recorder.read().all(Carried)
    return [each.phase for each in entries if each.key == operation["id"]]


async def is_sent(made: Bed, operation: dict[str, Any]) -> bool:
    found = await made.clients.look(operation["id"])
    return found is not None and found["started_at"] is not None


async def test_what_is_true_after_a_restore(tmp_path: Path) -> None:
    ledger, backup = tmp_path / "ledger.db", tmp_path / "backup.db"
    async with bed(tmp_path, "restored", seed=1, engines=("e1",)) as made:
        before = await made.clients.ended((await ordered(made, "before"))["id"])
        made.signal_engines(signal.SIGSTOP)
        opened = await ordered(made, "open")
        await until(lambda: is_sent(made, opened))
        queued = await ordered(made, "queued", QUEUED)
        assert queued["state"] == "queued"
        with closing(sqlite3.connect(ledger)) as connection:
            connection.execute("VACUUM INTO ?", (str(backup),))
        made.signal_engines(signal.SIGCONT)
        end = await made.clients.ended(opened["id"])
        assert (await made.clients.ended(queued["id"]))["state"] == "succeeded"
        after = await ordered(made, "after")
        await made.clients.ended(after["id"])
        cursor = (await events(made))["cursor"]
        await made.stop_gateway()

        for beside in ("-wal", "-shm"):
            ledger.with_name(ledger.name + beside).unlink(missing_ok=True)
        backup.rename(ledger)
        assert "; 1 operations that were not sent yet" in chadburn(
            tmp_path, "db", "upgrade", "--restored"
        )
        assert "sound" in chadburn(tmp_path, "db", "check")
        await made.start_gateway()

        # What the backup has.
        assert await made.clients.ended(before["id"]) == before
        assert (await ordered(made, "before"))["id"] == before["id"]
        # What was open in it is not done again, and gets the end that the engine knows.
        again = await made.clients.ended(opened["id"])
        assert (again["state"], again["result"]) == (end["state"], end["result"])
        assert carried(made, opened).count("begun") == 1
        # What waited in it has been sent since, which nobody can know, and is not sent again.
        untold = await made.clients.ended(queued["id"])
        assert (untold["state"], untold["error"]["reason"]) == ("failed", "LEDGER_RESTORED")
        assert untold["error"]["effect"] == "unknown"
        assert (await ordered(made, "queued", QUEUED))["id"] == queued["id"]
        assert carried(made, queued).count("begun") == 1
        # What came after it is unknown, and its key is free.
        lost = await made.clients.http.get(f"{made.url}/v1/operations/{after['id']}")
        assert lost.status_code == 404
        twin = await ordered(made, "after")
        assert twin["id"] != after["id"]
        assert (await made.clients.ended(twin["id"]))["state"] == "succeeded"
        # By number the old cursor would be one of events to come.
        told = await events(made, cursor)
        assert [each["type"] for each in told["items"]] == ["reset", "snapshot"]
        assert told["cursor"].partition(".")[0] != cursor.partition(".")[0]
