"""Workers behind Dynamo's own runtime, for `make test-dynamo` alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dynamo.servers import HOME, DynamoServer, serving
from tests.e2e.driving import Gateway
from tests.real.beside import Sidecar, beside
from tests.real.gateway import ENGINE, gateway, register
from tests.sidecars.checkpoints import checkpoint

PATH = f"/v1/engines/{ENGINE}"


@dataclass(frozen=True)
class Bridge:
    """A gateway, the sidecar that it orders, and the worker behind. `files`: what orders may name:
    the checkpoints `a` (the worker's own) and `b`, and an adapter."""

    gateway: Gateway
    sidecar: Sidecar
    worker: DynamoServer
    files: Path

    async def does(self, what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """An order that succeeds."""
        return await self.gateway.does(ENGINE, what, body or {})

    async def facts(self) -> Any:
        return (await self.gateway.client.get(PATH)).json()["facts"]

    async def resumed(self) -> None:
        epoch = (await self.facts())["pause"]["epoch"]
        await self.does("resume", {"pause_epoch": epoch})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    there = (HOME / "done-importable").exists()
    assert there, "Dynamo's runtime is not built: run scripts/setup-dynamo"


@pytest.fixture
def worker() -> Iterator[DynamoServer]:
    """One that has vLLM's callbacks."""
    with serving("vllm") as server:
        yield server


@pytest.fixture
async def bridge(worker: DynamoServer, tmp_path: Path) -> AsyncIterator[Bridge]:
    files = tmp_path / "files"
    model = checkpoint(files / "a", 1)
    checkpoint(files / "b", 2)
    (files / "lora").mkdir()
    with (
        beside(worker, tmp_path, files, f"--model-path={model}") as sidecar,
        gateway(tmp_path) as front,
    ):
        async with front.client:
            await register(front, sidecar.admin, "openengine")
            yield Bridge(front, sidecar, worker, files)
