"""A real engine for the tests: a tiny model in a rank process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.reference_engine import messages as m
from app.reference_engine.engine import Engine
from app.reference_engine.limits import CoreSettings
from app.reference_engine.nursery import Nursery
from tests.reference_engine.ranks import nursery

PROMPT = (
    "the captain orders the helm hard to port and the pilot repeats the order, slow astern, "
    "stop engines, half ahead, steady as she goes through the narrow channel, wind from the west"
)
# Ten times and more what anything here takes: it only bounds a test that would hang.
PATIENCE_S = 60.0


@asynccontextmanager
async def serving(
    checkpoint: Path, *, ranks_from: Nursery | None = None, **settings: Any
) -> AsyncGenerator[Engine, None]:
    deadlines = {key: settings.pop(key) for key in tuple(settings) if key.endswith("_s")}
    engine = await Engine.start(
        checkpoint,
        CoreSettings(torch_threads=1, **settings),
        nursery=ranks_from or nursery(),
        **deadlines,
    )
    try:
        yield engine
    finally:
        await engine.close()


@dataclass
class Answer:
    """Everything one request's stream said."""

    text: str = ""
    tokens: list[m.OutputToken] = field(default_factory=list)
    end: m.Finished | m.Failed | m.Prefilled | None = None

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def finished(self) -> m.Finished:
        assert isinstance(self.end, m.Finished), self.end
        return self.end

    def take(self, report: m.RequestReport) -> None:
        assert self.end is None, "nothing follows the end"
        if isinstance(report, m.Tokens):
            self.text += report.text
            self.tokens += report.tokens
        else:
            self.end = report


class Asked:
    """A request on its way, read in the background."""

    def __init__(self, engine: Engine, request: m.GenerationRequest) -> None:
        self.answer = Answer()
        self._arrived = asyncio.Condition()
        self._task = asyncio.create_task(self._read(engine, request))

    async def _read(self, engine: Engine, request: m.GenerationRequest) -> None:
        async for report in engine.generate(request):
            self.answer.take(report)
            async with self._arrived:
                self._arrived.notify_all()

    async def after(self, tokens: int) -> Asked:
        """Once that many tokens are there."""
        async with asyncio.timeout(PATIENCE_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.answer.tokens) >= tokens)
        return self

    async def whole(self) -> Answer:
        async with asyncio.timeout(PATIENCE_S):
            await self._task
        return self.answer

    async def leave(self) -> None:
        """As a client that hangs up; returns when the engine has let go of the request."""
        self._task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(self._task, return_exceptions=True)


def request_for(
    engine: Engine,
    request_id: str,
    prompt: str = PROMPT,
    max_tokens: int = 20,
    *,
    seed: int = 1,
    temperature: float = 1.0,
    **options: Any,
) -> m.GenerationRequest:
    stopping = {
        key: options.pop(key) for key in tuple(options) if key in m.Stopping.__dataclass_fields__
    }
    return m.GenerationRequest(
        request_id=request_id,
        prompt_ids=engine.tokenizer.encode(prompt),
        sampling=m.Sampling(temperature=temperature, seed=seed),
        stopping=m.Stopping(max_tokens=max_tokens, **stopping),
        **options,
    )


def ask(engine: Engine, request_id: str, *args: Any, **options: Any) -> Asked:
    return Asked(engine, request_for(engine, request_id, *args, **options))


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Until it holds; fails after a long while. For what another process does by itself."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 (there is nothing that would tell us)
            await asyncio.sleep(0.005)


async def load_becomes(engine: Engine, *, running: int, waiting: int) -> m.LoadNumbers:
    """The first load with just that many requests."""
    seen: list[m.LoadNumbers] = []

    async def reached() -> bool:
        seen[:] = [await engine.load()]
        return (seen[0].running_requests, seen[0].waiting_requests) == (running, waiting)

    await eventually(reached)
    return seen[0]
