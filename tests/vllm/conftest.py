"""Engines of real vLLM for the tests in this folder. They run in `make test-vllm` alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.servers import Server, give_time, made_models
from tests.vllm.servers import DATA, HOME, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    give_time(items, Path(__file__).parent)


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder with the models `a`, `b` and what is wrong with others."""
    assert (HOME / "done-plugin").exists(), "real vLLM is not built: run scripts/setup-vllm"
    return made_models(HOME / "env" / "bin" / "python", DATA)


@pytest.fixture(scope="module")
def python_engine(models: Path) -> Iterator[Server]:
    """vLLM's Python server with model `a`; one for the tests of a module."""
    with serving(models / "a") as server:
        yield server


@pytest.fixture(scope="module")
def rust_engine(models: Path) -> Iterator[Server]:
    """vLLM's Rust front end with `vllm.Control` and model `a`; one for the tests of a module."""
    with serving(models / "a", rust=True) as server:
        yield server
