"""One engine on real gRPC, and a gateway that has it registered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.doubles.engine import EngineDouble, running_engine
from tests.operations.gateway import Gateway, running_gateway


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EngineDouble]:
    async with running_engine(tmp_path / "engine") as double:
        yield double


@pytest.fixture
async def gateway(tmp_path: Path, engine: EngineDouble) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        await running.register(engine.admin_address)
        yield running
