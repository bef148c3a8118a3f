"""Real gRPC on loopback: an engine that follows a script, and a backend that talks to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from app.backends.port import EngineBackend
from tests.backends.scripted_engine import ScriptedEngine
from tests.backends.ways import backends, registration


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    scripted = ScriptedEngine()
    await scripted.start()
    try:
        yield scripted
    finally:
        await scripted.stop()


@pytest.fixture
async def backend(engine: ScriptedEngine) -> AsyncIterator[EngineBackend]:
    known = backends()
    try:
        yield known.of(registration(f"127.0.0.1:{engine.port}"))
    finally:
        await known.close()
