"""A ledger from a backup, which does not know what was sent after it was made."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from app.domain.kinds import FailureEffect, OperationState
from app.ledger import Ledger
from app.ledger.recovery import end_unsent
from app.ledger.schema import upgrade
from app.ledger.values import AuditFilter
from tests.doubles.engine import EngineDouble
from tests.enginekit.minimal_engine import until as released_by
from tests.operations.gateway import DRAIN, FLUSH, Gateway, request

pytestmark = pytest.mark.anyio


def put_in_place(backup: Path, file: Path) -> None:
    for beside in ("-wal", "-shm"):
        file.with_name(file.name + beside).unlink(missing_ok=True)
    backup.replace(file)


async def test_what_waited_when_the_backup_was_made_is_neither_sent_again_nor_called_undone(
    tmp_path: Path, gateway: Gateway, engine: EngineDouble
) -> None:
    go = asyncio.Event()
    engine.engine.script("prepare", released_by(go))
    drain = await gateway.give(DRAIN, deadline_ms=3_600_000)
    await gateway.until(drain, OperationState.RUNNING)
    wanted = request(FLUSH, when_busy="queue", deadline_ms=600_000)
    queued = (await gateway.orders.submit(wanted)).operation
    file, backup = tmp_path / "ledger.db", tmp_path / "backup.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("VACUUM INTO ?", (str(backup),))
    go.set()
    assert (await gateway.end_of(queued)).state is OperationState.SUCCEEDED
    await gateway.stop()
    put_in_place(backup, file)
    await upgrade(f"sqlite:///{file}", restored=True)
    ledger = await Ledger.open(f"sqlite:///{file}", clock=gateway.clock)
    assert await end_unsent(ledger, gateway.clock) == 1
    await ledger.close()

    gateway.clock.go(1_200.0)
    await gateway.start()
    told = await gateway.end_of(queued)
    assert told.error is not None
    assert (told.state, told.error.reason) == (OperationState.FAILED, "LEDGER_RESTORED")
    assert told.error.effect is FailureEffect.UNKNOWN
    entries = (await gateway.ledger.audit.page(AuditFilter(operation_id=queued.id))).items
    assert entries[0].entry.reason == "LEDGER_RESTORED"
    # By its key, and of what was under way the engine tells the end.
    assert (await gateway.orders.submit(wanted)).operation == told
    assert (await gateway.end_of(drain)).state is OperationState.SUCCEEDED
    orders = [key for method, key in engine.received if method in ("Pause", "FlushCaches")]
    assert orders.count(queued.id) == 1
