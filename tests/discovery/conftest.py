"""A ledger and a fleet without engines that answer, and lists written by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.discovery.follower import Follower, Rhythm
from app.domain.engine import Dialect, Member, Registration
from app.ledger.values import AuditFilter, EngineFilter
from app.operations.registering import EngineDraft
from tests.operations.gateway import Gateway, running_gateway


def draft(engine_id: str = "e1", address: str = "127.0.0.1:1", **changes: Any) -> EngineDraft:
    values: dict[str, Any] = {
        "id": engine_id,
        "dialect": Dialect.OPENENGINE,
        "members": (Member(0, address, address),),
    }
    return EngineDraft(**(values | changes))


def listing(*drafts: EngineDraft) -> dict[str, EngineDraft]:
    return {one.id: one for one in drafts}


@dataclass
class Told:
    """A source that says what the test says."""

    name: str = "file"
    listed: Mapping[str, EngineDraft] | None = None
    faults: tuple[str, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)

    async def follow(self, changed: Any) -> None:
        raise NotImplementedError


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


def follower(gateway: Gateway, source: Any, owner: str = "a", **options: Any) -> Follower:
    """One that looks at everything in each round."""
    rhythm = options.pop("rhythm", Rhythm(whole_s=0.0))
    return Follower(
        source, gateway.ledger, gateway.fleet, gateway.clock, owner=owner, rhythm=rhythm, **options
    )


async def registered(gateway: Gateway) -> dict[str, Registration]:
    page = await gateway.ledger.engines.page(EngineFilter(), None, 500)
    return {engine.id: engine.registration for engine in page.items}


async def audited(gateway: Gateway, action: str) -> list[tuple[str, str | None, str | None]]:
    """Outcome, reason and subject of each entry, oldest first."""
    page = await gateway.ledger.audit.page(AuditFilter(action=action), None, 200)
    entries = [stored.entry for stored in page.items]
    found = [
        (one.outcome, one.reason, None if one.actor is None else one.actor.subject)
        for one in entries
    ]
    return found[::-1]
