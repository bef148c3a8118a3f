"""What the gateway deletes by itself."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.http.gateway import gateway
from tests.operations.gateway import until

pytestmark = pytest.mark.anyio

_OVER = "2020-01-01T00:00:00.000000+00:00"


def keys_in(path: Path, *, expire: str | None = None) -> list[str]:
    """The keys in a ledger. `expire`: one whose retention is made to be over first."""
    with closing(sqlite3.connect(path)) as database, database:
        if expire is not None:
            change = "UPDATE idempotency_keys SET expires_at = ? WHERE key = ?"
            assert database.execute(change, (_OVER, expire)).rowcount == 1
        return sorted(key for (key,) in database.execute("SELECT key FROM idempotency_keys"))


async def test_keys_whose_retention_is_over_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "data" / "chadburn.db"
    flush = {"caches": ["prefix"]}
    async with gateway(tmp_path / "data") as gate:
        for key in ("old", "young"):
            headers = {"Idempotency-Key": key, "Prefer": "wait=20"}
            answer = await gate.order("flush-caches", flush, headers)
            assert answer.json()["state"] == "succeeded"
    assert keys_in(path, expire="old") == ["old", "young"]
    async with gateway(tmp_path / "data", registered=False):
        await until(lambda: keys_in(path) == ["young"])


async def test_operations_that_are_over_their_age_are_deleted_with_their_streams(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data" / "chadburn.db"
    async with gateway(tmp_path / "data") as gate:
        ids = []
        for key in ("old", "young"):
            headers = {"Idempotency-Key": key, "Prefer": "wait=20"}
            ids.append((await gate.order("flush-caches", {"caches": ["prefix"]}, headers)).json())
    keys_in(path, expire="old")
    with closing(sqlite3.connect(path)) as database, database:
        change = "UPDATE operations SET ended_at = ? WHERE id = ?"
        assert database.execute(change, (_OVER, ids[0]["id"])).rowcount == 1
    async with gateway(tmp_path / "data", registered=False) as gate:
        await until(lambda: operations_in(path) == [ids[1]["id"]])
        for rest in ("", "/events"):
            gone = await gate.get(f"/v1/operations/{ids[0]['id']}{rest}")
            assert (gone.status_code, gone.json()["reason"]) == (404, "OPERATION_NOT_FOUND")
        listed = (await gate.get("/v1/operations")).json()["items"]
        assert [operation["id"] for operation in listed] == [ids[1]["id"]]
        anew = await gate.get("/v1/events?after=0", Accept="application/json")
        reset, snapshot = anew.json()["items"]
        assert (reset["type"], reset["data"]) == ("reset", {"reason": "cursor_too_old"})
        assert snapshot["type"] == "snapshot"


def operations_in(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return [row[0] for row in database.execute("SELECT id FROM operations")]
