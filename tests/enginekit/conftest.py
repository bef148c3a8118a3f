from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.doubles.engine import EngineDouble, running_engine
from tests.enginekit.client import Client, client_of
from tests.enginekit.full_engine import FullEngine
from tests.enginekit.minimal_engine import MinimalEngine


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    async with running_engine(tmp_path / "engine") as running:
        yield running


@pytest.fixture
async def ranks3(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    """Three ranks, and little patience with those that do not answer."""
    async with running_engine(
        tmp_path / "engine",
        make_engine=lambda: MinimalEngine(world_size=3),
        cancel_grace_s=0.2,
        rollback_timeout_s=0.5,
        straggler_s=0.2,
    ) as running:
        yield running


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    """Two ranks with all that a runtime may offer."""
    async with running_engine(
        tmp_path / "engine",
        make_engine=lambda: FullEngine(world_size=2),
        cancel_grace_s=0.2,
        rollback_timeout_s=0.5,
        straggler_s=0.2,
    ) as running:
        yield running


@pytest.fixture
def engine(full: EngineDouble) -> FullEngine:
    assert isinstance(full.engine, FullEngine)
    return full.engine


@pytest.fixture
async def client(double: EngineDouble) -> AsyncIterator[Client]:
    async with client_of(double) as connected:
        yield connected
