from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from tests.http.gateway import Gateway, gateway

# A line for each request would bury what a failing test has to say.
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with one engine, `e1`, that carries out what it is told."""
    async with gateway(tmp_path / "data") as made:
        yield made
