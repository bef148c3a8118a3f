"""Registrations, orders and backends for tests on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

from app.backends.credentials import Credentials, CredentialSettings
from app.backends.kept_states import KeptStates
from app.backends.port import EngineBackend, Order
from app.backends.reach import ReachPolicy
from app.backends.registry import Backends
from app.backends.streams import StreamLimits
from app.clock import SystemClock, uuid7
from app.domain.commands import Command, Pause
from app.domain.engine import Dialect, Member, Registration, TlsNames
from app.domain.kinds import PauseMode
from app.domain.transitions import Fact

LOOPBACK = ReachPolicy(cidrs=("127.0.0.0/8", "::1/128"))
QUICK = StreamLimits(idle_s=0.2, ask_s=1.0, settle_s=1.0, attached_s=5.0, abort_s=1.0)


def registration(address: str, *, tls: TlsNames | None = None, generation: int = 1) -> Registration:
    at = datetime(2026, 3, 1, tzinfo=UTC)
    return Registration(
        id="e1",
        dialect=Dialect.OPENENGINE,
        members=(Member(0, address, address),),
        tls=tls or TlsNames(),
        generation=generation,
        created_at=at,
        updated_at=at,
    )


def order(
    command: Command | None = None, *, operation_id: str | None = None, deadline_s: float = 30.0
) -> Order:
    return Order(
        operation_id=operation_id or uuid7(),
        command=command or Pause(mode=PauseMode.DRAIN),
        expected_revision=None,
        deadline_at=datetime.now(UTC) + timedelta(seconds=deadline_s),
        deadline_ms=max(int(deadline_s * 1000), 1),
    )


def backends(
    entries: dict[str, CredentialSettings] | None = None,
    reach: ReachPolicy = LOOPBACK,
    limits: StreamLimits = QUICK,
    kept: KeptStates | None = None,
) -> Backends:
    clock = SystemClock()
    return Backends(reach, Credentials(entries or {}, clock), clock, kept=kept, limits=limits)


async def told(backend: EngineBackend, wanted: Order) -> list[Fact]:
    """All facts; the exception that ends them goes through."""
    async with aclosing(backend.carry_out(wanted)) as facts:
        return [fact async for fact in facts]


async def until(holds: Callable[[], bool]) -> None:
    """Until it holds; the test's own time limit is the bound."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
