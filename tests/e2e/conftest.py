from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.driving import Gateway, Talk, talk
from tests.e2e.processes import Demo, cleaned


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """One `chadburn demo` for all tests that leave it as they found it."""
    demo = Demo.begin(tmp_path_factory.mktemp("demo"), "--step-delay-ms=20")
    with cleaned(demo.process):
        demo.ready = demo.process.ready(demo.folder / "ready.json")
        yield demo
        assert demo.process.stop() == 0, demo.logs()


@dataclass
class Bridge:
    """The operator's view of a running gateway and its engine."""

    gateway: Gateway
    engine: str
    ready: dict[str, Any]

    def talk(self, prompt: str, **wanted: Any) -> Talk:
        address, token = self.ready["inference_address"], self.ready["tokens"]["inference"]
        return talk(address, token, prompt, **wanted)

    async def order(self, verb: str, body: dict[str, Any], **more: Any) -> Any:
        return await self.gateway.order(self.engine, verb, body, **more)

    async def accepted(self, verb: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        return await self.gateway.accepted(self.engine, verb, body, **more)

    async def does(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self.gateway.does(self.engine, verb, body)


@pytest.fixture
async def bridge(demo: Demo) -> AsyncIterator[Bridge]:
    """The demo with its engine serving."""
    gateway = Gateway(demo.ready["base_url"], demo.ready["tokens"]["operator"])
    async with gateway.client:
        await gateway.open_again(demo.ready["engine"])
        yield Bridge(gateway, demo.ready["engine"], demo.ready)
