from __future__ import annotations

import io
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from app.observability.log import configure_logging
from tests.http.full import Full, full_engine
from tests.http.gateway import Gateway, gateway
from tests.idp.oidc_provider.running import RealProvider, real_provider


def quiet() -> None:
    """A line for each request would bury what a failing test has to say."""
    structlog.reset_defaults()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


quiet()


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with one engine, `e1`, that carries out what it is told."""
    async with gateway(tmp_path / "data") as made:
        yield made


@pytest.fixture(scope="session")
def provider() -> Iterator[RealProvider]:
    """npm oidc-provider: one process for all tests that log in there."""
    with real_provider() as running:
        yield running


@pytest.fixture
async def full(gate: Gateway, tmp_path: Path) -> AsyncIterator[Full]:
    """An engine of two ranks, `full`, that offers every order."""
    async with full_engine(gate, tmp_path / "full") as made:
        yield made


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What the process logs while the test runs, at the chattiest level, as a server would."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    try:
        yield stream
    finally:
        root.handlers[:], root.level = handlers, level
        quiet()
