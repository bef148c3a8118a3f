"""Orders to an engine that has no admin service, from the gateway's door to its book."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.backends.credentials import Credentials
from app.backends.registry import Backends
from app.domain.commands import AbortRequests, LoadLora, UnloadLora
from app.domain.engine import HealthState
from app.domain.errors import UnsupportedOperation
from app.domain.kinds import FailureEffect, OperationState, RevisionSource
from tests.doubles.core_engine import CoreEngine, Lost, Never, running_core_engine
from tests.doubles.empty_ledger import place_empty_ledger
from tests.operations.gateway import BRISK, DRAIN, LOOPBACK, QUICK, Gateway, until

pytestmark = pytest.mark.anyio

S = OperationState
SQL = LoadLora(name="sql", path="/loras/sql")


class CoreGateway(Gateway):
    def __init__(self, folder: Path) -> None:
        url = f"sqlite+aiosqlite:///{folder}/ledger.db"
        super().__init__(url, pace=BRISK, make_backends=self._made)

    def _made(self, clock: Any) -> Backends:
        states = self.ledger.kept_states
        return Backends(LOOPBACK, Credentials({}, clock), clock, kept=states, limits=QUICK)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[CoreGateway, CoreEngine]]:
    async with running_core_engine() as engine:
        await place_empty_ledger(folder / "ledger.db")
        gateway = CoreGateway(folder)
        await gateway.start()
        try:
            await gateway.register(engine.address)
            yield gateway, engine
        finally:
            await gateway.stop()


async def test_it_is_serving_and_takes_what_it_has_calls_for(tmp_path: Path) -> None:
    async with running(tmp_path) as (gateway, _):
        known = (await gateway.fleet.engine("e1")).observed
        assert known.health is HealthState.SERVING
        assert known.facts is not None
        assert known.facts.revision_source is RevisionSource.GATEWAY
        with pytest.raises(UnsupportedOperation):
            await gateway.give(DRAIN)
        loaded = await gateway.end_of(await gateway.give(SQL))
        assert (loaded.state, loaded.revision) == (S.SUCCEEDED, 1)
        gone = await gateway.end_of(await gateway.give(UnloadLora(name="sql")))
        assert (gone.state, gone.revision) == (S.SUCCEEDED, 2)
        ended = await gateway.end_of(await gateway.give(AbortRequests(request_ids=("r-1",))))
        assert ended.result is not None
        assert ended.result["requests"] == [{"request_id": "r-1", "outcome": "already_finished"}]


async def test_the_reply_that_is_lost_is_told_by_the_list(tmp_path: Path) -> None:
    async with running(tmp_path) as (gateway, engine):
        engine.next("LoadLora", Lost())
        ended = await gateway.end_of(await gateway.give(SQL))
        assert ended.state is S.SUCCEEDED
        assert ended.result is not None
        assert ended.result["changed"] is None
        assert len(engine.sent("LoadLora")) == 1


@pytest.mark.long
async def test_an_order_that_does_not_show_is_not_sent_again(tmp_path: Path) -> None:
    """It may yet come. Another process has never had it."""
    async with running(tmp_path) as (gateway, engine):
        engine.next("LoadLora", Never())
        given = await gateway.give(SQL, deadline_ms=1_000)
        await gateway.until(given, S.RECONCILING)
        asked = len(engine.sent("ListLoras"))
        await until(lambda: len(engine.sent("ListLoras")) > asked + 3)
        assert await gateway.state_of(given) is S.RECONCILING
        assert len(engine.sent("LoadLora")) == 1
        await engine.restart()
        ended = await gateway.end_of(given)
        assert ended.error is not None
        assert (ended.state, ended.error.reason) == (S.FAILED, "ENGINE_RESTARTED")
        assert ended.error.effect is FailureEffect.UNKNOWN
        assert len(engine.sent("LoadLora")) == 1
