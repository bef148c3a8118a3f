"""Calls that overtake each other: between a call's looks the world changes, also by its twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from app.backends.port import Discovery, EngineSilent, Silence
from app.domain.commands import Resume
from app.domain.engine import Dialect, HealthState, Member
from app.domain.errors import IdempotencyKeyReused, NotPaused
from app.domain.kinds import OperationState
from app.ledger import Ledger
from app.ledger.values import AuditFilter
from app.operations.orders import OrderRequest
from app.operations.registering import EngineDraft
from tests.doubles.engine import EngineDouble
from tests.operations.gateway import CALLER, DRAIN, Gateway, request, running_gateway, until
from tests.operations.scripted_backend import ScriptedBackend, ScriptedBackends

pytestmark = pytest.mark.anyio


class HeldLookups:
    """A real ledger, in which the call that is held stands still once it has looked the engine up,
    and before it is judged by what it saw."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.engines = _Engines(self, ledger)
        self.hold: ContextVar[asyncio.Event | None] = ContextVar("hold", default=None)
        self.held = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


class _Engines:
    def __init__(self, lookups: HeldLookups, ledger: Ledger) -> None:
        self._lookups = lookups
        self._inner = ledger.engines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get(self, engine_id: str) -> Any:
        hold, found = self._lookups.hold.get(), await self._inner.get(engine_id)
        if hold is not None and not self._lookups.held:
            self._lookups.held += 1
            await hold.wait()
        return found


class TestTwins:
    """Of calls with one key, one that looked the engine up before the first was taken on, and was
    judged after the first had changed what it is judged by."""

    @pytest.fixture
    async def paused(
        self, tmp_path: Path, engine: EngineDouble
    ) -> AsyncIterator[tuple[Gateway, HeldLookups, Resume]]:
        seen: list[HeldLookups] = []

        def see(ledger: Ledger) -> HeldLookups:
            seen.append(HeldLookups(ledger))
            return seen[-1]

        async with running_gateway(tmp_path, seen_as=see) as gateway:
            await gateway.register(engine.admin_address)
            ended = await gateway.end_of(await gateway.give(DRAIN))
            assert ended.result is not None
            epoch = ended.result["pause_epoch"]
            assert isinstance(epoch, int)
            yield gateway, seen[0], Resume(pause_epoch=epoch)

    async def late(
        self, gateway: Gateway, lookups: HeldLookups, late: OrderRequest, first: OrderRequest
    ) -> Any:
        """What `late` gets when `first` is carried out between its look-up and its judgement."""
        hold = asyncio.Event()
        token = lookups.hold.set(hold)  # for what this call begins, and nobody else
        call = asyncio.ensure_future(gateway.orders.submit(late))
        lookups.hold.reset(token)
        await until(lambda: lookups.held)
        taken = (await gateway.orders.submit(first)).operation
        assert (await gateway.end_of(taken)).state is OperationState.SUCCEEDED
        hold.set()
        return await call

    async def test_are_given_the_operation_and_not_its_consequences(
        self, paused: tuple[Gateway, HeldLookups, Resume]
    ) -> None:
        gateway, lookups, resume = paused
        twin = request(resume, key="one")
        accepted = await self.late(gateway, lookups, twin, twin)
        assert accepted.fresh is False
        assert accepted.operation.state is OperationState.SUCCEEDED
        resumes = await gateway.ledger.audit.page(AuditFilter(action="resume"))
        outcomes = sorted(stored.entry.outcome for stored in resumes.items)
        assert outcomes == ["accepted", "succeeded"]

    async def test_with_another_body_the_key_is_what_is_wrong(
        self, paused: tuple[Gateway, HeldLookups, Resume]
    ) -> None:
        gateway, lookups, resume = paused
        other = request(resume, key="one", fingerprint="g")
        with pytest.raises(IdempotencyKeyReused):
            await self.late(gateway, lookups, other, request(resume, key="one"))

    async def test_another_key_is_refused_for_what_has_changed(
        self, paused: tuple[Gateway, HeldLookups, Resume]
    ) -> None:
        gateway, lookups, resume = paused
        with pytest.raises(NotPaused):
            await self.late(
                gateway, lookups, request(resume, key="two"), request(resume, key="one")
            )


class Answering(ScriptedBackend):
    """Each reading waits for its turn: the next of `turns`, which also says whether it succeeds."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[asyncio.Future[bool]] = []

    async def discover(self, timeout_s: float) -> Discovery:
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.turns.append(turn)
        if await turn:
            return await super().discover(timeout_s)
        raise EngineSilent(Silence.UNREACHABLE)


async def test_a_reading_in_vain_does_not_bring_older_facts_back(tmp_path: Path) -> None:
    backend = Answering()
    made = ScriptedBackends({"e1": backend})
    async with running_gateway(tmp_path, make_backends=lambda _: made) as gateway:
        draft = EngineDraft(
            id="e1", dialect=Dialect.OPENENGINE, members=(Member(0, "127.0.0.1:1", "127.0.0.1:1"),)
        )
        await gateway.fleet.register(draft, CALLER)
        await until(lambda: backend.turns)
        backend.turns[0].set_result(True)

        async def life() -> tuple[str | None, HealthState]:
            observed = (await gateway.fleet.engine("e1")).observed
            return (observed.facts.instance_id if observed.facts else None), observed.health

        async def is_read() -> bool:
            return await life() == ("life-1", HealthState.SERVING)

        await until(is_read)
        backend.restart(remembers=False)
        answered = asyncio.ensure_future(gateway.fleet.reread("e1", 60.0))
        await until(lambda: len(backend.turns) == 2)
        vain = asyncio.ensure_future(gateway.fleet.reread("e1", 60.0))
        await until(lambda: len(backend.turns) == 3)
        backend.turns[1].set_result(True)
        await answered
        backend.turns[2].set_result(False)
        assert (await vain).observed.health is HealthState.UNREACHABLE
        assert await life() == ("life-2", HealthState.UNREACHABLE)
