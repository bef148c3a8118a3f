"""Engines of real SGLang for the tests in this folder. They run in `make test-sglang` alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.e2e.driving import Gateway
from tests.real.asking import Said, generate
from tests.real.beside import Sidecar, beside
from tests.real.gateway import ENGINE, gateway, register
from tests.real.servers import Server, give_time, made_models
from tests.sglang.servers import DATA, HOME, PYTHON, options, serving

LAYER = f"""
[[compat]]
layer = "sglang"
engines = ["{ENGINE}"]
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    give_time(items, Path(__file__).parent)


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder with the models `a`, `b` and what is wrong with others."""
    assert (HOME / "done-importable").exists(), "real SGLang is not built: run scripts/setup-sglang"
    return made_models(PYTHON, DATA)


@pytest.fixture(scope="session")
def of_b(models: Path) -> Said:
    """What an engine says that was started with `b`; it ends before any other starts."""
    with serving(models / "b") as server:
        return generate(server)


@pytest.fixture(scope="module")
def engine(of_b: Said, models: Path) -> Iterator[Server]:
    """SGLang with model `a` and room for two adapters; one for the tests of a module."""
    with serving(models / "a", lora=True) as server:
        yield server


@pytest.fixture(scope="module")
def sidecar(
    engine: Server, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("sidecar")
    with beside(engine, folder, models, *options(folder)) as running:
        yield running


@pytest.fixture(scope="module")
async def bridge(
    sidecar: Sidecar, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A gateway that knows the sidecar, with the endpoint layer on."""
    with gateway(tmp_path_factory.mktemp("gateway"), LAYER) as serving_:
        async with serving_.client:
            await register(serving_, sidecar.admin, "openengine")
            yield serving_
