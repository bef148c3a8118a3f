"""A gateway that speaks `vllm.Control` to one or several members."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.backends.credentials import Credentials
from app.backends.registry import Backends
from app.domain.commands import Command
from app.domain.engine import Dialect, Engine, Member
from app.domain.facts import EngineFacts
from app.domain.operation import Operation
from app.operations.pace import Pace
from app.operations.registering import EngineDraft
from tests.doubles.empty_ledger import place_empty_ledger
from tests.doubles.vllm_control import RunningControl, VllmControl, running_controls
from tests.operations.gateway import BRISK, CALLER, LOOPBACK, QUICK, Gateway


class VllmGateway(Gateway):
    """`controls`: the members, by rank."""

    def __init__(
        self, folder: Path, controls: Sequence[RunningControl], pace: Pace = BRISK
    ) -> None:
        self.controls = list(controls)
        super().__init__(
            f"sqlite+aiosqlite:///{folder}/ledger.db", pace=pace, make_backends=self._made
        )

    def _made(self, clock: Any) -> Backends:
        states = self.ledger.kept_states
        return Backends(LOOPBACK, Credentials({}, clock), clock, kept=states, limits=QUICK)

    @property
    def engine(self) -> VllmControl:
        """The first member."""
        return self.controls[0].control

    async def register_members(self) -> None:
        members = tuple(
            Member(rank, one.address, one.address) for rank, one in enumerate(self.controls)
        )
        await self.fleet.register(
            EngineDraft(id="e1", dialect=Dialect.VLLM, members=members), CALLER
        )
        await self.fleet.discover("e1")

    async def known(self) -> Engine:
        await self.fleet.reread("e1", 5.0)
        return await self.fleet.engine("e1")

    async def facts(self) -> EngineFacts:
        await self.fleet.discover("e1")
        facts = (await self.fleet.engine("e1")).observed.facts
        assert facts is not None
        return facts

    async def carry_out(self, command: Command, **more: Any) -> Operation:
        return await self.end_of(await self.give(command, **more))

    async def kept(self) -> Any:
        return await self.ledger.kept_states.get("e1")


@asynccontextmanager
async def vllm_gateway(
    folder: Path, members: int = 1, *, version: str = "0.32.0", pace: Pace = BRISK
) -> AsyncIterator[VllmGateway]:
    async with running_controls(members, version=version) as controls:
        await place_empty_ledger(folder / "ledger.db")
        gateway = VllmGateway(folder, controls, pace)
        await gateway.start()
        try:
            await gateway.register_members()
            yield gateway
        finally:
            await gateway.stop()
