"""A database that fails: no fact is lost, none is written twice, and no order is sent for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from app.domain.kinds import FailureEffect, OperationState
from app.ledger.errors import LedgerUnavailable
from app.ledger.values import AuditFilter
from tests.doubles.engine import EngineDouble
from tests.enginekit.minimal_engine import until as released_by
from tests.operations.faulty_ledger import FAULTS, Fault, FaultyLedger
from tests.operations.gateway import CALLER, DRAIN, FLUSH, Gateway, request, running_gateway, until
from tests.operations.scripted_backend import SENDS, ScriptedBackend, Send
from tests.operations.test_courses import World, _proved, _true

pytestmark = pytest.mark.anyio


@pytest.fixture
async def faulty(
    tmp_path: Path, engine: EngineDouble
) -> AsyncIterator[tuple[Gateway, FaultyLedger]]:
    ledgers: list[FaultyLedger] = []

    def seen_as(ledger: object) -> FaultyLedger:
        ledgers.append(FaultyLedger(ledger))  # type: ignore[arg-type]
        return ledgers[-1]

    async with running_gateway(tmp_path, seen_as=seen_as) as gateway:
        await gateway.register(engine.admin_address)
        yield gateway, ledgers[-1]


class TestRecording:
    @pytest.mark.parametrize("fault", ["before", "after"])
    async def test_each_entry_may_fail_and_is_written_once(
        self, faulty: tuple[Gateway, FaultyLedger], engine: EngineDouble, fault: Fault
    ) -> None:
        gateway, ledger = faulty
        fine = await gateway.end_of(await gateway.give(FLUSH))
        expected = await gateway.types_of(fine.id)
        for position in range(len(expected) - 1):
            ledger.faults["record"] = [*["fine"] * position, *[fault] * 2]  # type: ignore[list-item]
            ended = await gateway.end_of(await gateway.give(FLUSH))
            assert ended.state is OperationState.SUCCEEDED
            assert await gateway.types_of(ended.id) == expected
        assert ledger.failed >= len(expected) - 1
        assert len(engine.orders) == len(expected)

    async def test_the_end_is_audited_once(self, faulty: tuple[Gateway, FaultyLedger]) -> None:
        gateway, ledger = faulty
        ledger.faults["record"] = ["after"] * 20
        ended = await gateway.end_of(await gateway.give(FLUSH))
        page = await gateway.ledger.audit.page(AuditFilter(operation_id=ended.id))
        assert [each.entry.outcome for each in page.items] == ["succeeded", "accepted"]

    async def test_an_acceptance_that_nobody_heard_of_is_found_by_its_key(
        self, faulty: tuple[Gateway, FaultyLedger], engine: EngineDouble
    ) -> None:
        gateway, ledger = faulty
        ledger.faults["accept"] = ["after"]
        wanted = request(DRAIN, key="k", fingerprint="f")
        with pytest.raises(LedgerUnavailable):
            await gateway.orders.submit(wanted)
        # It is carried out without anybody asking for it again, and once.
        again = await gateway.orders.submit(wanted)
        assert not again.fresh
        assert (await gateway.end_of(again.operation)).state is OperationState.SUCCEEDED
        assert len(engine.orders) == 1

    async def test_a_cancellation_is_audited_with_what_it_does(
        self, faulty: tuple[Gateway, FaultyLedger], engine: EngineDouble
    ) -> None:
        gateway, ledger = faulty
        engine.engine.script("prepare", released_by(go := asyncio.Event()))
        first = await gateway.give(DRAIN)
        queued = await gateway.give(FLUSH, when_busy="queue")
        ledger.faults["append"] = ["before"]
        assert (await gateway.orders.cancel(queued.id, CALLER)).state is OperationState.CANCELLED
        page = await gateway.ledger.audit.page(AuditFilter(operation_id=queued.id))
        told = [(each.entry.action, each.entry.outcome) for each in reversed(page.items)]
        assert told[1:] == [("cancel", "accepted"), ("flush_caches", "cancelled")]
        go.set()
        await gateway.end_of(first)

    async def test_an_acceptance_that_did_not_happen_did_not(
        self, faulty: tuple[Gateway, FaultyLedger], engine: EngineDouble
    ) -> None:
        gateway, ledger = faulty
        ledger.faults["accept"] = ["before"]
        wanted = request(DRAIN, key="k", fingerprint="f")
        with pytest.raises(LedgerUnavailable):
            await gateway.orders.submit(wanted)
        assert (await gateway.orders.submit(wanted)).fresh


class TestBeingAway:
    async def test_orders_under_way_survive_it(
        self, faulty: tuple[Gateway, FaultyLedger], engine: EngineDouble
    ) -> None:
        """For longer than the lease lasts; nobody else can have taken it either."""
        gateway, ledger = faulty
        go = asyncio.Event()
        engine.engine.script("prepare", released_by(go))
        operation = await gateway.give(DRAIN)
        await until(lambda: engine.orders)
        away: list[Fault] = ["before"] * 30
        for name in ("record", "renew", "get", "open_marks", "acquire", "observe"):
            ledger.faults[name] = list(away)
        gateway.clock.go(60)
        go.set()
        ended = await gateway.end_of(operation)
        assert ended.state is OperationState.SUCCEEDED
        assert len(engine.orders) == 1

    async def test_what_could_not_be_written_in_time_is_not_sent(
        self, faulty: tuple[Gateway, FaultyLedger], engine: EngineDouble
    ) -> None:
        gateway, ledger = faulty
        ledger.faults["record"] = ["before"] * 5
        operation = await gateway.give(DRAIN, deadline_ms=1_000)
        await until(lambda: ledger.failed > 0)
        gateway.clock.go(60)
        ended = await gateway.end_of(operation)
        assert ended.error is not None
        assert ended.error.reason == "DEADLINE_EXCEEDED"
        assert ended.error.effect is FailureEffect.NONE
        assert engine.rpcs["Pause"] == 0

    async def test_a_start_in_it_waits(
        self, faulty: tuple[Gateway, FaultyLedger], engine: EngineDouble
    ) -> None:
        gateway, ledger = faulty
        for name in ("acquire", "open_marks"):
            ledger.faults[name] = ["before"] * 3
        ended = await gateway.end_of(await gateway.give(FLUSH))
        assert ended.state is OperationState.SUCCEEDED


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"), seen_as=FaultyLedger)
    yield made
    made.close()


faults = st.lists(st.sampled_from(FAULTS), max_size=8)


class TestAnyFaults:
    # Not shrunk: an example that fails waits half a minute for an end that does not come.
    @settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(
        sends=st.lists(st.sampled_from(SENDS), max_size=4), records=faults, gets=faults, rest=faults
    )
    def test_an_operation_ends_truthfully(
        self,
        world: World,
        sends: list[Send],
        records: list[Fault],
        gets: list[Fault],
        rest: list[Fault],
    ) -> None:
        async def live() -> None:
            backend = ScriptedBackend(sends)
            engine_id = await world.engine(backend)
            operation = await world.gateway.give(DRAIN, engine_id)
            ledger = cast("FaultyLedger", world.gateway.runner._ledger)
            ledger.faults = {"record": records, "get": gets, "acquire": list(rest), "renew": rest}
            try:
                ended = await world.gateway.end_of(operation)
            finally:
                ledger.faults = {}
            _true(backend, ended)
            _proved(backend, ended)

        world.run(live())
