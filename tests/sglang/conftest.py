"""Engines of real SGLang for the tests in this folder. They run in `make test-sglang` alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.servers import Server, made_models
from tests.sglang.servers import DATA, HOME, PYTHON, serving

# An engine's start takes up to a minute on two cores, and some tests start several.
LIMIT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder with the models `a`, `b` and what is wrong with others."""
    assert (HOME / "done-importable").exists(), "real SGLang is not built: run scripts/setup-sglang"
    return made_models(PYTHON, DATA)


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[Server]:
    """SGLang with model `a`, without keys and adapters; one for the tests of a module."""
    with serving(models / "a") as server:
        yield server
