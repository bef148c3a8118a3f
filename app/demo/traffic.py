"""Generations that keep the demo's engine busy, so that a pause can be seen."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable

from app.inference_client import (
    EngineOutOfReach,
    Generation,
    GenerationRefused,
    InferenceClient,
)

PROMPTS = (
    "the bridge rings",
    "full ahead, and then",
    "the captain orders",
    "steady as she goes",
    "fog over the harbour",
    "the chief engineer",
)
BACK_OFF_S = 0.5
# Longer than an engine's longest hold: a request that a pause holds is not given up here.
LONGEST_S = 900.0


@contextlib.asynccontextmanager
async def traffic(
    address: str, token: Callable[[], str], count: int, choose: random.Random
) -> AsyncIterator[None]:
    """Keep `count` generations running while the block runs; each ends and the next begins."""
    numbers = itertools.count(1)
    tasks = [
        asyncio.create_task(
            _one_after_another(address, token, numbers, choose), name=f"traffic-{n}"
        )
        for n in range(count)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one_after_another(
    address: str, token: Callable[[], str], numbers: itertools.count[int], choose: random.Random
) -> None:
    while True:
        generation = Generation(
            request_id=f"traffic-{next(numbers)}-{choose.getrandbits(32):08x}",
            prompt=choose.choice(PROMPTS),
            max_tokens=choose.randint(60, 160),
            temperature=0.8,
        )
        try:
            async with InferenceClient(address, token()) as client:
                async for _ in client.generate(generation, timeout_s=LONGEST_S):
                    pass
        except (GenerationRefused, EngineOutOfReach):
            # Refused by a pause, aborted by an order, or the engine starts again: all in a day's
            # work here, and none of it is for the terminal.
            await asyncio.sleep(BACK_OFF_S)
