"""A sidecar in this process, over the double of an engine's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from app.enginekit.server import KitSettings
from app.sidecars.allowed import Allowed
from app.sidecars.http import Patience
from app.sidecars.serving import Dialect, Served, SidecarSettings, serve_lives
from app.sidecars.vllm.dialect import VllmDialect
from tests.doubles.engine_http import EngineDouble
from tests.doubles.vllm_http import VllmDouble
from tests.enginekit.client import Client, client_of, until

# A quick machine's, and still far beyond what the double takes.
PATIENCE = Patience(read_s=5.0, control_s=10.0, watch_s=0.1)


class Sidecar:
    """`lives`: what was told of each. `kit`: changed settings of the kit."""

    def __init__(
        self,
        double: EngineDouble,
        data_dir: Path,
        *,
        dialect: Dialect | None = None,
        allowed: Allowed | None = None,
        patience: Patience = PATIENCE,
        look_s: float = 0.1,
        **kit: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "insecure_loopback": True, "observe_interval_s": 0.1, "cancel_grace_s": 1.0, **kit,
        }  # fmt: skip
        self.settings = SidecarSettings(
            url=double.url,
            dialect=dialect or VllmDialect(),
            kit=KitSettings(data_dir=data_dir, **settings),
            allowed=allowed or Allowed(),
            patience=patience,
            look_s=look_s,
            retry_s=0.05,
            stop_grace_s=0,
        )
        self.lives: list[Served] = []
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        before = len(self.lives)
        self.task = asyncio.create_task(serve_lives(self.settings, self.lives.append))
        task = self.task
        await until(lambda: len(self.lives) > before or task.done(), 30)
        if task.done():
            task.result()

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    @property
    def admin_address(self) -> str:
        return self.lives[-1].admin_address

    @property
    def inference_address(self) -> str:
        return self.lives[-1].inference_address

    @property
    def instance_id(self) -> str:
        return self.lives[-1].instance_id


@asynccontextmanager
async def running_sidecar(
    double: EngineDouble, data_dir: Path, **options: Any
) -> AsyncIterator[Sidecar]:
    sidecar = Sidecar(double, data_dir, **options)
    await sidecar.start()
    try:
        yield sidecar
    finally:
        await sidecar.stop()


@asynccontextmanager
async def administered(
    double: EngineDouble, data_dir: Path, **options: Any
) -> AsyncIterator[tuple[Sidecar, Client]]:
    async with (
        running_sidecar(double, data_dir, **options) as sidecar,
        client_of(sidecar) as client,
    ):
        yield sidecar, client


async def asked(vllm: VllmDouble, request_id: str, tokens: int = 100_000) -> asyncio.Task[str]:
    """A completion that a client sends to the engine itself, once it has begun. The task ends with
    how it ended."""
    begun = asyncio.Event()

    async def read() -> str:
        body = {"model": "tiny", "prompt": "x", "max_tokens": tokens, "stream": True}
        end = "nothing"
        async with (
            httpx2.AsyncClient(timeout=None, trust_env=False) as http,
            http.stream(
                "POST",
                f"{vllm.url}/v1/completions",
                json=body,
                headers={"x-request-id": request_id},
            ) as response,
        ):
            async for line in response.aiter_lines():
                begun.set()
                for reason in ("length", "abort"):
                    if f'"finish_reason": "{reason}"' in line:
                        end = reason
                if '"error"' in line:
                    end = "error"
        begun.set()
        return end

    task = asyncio.create_task(read())
    await begun.wait()
    return task
